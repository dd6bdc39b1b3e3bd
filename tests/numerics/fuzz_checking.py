"""Runs a random program eagerly and compiled, and compares all that a caller can see: see `Verdict`."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import aottrain
from aottrain.errors import UnsupportedError
from tests.numerics.fuzzing import Program, minimise, without_stale_writes
from tests.numerics.rounding_noise import RandomRounding, within_noise
from tests.numerics.tolerance import RTOL_ATOL

# A fault of the compiler is an error, as in all tests: what runs operator by operator instead is equal to eager, too.
os.environ["AOTTRAIN_FAULTS"] = "raise"

EQUAL, ROUNDED, STRIDED = "equal", "equal but for rounding", "equal but for strides"
PARTLY = "equal but for what a part of the results does not reach"
EAGER, REFUSED, LENIENT, WRONG = "ran eagerly", "refused", "without an error or a NaN of eager's", "WRONG"
NOISY = "as far off as rounding noise"
THEIRS = "wrong by TorchDynamo alone, too"
_NUM_NOISY_RUNS = 6
_COARSE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half()": torch.float16}
# As eager says: "... modified by an inplace operation", and of what chunk, split or unbind gave "... is a view and its
# base or another view of its base has been modified inplace".
_STALE = re.compile(r"modified by an inplace|another view of its base has been modified inplace")
_NO_SPARSE_FORM = (
    "doesn't support converting to a different layout",
    "from the 'SparseCPU' backend",
    "is not implemented for sparse tensors",
    "Sparse division requires",
)
_AGAIN = "Trying to backward through the graph a second time"


@dataclass
class Observation:
    """What one run showed."""

    seen: list[tuple[str, Any, Tensor | None]] = field(default_factory=list)
    """In order: (what, flags, value)."""
    error: str = ""
    """How it ended."""
    reorders: bool = False
    """Whether gradients may round differently."""
    coarsest: torch.dtype = torch.float64
    """The coarsest type in which these may be added up."""
    let_go: set[str] = field(default_factory=set)
    """Arguments and results that the last backward did not reach, and backwards of other results would have: it let
    them go, or would have if it had not stopped at the inputs that it was given."""
    stopped: bool = False
    written: set[str] = field(default_factory=set)
    """Arguments that the program wrote to: they are its results from then on."""

    def see(self, what: str, value: Tensor | None) -> None:
        shown = None if value is None else _frozen(value)
        self.seen.append((what, None if value is None else _flags(value), shown))

    def see_all(self, what: str, values: Sequence[Tensor | None]) -> None:
        """Several as one, so that another number of them shifts nothing; their strides may be any."""
        shown = [_frozen(value).flatten() for value in values if value is not None]
        if len({value.dtype for value in shown}) > 1:
            shown = [torch.view_as_real(value.to(torch.complex64)).flatten() for value in shown]
        flags = [None if value is None else _flags(value)[:2] for value in values]
        self.seen.append((what, flags, torch.cat(shown) if shown else None))


@dataclass(frozen=True)
class Verdict:
    """EQUAL: the same bits. ROUNDED: the same but for the order in which gradients were summed, where a view, an input
    or a tangent of other strides lets it differ. EAGER: ran eagerly and was counted. REFUSED: an error that says why.
    LENIENT: the caller writes to a value that eager has saved, which raises; the compiled backward has its own copy. Or
    eager has no sparse form of an operator that follows a sum of a sparse gradient and one that does not come. Or the
    gradient of a product that is not finite, where eager divides.
    STRIDED: the same, but some value has other strides. PARTLY: the same, but where a program has several results and
    the backward begins at some: it is one node of autograd's graph, so what an argument that only the others need was
    computed from is let go; or a second backward goes through operators that save nothing, which eager allows.
    NOISY: where kernels may
    round otherwise: values differ, but no farther than eager's own do where each op rounds at random. THEIRS: what
    TorchDynamo does differs from eager where no compiler is behind it. WRONG: all else."""

    kind: str
    detail: str = ""


def _frozen(value: Tensor) -> Tensor:
    value = value.detach()
    return value.clone(memory_format=torch.contiguous_format) if value.layout == torch.strided else value.to_dense()


def _flags(value: Tensor) -> Any:
    if value.layout != torch.strided:
        return value.dtype, tuple(value.shape), value.layout, value.requires_grad, value.is_leaf
    strides = tuple(s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1) if value.numel() else ()
    return value.dtype, tuple(value.shape), strides, value.requires_grad, value.is_leaf


def observe(
    program: Any, compiled: Callable[[Any], Any] | None, philox: bool = False, noise: int | None = None
) -> Observation:
    """One run of the whole training code around the model: eager where `compiled` is None. noise: the seed of rounding
    at random."""
    found = Observation()
    torch.manual_seed(program.seed)
    with warnings.catch_warnings(), nullcontext() if noise is None else RandomRounding(noise):
        warnings.simplefilter("ignore")
        model = program.namespace["Model"]()
        target = model if compiled is None else compiled(model)
        for _ in range(program.calls):
            try:
                _train(program, model, target, found, philox)
            except Exception as error:
                found.error = f"{type(error).__name__}: {error}"
                break
    return found


def _train(program: Any, model: Any, target: Any, found: Observation, philox: bool) -> None:
    args, made = program.namespace["arguments"]()
    made = list({id(value): value for value in made if isinstance(value, Tensor)}.values())
    versions = [value._version for value in args]
    with torch.set_grad_enabled(program.grad_mode), aottrain.philox_eager() if philox else nullcontext():
        out = target(*args)
    for i, value in enumerate(out):
        found.see(f"output {i}", value)
    _see_aliases(out, [*args, *model.parameters(), *model.buffers()], found)
    written = [value._version > before for value, before in zip(args, versions, strict=True)]
    found.seen.append(("written inputs", written, None))
    found.written = {f"args[{i}]" for i, new in enumerate(written) if new}
    hooked: dict[str, list[Tensor | None]] = {}
    for text in program.after:
        for value in (*out, *args):
            value.grad_fn  # noqa: B018  # asked for first: torch's register_hook crashes where a write has made it stale
        exec(text, {"out": out, "args": args, "seen": partial(_hook, hooked)})
    found.reorders |= any(value.requires_grad and _shares(value, [*args, *out]) for value in out) or bool(program.after)
    found.reorders |= program.branches
    found.coarsest = next((kind for word, kind in _COARSE.items() if word in program.text), torch.float64)
    results = [*out, *(value for value, new in zip(args, written, strict=True) if new)]
    _backward(program, results, args, [*made, *model.parameters()], found)
    for name, gradients in hooked.items():
        found.see_all(f"gradients at {name}", gradients)
    _backward_of_arguments(args, made, found)
    for name, values in (
        ("output", out),
        ("argument", made),
        ("parameter", model.parameters()),
        ("buffer", model.buffers()),
    ):
        for i, value in enumerate(values):
            found.see(f"{name} {i} afterwards", value)
            if value.retains_grad:
                found.see(f"gradient retained by {name} {i}", value.grad)
    found.see("generator", torch.get_rng_state())
    if torch.cuda.is_initialized():
        found.see("generator of the device", torch.cuda.get_rng_state())


def _hook(
    hooked: dict[str, list[Tensor | None]], name: str, factor: float | None = None
) -> Callable[[Tensor | None], Tensor | None]:
    gradients = hooked.setdefault(name, [])

    def hook(gradient: Tensor | None) -> Tensor | None:
        gradients.append(None if gradient is None else gradient.clone())
        return None if gradient is None or factor is None else gradient * factor

    return hook


def _shares(value: Tensor, others: list[Tensor]) -> bool:
    key = value.untyped_storage().data_ptr()
    return value._is_view() or sum(other.untyped_storage().data_ptr() == key for other in others) > 1


def _see_aliases(out: Any, inputs: list[Tensor], found: Observation) -> None:
    known: dict[int, int] = {}
    pattern = []
    for i, value in enumerate([*inputs, *out]):
        storage = value.untyped_storage()
        pattern.append((known.setdefault(storage.data_ptr() if storage.nbytes() else -i, i), value.storage_offset()))
    # A fresh output may start anywhere in its memory, if none but fresh outputs can see that memory.
    shared = [first for first, _ in pattern]
    starts = {first: min(at for key, at in pattern if key == first) if first >= len(inputs) else 0 for first in shared}
    places = [(first, at - starts[first]) for first, at in pattern]
    found.seen.append(("aliases", [p if shared.count(p[0]) > 1 else i for i, p in enumerate(places)], None))


def _backward(
    program: Any, results: list[Tensor], args: list[Tensor], leaves: list[Tensor], found: Observation
) -> None:
    """results: what the program returns, and after it what it has written to."""
    out = results[: len(program.tangents)]
    pairs = [(value, kind) for value, kind in zip(out, program.tangents, strict=True) if value.requires_grad]
    pairs = [pair for pair in pairs if pair[1]] or [(value, "own") for value, _ in pairs]
    leaves = [value for value in leaves if value.requires_grad and value.is_leaf]
    if not pairs or not leaves:
        return
    found.reorders |= any(kind != "own" for _, kind in pairs)
    # Where gradients are asked for by name, what several results send to one value is added up result by result.
    found.reorders |= len(pairs) > 1 and program.backward in ("grad", "between", "inputs")
    # A float64 number beside a float32 tensor is a tensor of float32: its gradient is a sum in float32, then float64.
    found.coarsest = max([found.coarsest, *(value.dtype.to_real() for value, _ in pairs)], key=_epsilon)
    tangents = [_tangent(value, kind, i) for i, (value, kind) in enumerate(pairs)]
    outputs = [value for value, _ in pairs]
    groups = [(outputs, tangents)] * (2 if program.backward == "twice" else 1)
    if program.backward == "separately":
        groups = [([o], [t]) for o, t in zip(outputs, tangents, strict=True)]
    found.let_go |= _reached(results, args, out) - _reached(groups[-1][0], args, out)
    if program.backward in ("grad", "between"):
        # Between: from one result to another, too.
        wanted = leaves + [value for value in out if value.requires_grad] * (program.backward == "between")
        gradients = torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    elif program.backward == "inputs":
        inputs = leaves[:1] + [value for value in out if value.requires_grad]
        torch.autograd.backward(outputs, tangents, inputs=inputs)
        found.stopped = True
        gradients = [value.grad for value in leaves + inputs]
    else:
        for i, (some, theirs) in enumerate(groups):
            torch.autograd.backward(some, theirs, retain_graph=i + 1 < len(groups))
        gradients = [value.grad for value in leaves]
    for i, value in enumerate(gradients):
        found.see(f"gradient {i}", value)


def _epsilon(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps


def _reached(results: Sequence[Tensor], args: list[Tensor], out: list[Tensor]) -> set[str]:
    """Which arguments and results a backward of these results arrives at."""
    nodes = [value.grad_fn for value in results if value.grad_fn is not None]
    known = set(nodes)
    while nodes:
        new = {node for node, _ in nodes.pop().next_functions if node is not None} - known
        known |= new
        nodes += new
    leaves = {id(node.variable) for node in known if hasattr(node, "variable")}
    named = {f"{name}[{i}]": v for name, values in (("args", args), ("out", out)) for i, v in enumerate(values)}
    return {name for name, value in named.items() if value.grad_fn in known or id(value) in leaves}


def _backward_of_arguments(args: list[Tensor], made: list[Tensor], found: Observation) -> None:
    """What the caller computed an argument from may be gone through once: now, unless the program's backward did."""
    leaves = [value for value in made if value.requires_grad and value.is_leaf]
    for i, value in enumerate(args):
        if value.requires_grad and not value.is_leaf:
            try:
                gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
                found.see_all(f"gradients behind args[{i}]", gradients)
            except RuntimeError as error:
                found.seen.append((f"gradients behind args[{i}]", str(error)[: len(_AGAIN)], None))


def _tangent(value: Tensor, kind: str, seed: int) -> Tensor:
    numbers = torch.linspace(-9.0, 7.0 + seed, value.numel(), dtype=torch.float64).sin().view(value.shape)
    if value.is_complex():
        numbers = torch.complex(numbers, numbers * 0.5)
    numbers = numbers.to(value.dtype)
    if kind == "expanded":
        return numbers.flatten()[:1].sum().expand(value.shape)
    if kind == "transposed" and value.dim() > 1:
        return numbers.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "gaps" and value.dim():
        return numbers.repeat_interleave(2, -1)[..., ::2]
    return torch.empty_like(value, requires_grad=False).copy_(numbers)


def check(program: Program, frontend: str = "trace", kernel: str = "aten") -> Verdict:
    """Run both and compare. A call that ran eagerly has to be plain eager's; then no Philox is expected of it.

    Generated kernels may round otherwise than eager's; with them a result that is close is no error.
    """
    return _check(_runnable(program), frontend, kernel)


def legal(program: Program) -> Program:
    """The program of a seed as it is checked: one in ten of those that eager refuses may keep what it refuses."""
    if program.seed % 10 == 0:
        return program
    return without_stale_writes(program, lambda each: bool(_STALE.search(observe(_runnable(each), None).error)))


def raises(program: Program) -> bool:
    """Whether eager does, in either of its runs."""
    return bool(observe(_runnable(program), None).error)


def minimised(program: Program, frontend: str = "trace", kernel: str = "aten") -> Program:
    """The smallest program found that is wrong in the same way."""

    def way(verdict: Verdict) -> str:
        return verdict.kind + re.sub(r"[\d\W]+", "", verdict.detail)[:12]

    wanted = way(check(program, frontend, kernel))

    def fails(candidate: Program) -> bool:
        try:
            return way(check(candidate, frontend, kernel)) == wanted
        except Exception:  # what is left is no program any more
            return False

    return minimise(program, fails)


def _runnable(program: Program) -> Any:
    # Eager's gradient of a product looks for zeros first, which a trace cannot. That of a jvp adds zeros that have no
    # memory, in place or not, as references to the other term happen to be: that decides the sign of a zero.
    divides = "prod(" in program.source
    branches = divides or "func.jvp(" in program.source
    traces = "torch.cond(" in program.source  # in eager, too, by TorchDynamo
    return SimpleNamespace(
        **vars(program),
        namespace=program.build(),
        draws=program.draws,
        branches=branches,
        divides=divides,
        traces=traces,
        text=program.source,
    )


def check_source(model: Any, arguments: Any, frontend: str = "trace", seed: int = 0, **settings: Any) -> None:
    """The same for a program that was printed; raises AssertionError where it is wrong."""
    verdict = _check(
        SimpleNamespace(
            seed=seed,
            namespace={"Model": model, "arguments": arguments},
            draws=True,
            branches=False,
            divides=False,
            traces=True,
            text="",
            **settings,
        ),
        frontend,
    )
    assert verdict.kind != WRONG, verdict.detail


def _check(program: Any, frontend: str, kernel: str = "aten") -> Verdict:
    made: list[Any] = []

    def compiled(model: Any) -> Any:
        plan = {"partition": program.plan} if isinstance(program.plan, str) else {"budget": program.plan}
        made.append(aottrain.compile(model, capture=frontend, rng=program.rng, kernel=kernel, **plan))
        return made[0]

    torch._dynamo.reset()
    untouched = observe(program, None).error if program.traces else ""
    got = observe(program, compiled)
    ran_eagerly = bool(made and made[0].report.num_fallbacks)
    if program.draws and program.rng == "philox" and made and made[0].report.graph_breaks:
        # What is drawn between two graphs are eager's numbers, and no eager run has both kinds.
        return _check(SimpleNamespace(**{**vars(program), "rng": "eager"}), frontend, kernel)
    wanted = observe(program, None, philox=program.draws and program.rng == "philox" and not ran_eagerly)
    afterwards = observe(program, None).error if program.traces else ""
    if afterwards != untouched:
        return Verdict(WRONG, f"then eager itself: {afterwards or 'no error'}; before: {untouched or 'no error'}")
    # Several graphs are several nodes: what they send to one value is added up graph by graph.
    wanted.reorders |= kernel != "aten" or bool(made and made[0].report.graph_breaks)
    if made and made[0].report.graph_breaks:
        # Results of the first graph that the second one never uses are results of one node with the others.
        wanted.let_go |= {what.split()[-1] for what, _, _ in wanted.seen if what.startswith("gradients behind")}
    difference, kinds = compare(wanted, got, rounding=kernel != "aten")
    noisy = False
    if WRONG in kinds and kernel != "aten":
        philox = program.draws and program.rng == "philox" and not ran_eagerly
        noise = [observe(program, None, philox, seed) for seed in range(_NUM_NOISY_RUNS)]
        difference, kinds = compare_beside_noise(wanted, got, noise)
        noisy = WRONG not in kinds
    if ran_eagerly and not difference:
        return Verdict(EAGER, made[0].report.fallbacks[0].reason)
    if not difference:
        return Verdict(EQUAL, wanted.error)
    if got.error and not wanted.error and (UnsupportedError.__name__ in got.error or _STALE.search(got.error)):
        return Verdict(REFUSED, got.error)
    no_sparse_form = any(text in wanted.error for text in _NO_SPARSE_FORM)
    if not got.error and ((program.after and _STALE.search(wanted.error)) or no_sparse_form):
        return Verdict(LENIENT, wanted.error)
    if noisy:
        return Verdict(NOISY, difference)
    if program.divides and "gradient" in difference and WRONG in kinds and _is_infinite(wanted):
        return Verdict(LENIENT, difference)
    if PARTLY in kinds and kinds <= {PARTLY, STRIDED, *[ROUNDED] * wanted.reorders}:
        return Verdict(PARTLY, difference)
    if kinds == {STRIDED} or (WRONG not in kinds and wanted.reorders):
        return Verdict(STRIDED if kinds == {STRIDED} else ROUNDED, difference)
    if frontend == "dynamo" and _difference_by_dynamo_alone(program).partition(":")[0] == difference.partition(":")[0]:
        return Verdict(THEIRS, difference)
    return Verdict(WRONG, difference)


def _is_infinite(run: Observation) -> bool:
    """Whether something that it showed is not finite."""
    shown = [value for _, _, value in run.seen if value is not None and value.is_floating_point()]
    return not all(value.isfinite().all() for value in shown)


def _difference_by_dynamo_alone(program: Any) -> str:
    """Without a compiler behind it, in words as `compare` says it."""
    torch._dynamo.reset()
    found, kinds = compare(
        observe(program, None), observe(program, lambda model: torch.compile(model, backend="eager"))
    )
    return found if WRONG in kinds else ""


def compare(
    wanted: Observation, got: Observation, rounding: bool = False, noise: Sequence[Observation] = ()
) -> tuple[str, set[str]]:
    """The first difference in words ("" where there is none), and the kinds of all: ROUNDED, STRIDED, PARTLY, WRONG.

    rounding: whether outputs, too, may be rounded otherwise, not gradients alone. noise: runs that say how far."""
    if _kind_of_error(wanted) != _kind_of_error(got):
        return f"eager: {wanted.error or 'no error'}; compiled: {got.error or 'no error'}", {WRONG}
    if len(wanted.seen) != len(got.seen):
        return f"{len(wanted.seen)} observations became {len(got.seen)}", {WRONG}
    alike = [other.seen for other in noise if len(other.seen) == len(wanted.seen)]
    # A backward that ends in an error has come to some results in eager; the node of all results ends it before.
    # Where inputs are named, that node leads to all of them: what the program wrote to gets its gradient on the way.
    ended = any(flags == _AGAIN for _, flags, _ in wanted.seen + got.seen * wanted.stopped)
    found = [
        (f"{a[0]}: {text}", kind)
        for i, (a, b) in enumerate(zip(wanted.seen, got.seen, strict=True))
        if not (ended and a[0].startswith("gradient retained"))
        for text, kind in _differ(a, b, rounding, [seen[i] for seen in alike], _excused(wanted, a, b), wanted.coarsest)
    ]
    found.sort(key=lambda pair: pair[1] != WRONG)
    return found[0][0] if found else "", {kind for _, kind in found}


def compare_beside_noise(wanted: Observation, got: Observation, noise: Sequence[Observation]) -> tuple[str, set[str]]:
    """`compare` where rounding differs. Where an assertion is about a last bit (a sum that is 0 or 1e-16), some of
    eager's noisy runs end as this one did, and it is compared with them."""
    alike = [run for run in noise if _kind_of_error(run) == _kind_of_error(got)]
    if _kind_of_error(wanted) == _kind_of_error(got) or not alike:
        return compare(wanted, got, rounding=True, noise=noise)
    difference, kinds = compare(alike[0], got, rounding=True, noise=alike)
    return difference or f"a last bit decides about {wanted.error or got.error}", kinds


def _kind_of_error(run: Observation) -> str:
    return run.error.partition(":")[0]


def _excused(wanted: Observation, a: Any, b: Any) -> bool:
    """Whether b shows what is behind an argument let go by the last backward, as in PARTLY."""
    name = a[0].split()[-1]
    if not a[0].startswith("gradients behind"):
        return False
    # Eager goes twice through operators that save nothing, as from an argument that was filled to what it had been; a
    # program is one node, which says of any second backward that the graph is gone.
    return name in wanted.let_go or ((wanted.stopped or name in wanted.written) and b[1] == _AGAIN)


def _differ(
    wanted: Any, got: Any, rounding: bool, noise: Sequence[Any], partly: bool, coarsest: torch.dtype
) -> Iterator[tuple[str, str]]:
    what, flags, value = wanted
    _, other_flags, other = got
    if flags != other_flags:
        strides_alone = flags and other_flags and flags[:2] == other_flags[:2] and flags[3:] == other_flags[3:]
        yield f"{flags} became {other_flags}", PARTLY if partly else STRIDED if strides_alone else WRONG
    if value is not None and other is not None and value.shape == other.shape and not same_bits(value, other):
        may_round = value.dtype == other.dtype and (rounding or "gradient" in what or "afterwards" in what)
        noisy = [third for _, _, third in noise if third is not None and third.shape == value.shape]
        close = may_round and (is_close(value, other, coarsest) or (bool(noisy) and within_noise(value, other, noisy)))
        yield f"{value.flatten()[:6].tolist()} became {other.flatten()[:6].tolist()}", ROUNDED if close else WRONG


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN, whatever its payload; 0 does not equal -0."""
    if a.is_complex():
        return same_bits(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and bool((((a == b) & (a.signbit() == b.signbit())) | nan).all())


def is_close(a: Tensor, b: Tensor, coarsest: torch.dtype = torch.float64) -> bool:
    """coarsest: the type of values on the way to these."""
    if a.is_complex():
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    if a.dtype not in RTOL_ATOL:
        return same_bits(a, b)
    scale = float(a.double().abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    (rtol, atol), (coarse, least) = RTOL_ATOL[a.dtype], RTOL_ATOL[coarsest]
    rtol, atol = max(10 * rtol, coarse), max(10 * atol, least)
    return torch.allclose(a, b, rtol=rtol, atol=atol * max(scale, 1.0), equal_nan=True)
