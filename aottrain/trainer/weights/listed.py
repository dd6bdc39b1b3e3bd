"""What `latest.json` says of the checkpoints in a folder, and which of them stay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aottrain.config.extensions.metrics import Judge
from aottrain.config.run import TrainerConfig

NAME = re.compile(r"step_(\d{8,})\.pt")
WEIGHTS = re.compile(r"step_(\d{8,})(?:\.\d+)?\.safetensors")
PIECES = re.compile(r"step_(\d{8,})(?:\.\d+)?")
"""A folder that has the weights, and the optimizer's state, in pieces."""
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A checkpoint of a folder."""

    step: int
    sha256: str | None = None
    """Of its file; None where latest.json does not say it."""
    held_out_loss: float | None = None
    """After that step; None where it was not measured, or is not finite."""
    weights: str | None = None
    """The file of its weights, or the folder of its pieces; None where they are in the other file, or where latest.json
    does not say it."""
    weights_sha256: str | None = None
    pieces: Mapping[str, str] | None = None
    """The checksums of the files in that folder, by their names."""
    metrics: Mapping[str, float] | None = None
    """The recipe's own held-out metrics after that step, as far as they are finite; None where there are none."""

    @property
    def file(self) -> str:
        return f"step_{self.step:08d}.pt"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Entry:
        """What latest.json says of it. AttributeError, KeyError, TypeError, ValueError: that is not what `save`
        writes."""
        optional = ("held_out_loss", "weights", "weights_sha256", "pieces", "metrics")  # an older list lacks some
        entry = cls(values["step"], values["sha256"], *map(values.get, optional))
        is_step = type(entry.step) is int and entry.step >= 0
        loss = [] if entry.held_out_loss is None else [entry.held_out_loss]
        are_figures = all(type(value) is float for value in (*loss, *(entry.metrics or {}).values()))
        kind = WEIGHTS if entry.pieces is None else PIECES
        is_named = values["file"] == entry.file and (entry.weights is None or kind.fullmatch(entry.weights))
        sums = [entry.weights_sha256] if entry.pieces is None else [*entry.pieces.values()]
        sums = [entry.sha256, *([] if entry.weights is None else sums)]
        if not (is_step and are_figures and is_named and all(SHA256.fullmatch(one or "") for one in sums)):
            raise ValueError("damaged")
        return entry


def best_of(entries: Sequence[Entry], keep: TrainerConfig) -> Entry | None:
    """The one with the best held-out figure, as trainer.judge_by says; of equal ones the earliest. None where no such
    figure is known."""
    judge = Judge.of(keep.judge_by)
    known = [(entry, judge.figure(entry.held_out_loss, entry.metrics)) for entry in entries]
    ranked = [(-value if judge.is_highest else value, entry.step, entry) for entry, value in known if value is not None]
    return min(ranked, key=lambda item: item[:2])[2] if ranked else None


def kept_of(entries: Sequence[Entry], keep: TrainerConfig) -> list[Entry]:
    """Those of `entries`, the newest first, that stay as trainer.keep_last, keep_every and keep_best say."""
    best = best_of(entries, keep) if keep.keep_best else None
    every = keep.keep_every
    return [
        entry
        for age, entry in enumerate(entries)
        if age < keep.keep_last or entry == best or (every and entry.step % every == 0)
    ]
