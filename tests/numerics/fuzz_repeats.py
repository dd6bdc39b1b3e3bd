"""Statements of random programs that say again what an earlier one said, and sums in which a term stands twice.

What is chosen here is drawn from a stream of its own: without it a seed stands for the program that it always did.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tests.numerics.fuzz_ops import Scope

Body = list[tuple[str, str]]
# Adds a statement, run in a grad mode, and names its result: "" where eager refuses it, or where it is too large.
Run = Callable[[str, str], str]
_FACTORS = ("{a}", "{a} * 3", "{a} * 5", "{a}.sin()", "{a}.square()", "{a} * {a}", "{a}.tanh() * 2")
_SUMS = ("{a} + {b}", "{a} + {b} + {b}", "{b} + {a} + {b}", "{a} * 2 + {b}", "{a} + ({b} + {b})",
         "torch.stack([{a}, {b}, {a}]).sum(0)", "torch.cat([{a}, {b}, {b}])", "{a} - 2 * {b}")  # fmt: skip


class Repeats:
    def __init__(self, seed: int, scope: Scope, run: Run) -> None:
        self.rng = random.Random(f"repeats {seed}")
        self.scope, self.run = scope, run
        self.rate = self.rng.choice([0.0, 0.15, 0.3])
        self.sums: list[str] = []

    def step(self, body: Body) -> None:
        """Sometimes some statements more, after those that there are."""
        if self.rng.random() >= self.rate:
            return
        kinds = {self._again: 4, self._doubled: 0.7, self._pieces: 3, self._rows: 3}
        self.rng.choices(list(kinds), list(kinds.values()))[0](body)

    def results(self) -> list[str]:
        """Sums that the program returns besides its other results."""
        sums = [name for name in self.sums if self.scope.value(name).requires_grad]
        return self.rng.sample(sums, min(len(sums), self.rng.choice([0, 1, 1, 2, 3])))

    def _add(self, text: str) -> str:
        name = self.run("", text)
        self.sums += [name] if name else []
        return name

    def _again(self, body: Body) -> None:
        """A copy of a statement, sometimes of one that reads it, too: with the copy in the place of the original."""
        made = [(mode, *text.split(" = ", 1)) for mode, text in body if re.match(r"v\d+ = ", text)]
        if not made:
            return
        mode, name, statement = self.rng.choice(made[-8:] if self.rng.random() < 0.5 else made)
        copy = self.run(mode, statement)
        if not copy:
            return
        word = re.compile(rf"\b{name}\b")
        readers = [each for each in made if word.search(each[2])]
        if readers and self.rng.random() < 0.6:
            mode, name, statement = self.rng.choice(readers)
            copy = self.run(mode, word.sub(copy, statement)) or copy
        elif self.rng.random() < 0.5:
            how = self.rng.choice(_FACTORS)
            name, copy = self.run("", how.format(a=name)) or name, self.run("", how.format(a=copy)) or copy
        if self.rng.random() < 0.85:
            self._add(self.rng.choice(_SUMS).format(a=name, b=copy))

    def _doubled(self, body: Body) -> None:
        """A value that is added to itself, often many times."""
        name = self._pick(lambda value: value.dtype.is_floating_point)
        for _ in range(self.rng.choice([1, 2, 3, 6, 12])):
            name = name and self._add(f"{name} + {name}")

    def _pieces(self, body: Body) -> None:
        """Slices of one value, some of them taken more than once, all of one shape."""
        name = self._pick(lambda value: value.dtype.is_floating_point and max(value.shape, default=0) > 1)
        if not name:
            return
        shape = self.scope.value(name).shape
        dim = self.rng.choice([i for i, size in enumerate(shape) if size > 1])
        size = shape[dim]
        length = self.rng.choice([0, 1, size // 2])
        before = ":, " * dim
        if length and size % 2 == 0 and self.rng.random() < 0.3:
            places = [f"{before}{start}::2" for start in (0, 1)]
        elif length:
            places = [f"{before}{start}:{start + length}" for start in range(0, size - length + 1, length)]
        else:
            places = [f"{before}{start}" for start in range(size)]
        self._added([f"{name}[{place}]" for place in places], _FACTORS)

    def _rows(self, body: Body) -> None:
        """Products of one weight with rows, some of which it meets more than once."""
        weight = self._pick(lambda value: self._is_matrix(value) and min(value.shape) > 1, latest=False)
        if not weight:
            return
        size, columns = self.scope.value(weight).shape
        dtype = self.scope.value(weight).dtype
        linear = self.rng.random() < 0.4
        inner = columns if linear else size
        rows = self._pick(lambda v: self._is_matrix(v) and v.shape[1] == inner and v.dtype == dtype, latest=False)
        rows = rows if rows and self.rng.random() < 0.8 else weight if linear else f"{weight}.t()"
        count = size if rows == weight else columns if rows == f"{weight}.t()" else self.scope.value(rows).shape[0]
        kept = self.rng.choice([0, 1, 1])
        steps = [f"{rows}[{i}:{i + 1}]" if kept else f"{rows}[{i}]" for i in range(count)]
        self._added([f"F.linear({step}, {weight})" if linear else f"{step} @ {weight}" for step in steps], _FACTORS)

    def _added(self, pieces: Sequence[str], factors: Sequence[str]) -> None:
        """A sum of functions of pieces, of which some come twice, most often in one statement."""
        rng = self.rng
        chosen = list(pieces) if rng.random() < 0.4 else [rng.choice(pieces) for _ in range(rng.randint(1, 4))]
        functions = [rng.choice(factors)] * len(chosen)
        if rng.random() < 0.6:
            functions = [rng.choice(factors) for _ in chosen]
        terms = list(zip(chosen[:8], functions, strict=False))
        for _ in range(rng.randint(1, 3)):
            terms.insert(rng.randint(0, len(terms)), rng.choice(terms))
        if rng.random() < 0.3:
            terms = [(name, how) for piece, how in terms if (name := self.run("", piece))]
        texts = [how.format(a=piece) for piece, how in terms]
        texts = [f"({text}).sum()" for text in texts] if rng.random() < 0.3 else texts
        if texts:
            self._add(" + ".join(texts))

    def _pick(self, fits: Callable[[Tensor], Any], latest: bool = True) -> str:
        """A name, or "". latest: more often of a new value."""
        names = [name for name in self.scope.names if fits(self.scope.value(name))]
        if not names:
            return ""
        grown = [name for name in names if self.scope.value(name).requires_grad]
        names = grown if grown and self.rng.random() < 0.8 else names
        return self.rng.choice(names[-3:] if latest and self.rng.random() < 0.5 else names)

    @staticmethod
    def _is_matrix(value: Tensor) -> bool:
        return value.dtype.is_floating_point and value.dim() == 2 and str(value.dtype) != "torch.float16"
