"""What multiplies matrices fastest on this processor: ATen's own choice, oneDNN, or tiles of bfloat16 by ourselves.

Of float32, where oneDNN does, it is asked anew for products whose left operand is a transposed view, as the gradients
of weights are: oneDNN copies that operand first, which on some processors takes longer than what its arithmetic saves.
Of bfloat16 ATen's choice is oneDNN with tiles, which copies such operands too, and the bias of an addmm: each is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from aottrain.ir.schedule import OWN_BIASED_PRODUCT, OWN_PRODUCT
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN, Decision, Timing
from aottrain.measure.decisions import decide
from aottrain.measure.stopwatch import Run
from aottrain.measure.timings import timed
from aottrain.ops.products.onednn import biased_product, has_onednn, product, product_by_transpose
from aottrain.ops.products.pieces import has_tiles, own_biased_product, own_product

# Of the product that they are compared by: large enough to be bound by arithmetic, done in milliseconds.
_SIDES = (512, 256, 1024)
_CPU = torch.device("cpu")
_FASTER = 1.05
# Of float32 in pieces: tiles are the part of a core that others on the same processor slow down most, by half and more
# where vectors lose a fifth, and the choice is made once.
_CLEARLY_FASTER = 1.3

# Of the products that say so for transposed left operands: (rows, inner, columns).
_WIDE, _TALL = (256, 1024, 1024), (1024, 1024, 256)

# Of bfloat16, what is asked apart: the left operand is a transposed view; a bias is added; neither.
TRANSPOSED, BIASED, PLAIN = "transposed on the left", "with bias", "plain"

# By the names that a schedule has for them.
PRODUCTS: dict[str, Any] = {
    "onednn": product,
    "onednn transposed": product_by_transpose,
    "onednn with bias": biased_product,
    OWN_PRODUCT: own_product,
    OWN_BIASED_PRODUCT: own_biased_product,
}


def choose_library() -> Decision | None:
    """Which of ATEN, ONEDNN and OWN multiplies. None where ATen does: there is no other, or not the recorded one."""
    if not (has_onednn() or has_tiles()):
        return None
    decision = _fastest_of("float32", _runs, _CLEARLY_FASTER)
    # A record may come from a processor with tiles: without them plain loops stand in, for tests.
    return None if decision.choice == OWN and not has_tiles() else decision


def multiplies_transposed(tall: bool) -> Decision:
    """Which of ATEN and ONEDNN multiplies a transposed view by a matrix, where oneDNN is fastest otherwise. tall: the
    result has many rows for its columns, and oneDNN gives its transpose."""
    key = "float32, transposed on the left, " + ("tall" if tall else "wide")
    runs = partial(_transposed_runs, *(_TALL if tall else _WIDE), product_by_transpose if tall else product)
    return _fastest_of(key, runs)


def multiplies_transposed_by_tiles() -> Decision:
    """Which of ATEN and OWN multiplies a transposed view of float32 by a matrix, where OWN is fastest otherwise."""
    runs = partial(_transposed_runs, *_TALL, own_product, OWN)
    return _fastest_of("float32 by tiles, transposed on the left", runs, _CLEARLY_FASTER)


def multiplies_narrow(form: str) -> Decision | None:
    """Which of ATEN and OWN multiplies matrices of bfloat16. form: TRANSPOSED, BIASED or PLAIN. None where ATen does:
    the processor has no tiles."""
    return _fastest_of(f"bfloat16, {form}", partial(_narrow_runs, form)) if has_tiles() else None


def _narrow_runs(form: str) -> dict[str, Run]:
    """Into memory that is there, as programs call them."""
    rows, inner, columns = _TALL if form == TRANSPOSED else _SIDES
    shapes = (inner, columns), (columns,), (rows, columns)
    b, bias, out = (torch.ones(*shape, dtype=torch.bfloat16) for shape in shapes)
    a = torch.ones(inner, rows, dtype=torch.bfloat16).t() if form == TRANSPOSED else b.new_ones(rows, inner)
    by_aten, by_us = (torch.addmm, own_biased_product) if form == BIASED else (torch.mm, own_product)
    operands = (bias, a, b) if form == BIASED else (a, b)
    return {name: Run(partial(by, *operands, out=out)) for name, by in ((ATEN, by_aten), (OWN, by_us))}


def _fastest_of(key: str, runs: Callable[[], Mapping[str, Run]], own_margin: float = _FASTER) -> Decision:
    choose = partial(fastest, own_margin=own_margin)
    return decide("products", key, ATEN, partial(timed, "products", key, runs, _CPU, compares=True), choose)


def _transposed_runs(rows: int, inner: int, columns: int, by_other: Any, other: str = ONEDNN) -> dict[str, Run]:
    a, b = torch.ones(inner, rows).t(), torch.ones(inner, columns)
    return {ATEN: Run(partial(torch.mm, a, b)), other: Run(partial(by_other, a, b))}


def chosen_library(dtype: torch.dtype) -> str:
    """Which of ATEN, ONEDNN and OWN does the products of a loss head of that type."""
    if dtype not in (torch.float32, torch.bfloat16):
        return ATEN
    decision = choose_library() if dtype == torch.float32 else multiplies_narrow(TRANSPOSED)
    return ATEN if decision is None else str(decision.choice)


def fastest(times: Mapping[str, Timing], own_margin: float = _FASTER) -> str:
    """ATEN where no other is clearly faster. own_margin: how many times as fast OWN must be as each of the others."""
    libraries = {name: timing.seconds for name, timing in times.items() if name != OWN}
    best = min(libraries, key=libraries.__getitem__)
    if OWN in times and libraries[best] > own_margin * times[OWN].seconds:
        return OWN
    return best if libraries[ATEN] > _FASTER * libraries[best] else ATEN


def _runs() -> dict[str, Run]:
    rows, inner, columns = _SIDES
    a, b = torch.ones(rows, inner), torch.ones(inner, columns)
    runs = {ATEN: Run(partial(torch.mm, a, b))}
    if has_onednn():
        runs[ONEDNN] = Run(partial(product, a, b))
    if has_tiles():
        runs[OWN] = Run(partial(own_product, a, b))
    return runs
