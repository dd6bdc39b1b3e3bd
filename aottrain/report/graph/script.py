"""What the pictures do in a page: zoom, pan, search, and tell of a step. It writes text only, so that no name can
become markup; without it each picture stands in a frame that scrolls."""

from __future__ import annotations

SCRIPT = r"""
"use strict";
(() => {
  for (const figure of document.querySelectorAll("figure.picture")) {
    const canvas = figure.querySelector(".canvas"), svg = canvas.querySelector("svg");
    const told = figure.querySelector(".told"), hint = told.textContent;
    const steps = [...svg.querySelectorAll(".step")], flows = [...svg.querySelectorAll(".flow")];
    const number = step => Number(step.dataset.i);
    steps.sort((a, b) => number(a) - number(b));
    const texts = steps.map(step => step.querySelector("title").textContent.toLowerCase());
    const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
    let scale = 1, chosen = -1, found = [];
    const resize = to => {
      scale = Math.min(Math.max(to, 0.08), 4);
      svg.setAttribute("width", width * scale);
      svg.setAttribute("height", height * scale);
    };
    const zoom = (factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) => {
      const left = (canvas.scrollLeft + x) / scale, top = (canvas.scrollTop + y) / scale;
      resize(scale * factor);
      canvas.scrollTo(left * scale - x, top * scale - y);
    };
    const fit = () => {
      if (!canvas.clientWidth) return;
      resize(Math.min(Math.max((canvas.clientWidth - 4) / width, 0.5), 1));
      const top = Math.min(...steps.slice(0, 1).map(step => step.getBoundingClientRect().top));
      canvas.scrollBy(0, top - canvas.getBoundingClientRect().top - 60);
    };
    const center = step => {
      const box = step.getBoundingClientRect(), frame = canvas.getBoundingClientRect();
      canvas.scrollBy(box.left - frame.left - (frame.width - box.width) / 2,
        box.top - frame.top - (frame.height - box.height) / 2);
    };
    const choose = (index, move = true) => {
      chosen = index;
      const step = steps[index], id = step ? step.dataset.i : null;
      for (const each of steps) each.classList.toggle("hot", each === step);
      for (const flow of flows) {
        const ends = (flow.dataset.e || "").split(" ");
        flow.classList.toggle("hot", id !== null && (flow.dataset.s === id || ends.includes(id)));
      }
      svg.classList.toggle("chosen", id !== null);
      told.textContent = step ? step.querySelector("title").textContent : hint;
      if (step && move) center(step);
    };
    const input = figure.querySelector("input"), count = figure.querySelector("output");
    const search = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      found = words.length ? texts.flatMap((text, i) => words.every(word => text.includes(word)) ? [i] : []) : [];
      steps.forEach((step, i) => step.classList.toggle("match", found.includes(i)));
      svg.classList.toggle("searching", words.length > 0);
      count.textContent = words.length ? `${found.length} of ${steps.length}` : "";
    };
    input.addEventListener("input", () => { search(); if (found.length) choose(found[0]); else choose(-1); });
    input.addEventListener("keydown", event => {
      if (event.key === "Enter" && found.length) {
        event.preventDefault();
        const here = found.indexOf(chosen), by = event.shiftKey ? -1 : 1;
        choose(found[(here + by + found.length) % found.length]);
      }
    });
    for (const button of figure.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => {
      const factor = Number(button.dataset.zoom);
      if (factor) zoom(factor); else fit();
    });
    canvas.addEventListener("keydown", event => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
      if (step && !event.shiftKey) choose(chosen < 0 ? 0 : (chosen + step + steps.length) % steps.length);
      else if (step) canvas.scrollBy(60 * ((event.key === "ArrowRight") - (event.key === "ArrowLeft")),
        60 * ((event.key === "ArrowDown") - (event.key === "ArrowUp")));
      else if (event.key === "+" || event.key === "=") zoom(1.3);
      else if (event.key === "-") zoom(1 / 1.3);
      else if (event.key === "0") fit();
      else if (event.key === "Escape") choose(-1);
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const frame = canvas.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), event.clientX - frame.left, event.clientY - frame.top);
    }, {passive: false});
    let held = null, moved = false;
    canvas.addEventListener("pointerdown", event => {
      moved = false;
      if (event.pointerType !== "mouse" || event.button) return;
      held = {x: event.clientX, y: event.clientY, left: canvas.scrollLeft, top: canvas.scrollTop};
    });
    addEventListener("pointermove", event => {
      if (!held) return;
      const x = event.clientX - held.x, y = event.clientY - held.y;
      moved = moved || Math.abs(x) + Math.abs(y) > 4;
      canvas.classList.toggle("held", moved);
      if (moved) canvas.scrollTo(held.left - x, held.top - y);
    });
    addEventListener("pointerup", () => { held = null; canvas.classList.remove("held"); });
    svg.addEventListener("click", event => {
      const step = event.target.closest(".step");
      if (!moved) choose(step ? steps.indexOf(step) : -1, false);
    });
    const around = figure.closest("details");
    if (around) around.addEventListener("toggle", () => { if (around.open) fit(); });
    fit();
  }
})();
"""
