"""What the pages of runs do: runs are shown and hidden, the table sorts and filters, a plot's values are read off.

It takes everything from the elements' attributes and writes text only, so that no name can become markup. Without it
the pages are complete; only these tools do nothing.
"""

from __future__ import annotations

SCRIPT = r"""
"use strict";
(() => {
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const off = new Set(), filtered = new Set();
  const hidden = run => off.has(run) || filtered.has(run);
  const show = () => {
    for (const part of all("[data-run]")) {
      if (part.matches(".curves button")) part.parentNode.classList.toggle("hidden", filtered.has(part.dataset.run));
      else if (part.matches("tr")) part.classList.toggle("hidden", filtered.has(part.dataset.run));
      else part.classList.toggle("hidden", hidden(part.dataset.run));
    }
    for (const folded of filtered.size ? all(".facts details") : []) folded.open = true;
    for (const count of all("[data-count]")) {
      const rows = all("table.sortable tbody tr");
      count.textContent = `${rows.filter(row => !row.classList.contains("hidden")).length} of ${rows.length}`;
    }
  };
  let hot = null;
  const warm = run => {
    if (run === hot) return;
    hot = run;
    for (const part of all("[data-run]")) part.classList.toggle("hot", run !== null && part.dataset.run === run);
    for (const path of all(".lines:not(.layered) .curve.hot")) path.parentNode.append(path);
  };
  for (const part of all(".curves button, tr[data-run], .row[data-run]")) {
    part.addEventListener("pointerenter", () => warm(part.dataset.run));
    part.addEventListener("pointerleave", () => warm(null));
    part.addEventListener("focusin", () => warm(part.dataset.run));
    part.addEventListener("focusout", () => warm(null));
  }
  for (const button of all(".curves button")) button.addEventListener("click", () => {
    const run = button.dataset.run;
    if (off.has(run)) off.delete(run); else off.add(run);
    button.setAttribute("aria-pressed", String(!off.has(run)));
    show();
  });

  const tables = all("table.sortable");
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
  };
  const sort = (table, column, down) => {
    all("th", table).forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const body = table.tBodies[0], rows = [...body.rows];
    const text = new Intl.Collator(undefined, {numeric: true});
    const absent = one => one === "" || Number.isNaN(one);
    rows.sort((a, b) => {
      const x = value(a, column), y = value(b, column);
      if (absent(x) || absent(y)) return absent(x) - absent(y);
      const order = typeof x === "number" && typeof y === "number" ? x - y : text.compare(String(x), String(y));
      return down ? -order : order;
    });
    body.append(...rows);
  };
  for (const table of tables) {
    const heads = all("th", table);
    heads.forEach((head, i) => {
      const button = head.querySelector("button");
      const turn = () => sort(table, i, head.getAttribute("aria-sort") === "ascending");
      if (button) button.addEventListener("click", turn);
    });
  }
  for (const choice of all("select[data-sort]")) choice.addEventListener("change", () => {
    const [column, down] = choice.value.split(" ");
    if (column !== "") for (const table of tables) sort(table, Number(column), down === "down");
  });
  for (const input of all("input[data-filter]")) input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    filtered.clear();
    for (const row of all("table.sortable tbody tr")) {
      const text = row.textContent.toLowerCase();
      if (!words.every(word => text.includes(word))) filtered.add(row.dataset.run);
    }
    for (const other of all("input[data-filter]")) if (other !== input) other.value = input.value;
    show();
  });

  const digits = x => Math.abs(x) >= 99.95 ? x.toFixed(0) : Math.abs(x) >= 9.995 ? x.toFixed(1) : x.toFixed(2);
  const plain = x => String(Number(x.toPrecision(4)));
  const write = (unit, x) => {
    if (unit === "count") return String(Math.round(x));
    if (unit === "seconds") return x >= 1 || x === 0 ? digits(x) + " s" : x >= 1e-3 ? digits(x * 1e3) + " ms"
      : (x * 1e6).toFixed(0) + " us";
    if (unit !== "bytes") return plain(x);
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (x >= 1000 && power < units.length - 1) { x /= 1024; power += 1; }
    return (power ? digits(x) : x.toFixed(0)) + " " + units[power];
  };
  const places = path => {
    if (path.places) return path.places;
    const found = [];
    for (const part of path.getAttribute("d").split("M").slice(1)) {
      const numbers = part.replace("l", " ").match(/-?\d+/g).map(Number);
      let [x, y] = numbers;
      found.push([x, y]);
      for (let i = 4; i < numbers.length; i += 2) {
        x += numbers[i]; y += numbers[i + 1];
        found.push([x, y]);
      }
    }
    return path.places = found;
  };
  const nearest = (path, x) => {
    const list = places(path);
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle][0] < x) low = middle; else high = middle;
    }
    return x - list[low][0] < list[high][0] - x ? low : high;
  };
  const make = (svg, name) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    svg.append(path);
    return path;
  };
  for (const figure of all("figure.lines")) {
    const area = figure.querySelector(".area"), svg = area.querySelector("svg"), out = figure.querySelector(".readout");
    const data = figure.dataset, [x0, x1, y0, y1] = ["x0", "x1", "y0", "y1"].map(name => Number(data[name]));
    let line = null, spot = null, curve = null, index = 0;
    const curves = () => all(".curve", svg).filter(path => !path.classList.contains("hidden"));
    const tell = () => {
      const [x, y] = places(curve)[index];
      line = line || make(svg, "at");
      spot = spot || make(svg, "spot");
      line.setAttribute("d", `M${x} 0V1000`);
      spot.setAttribute("d", `M${x} ${y}l0 0`);
      svg.append(line, spot);
      const part = 1 - y / 1000, along = x0 + (x1 - x0) * x / 2000;
      const up = data.log ? y0 * Math.pow(y1 / y0, part) : y0 + (y1 - y0) * part;
      out.textContent = `${curve.dataset.name}: ${write(data.y, up)} at ${data.xname} ${write(data.x, along)}`;
      warm(curve.dataset.run);
    };
    const leave = () => {
      for (const part of [line, spot]) if (part) part.remove();
      line = spot = curve = null;
      out.textContent = "";
      warm(null);
    };
    const move = event => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * 2000, y = (event.clientY - box.top) / box.height * 1000;
      let best = Infinity;
      for (const path of curves()) {
        const at = nearest(path, x), place = places(path)[at];
        const far = Math.abs(place[1] - y) + Math.abs(place[0] - x);
        if (far < best) [best, curve, index] = [far, path, at];
      }
      if (curve) tell();
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", leave);
    area.addEventListener("blur", leave);
    area.addEventListener("keydown", event => {
      const list = curves();
      if (!list.length || !event.key.startsWith("Arrow") && event.key !== "Home" && event.key !== "End") return;
      event.preventDefault();
      if (!curve) { curve = list[0]; index = 0; return tell(); }
      const jump = event.shiftKey ? 10 : 1, last = places(curve).length - 1;
      if (event.key === "ArrowRight") index = Math.min(last, index + jump);
      else if (event.key === "ArrowLeft") index = Math.max(0, index - jump);
      else if (event.key === "Home") index = 0;
      else if (event.key === "End") index = last;
      else {
        const order = list.sort((a, b) => a.dataset.run - b.dataset.run), here = order.indexOf(curve);
        const x = places(curve)[index][0], step = event.key === "ArrowDown" ? 1 : -1;
        curve = order[(here + step + order.length) % order.length];
        index = nearest(curve, x);
      }
      tell();
    });
  }
  const follow = document.querySelector("input[data-follow]");
  if (follow) {
    const told = document.querySelector("[data-followed]");
    const stop = event => {
      if (event.target !== follow && follow.checked) {
        follow.checked = false;
        told.textContent = "(stopped, for the page is used)";
      }
    };
    for (const kind of ["click", "input", "keydown"]) document.querySelector("main").addEventListener(kind, stop);
    follow.addEventListener("change", () => { told.textContent = ""; });
    const again = () => {
      if (!follow.checked) return;
      fetch(location.href, {cache: "no-store"}).then(answer => {
        if (answer.ok && follow.checked) location.reload();
      }).catch(() => {
        follow.checked = false;
        follow.disabled = true;
        told.textContent = "(watching has ended; this is the last page)";
        clearInterval(timer);
      });
    };
    const timer = setInterval(again, 1000 * Number(follow.dataset.follow));
  }
  show();
})();
"""
