"""The names that a caller of the compiler may choose from: each list is defined here and nowhere else.

The configuration adds what a file of conf/ needs besides (aottrain/config/choices.py).
"""

from __future__ import annotations

STRATEGIES = ("budget", "min_cut", "save_all", "checkpoint", "recompute_all")
COSTS = ("roofline", "measured")
KERNELS = ("auto", "cpp", "triton", "aten", "inductor")
# Those that the compiler itself writes.
GENERATED = ("cpp", "triton")
# Of an optimizer's step; the last is plain torch: slow, the definition.
STEP_KERNELS = ("auto", *GENERATED, "evaluate")
# Those that it leaves to others.
FOREIGN = ("aten", "inductor")
LOSS_HEADS = ("auto", "chunked", "whole")
CAPTURES = ("dynamo", "trace")
RNGS = ("philox", "eager")
ON_UNSUPPORTED = ("eager", "error")
