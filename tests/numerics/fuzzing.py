"""Random training programs as data: generated, rendered as Python that can be run, and cut down to what still fails.

A program is a list of statements. Generation runs each in eager as it is added, so that the next one is chosen knowing
shapes, types and layouts; what eager refuses is thrown away.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.fuzz_ops import DTYPES, ERRORS, KINDS, RAISED, RANDOM_KINDS, UNARY, Scope
from tests.numerics.fuzz_repeats import Repeats

MAX_NUMEL = 400
GRAD_MODES = ("", "torch.no_grad()", "torch.enable_grad()")


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers that depend on nothing but the arguments: normal, small integers, or coin flips."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator).to(dtype)


@dataclass(frozen=True)
class Program:
    """state: statements of the module's constructor; setup: statements that make the arguments; body: pairs (grad
    mode, statement) of the forward; outputs: names that it returns; after: statements of the caller on the outputs
    `out` before it goes backward, where `seen(name, factor)` is a hook that notes its gradient, and changes it;
    tangents: for each output the layout of its tangent, or "" where it goes unused; backward: how gradients are taken;
    plan, rng: how it is compiled.
    """

    seed: int
    state: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    body: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    tangents: tuple[str, ...] = ()
    backward: str = "grad"
    grad_mode: bool = True
    plan: Any = "min_cut"
    rng: str = "philox"
    calls: int = 2
    device: str = "cpu"

    @property
    def arguments(self) -> list[str]:
        return [name for text in self.setup if (name := assigned(text)).startswith("x")]

    @property
    def draws(self) -> bool:
        return bool(re.search("rand|dropout|normal|uniform|bernoulli|exponential|multinomial|rrelu", self.source, re.I))

    @property
    def source(self) -> str:
        """The model and its arguments as Python."""
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {text}" for text in self.state]
        lines += ["", f"    def forward({', '.join(['self', *self.arguments])}):"]
        mode = ""
        for here, text in self.body:
            if here and here != mode:
                lines.append(f"        with {here}:")
            mode = here
            lines.append(f"        {'    ' if here else ''}{text}")
        lines += [f"        return [{', '.join(self.outputs)}]", "", "def arguments():"]
        lines += [f"    {text}" for text in self.setup]
        lines += [f"    return [{', '.join(self.arguments)}], list(locals().values())"]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        """A script that checks this one program."""
        settings = [
            f"{name}={getattr(self, name)!r}" for name in ("after", "tangents", "backward", "grad_mode", "calls")
        ]
        return (
            "import torch, torch.nn.functional as F\nfrom torch import nn\n"
            "from tests.numerics.fuzz_checking import check_source\nfrom tests.numerics.fuzzing import values\n\n"
            f"{self.source}\n# seed {self.seed}\n"
            f"check_source(Model, arguments, {', '.join(settings)}, plan={self.plan!r}, rng={self.rng!r})\n"
        )

    def build(self) -> dict[str, Any]:
        """What its source defines, on its device."""
        namespace: dict[str, Any] = {**NAMESPACE, "__name__": "program"}
        elsewhere = self.device != "cpu"
        if elsewhere:
            namespace |= {"torch": OnDevice(self.device), "values": lambda *of: values(*of).to(self.device)}
        exec(compile(self.source, f"<program {self.seed}>", "exec"), namespace)
        model = namespace["Model"]
        return {**namespace, "Model": lambda: model().to(self.device)} if elsewhere else namespace


class OnDevice:
    """torch, but for the functions that make tensors of numbers alone, which make them on a device."""

    _MAKES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
              "zeros")  # fmt: skip

    def __init__(self, device: str):
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return partial(found, device=self._device) if name in self._MAKES else found


AFTER = (
    "out[{i}].mul_(2)", "out[{i}].add_(1)", "out[{i}].zero_()", "out[{i}].detach().mul_(3)", "out[{i}][..., :1] = 0.5",
    "args[0].detach().add_(1)", "out[{i}].view(-1)[:1].neg_()",
)  # fmt: skip
HOOKS = (
    "{a}.register_hook(seen({name!r}))", "{a}.register_hook(seen({name!r}, 2))", "{a}.retain_grad()",
)  # fmt: skip
# How gradients are taken, and how often so.
BACKWARDS = {"grad": 5, "accumulate": 3, "twice": 1, "separately": 1, "inputs": 1, "between": 2}
NAMESPACE: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "values": values}


def assigned(text: str) -> str:
    """The name that a statement assigns, or ""."""
    found = re.match(r"([\w.]+) = ", text)
    return found[1] if found else ""


class _Generator:
    def __init__(self, seed: int, repeats: bool):
        self.rng = rng = random.Random(seed)
        self.seed = seed
        self.scope = Scope(rng)
        self.repeats = Repeats(seed, self.scope, self._run_named) if repeats else None
        self.draws = rng.random() < 0.35
        self.body: list[tuple[str, str]] = []
        self.protected: set[int] = set()  # storages that are written under no_grad, if at all
        self.shared: set[int] = set()  # storages of several inputs: writing one is refused
        self.raised = False  # whether a statement raises: nothing of the program is seen but that

    def program(self) -> Program:
        rng = self.rng
        state, setup = self._state(), self._setup()
        self._enter(state, setup)
        self._detach_an_input(setup)
        wanted, tries = rng.randint(5, 40), 0
        while len(self.body) < wanted and tries < 400 and not self.raised:
            tries += 1
            self._step()
            if self.repeats is not None and not self.raised:
                self.repeats.step(self.body)
        outputs = self._outputs()
        plan = rng.choice(
            ["save_all", "min_cut", "recompute_all", 0.0, round(rng.random(), 2), round(rng.random() / 4, 2)]
        )
        program = Program(self.seed, state, setup, tuple(self.body), outputs, plan=plan)
        grad_mode = rng.random() < 0.95
        return replace(
            program,
            after=self._after(outputs, program.arguments, grad_mode),
            tangents=tuple(
                rng.choices(["own", "", "expanded", "transposed", "gaps"], [10, 2, 1, 1, 1])[0] for _ in outputs
            ),
            backward=rng.choices(list(BACKWARDS), list(BACKWARDS.values()))[0],
            grad_mode=grad_mode,
            rng=rng.choice(["philox", "eager"]) if program.draws else "philox",
        )

    def _state(self) -> tuple[str, ...]:
        rng, lines = self.rng, []
        if rng.random() < 0.45:
            return ()
        for i in range(rng.randint(0, 2)):
            lines.append(f"self.p{i} = nn.Parameter({self._values(grad=True)})")
        for i in range(rng.randint(0, 2)):
            lines.append(f"self.register_buffer('b{i}', {self._values()})")
        layers = ["nn.Linear(4, 3)", "nn.Linear(6, 6)", "nn.BatchNorm1d(4)", "nn.BatchNorm2d(3)", "nn.LayerNorm(6)",
                  "nn.Conv1d(3, 2, 2)", "nn.Conv2d(3, 4, 3, padding=1)", "nn.Embedding(7, 4)"]  # fmt: skip
        layers += ["nn.Dropout(0.3)"] if self.draws else []
        lines += [f"self.layer{i} = {rng.choice(layers)}" for i in range(rng.randint(0, 2))]
        lines += ["self.table = nn.Embedding(7, 4, sparse=True)"] if rng.random() < 0.25 else []
        return tuple(lines)

    def _values(self, grad: bool = False) -> str:
        rng = self.rng
        shape = rng.choice([(), (4,), (6,), (4, 6), (3, 4), (6, 6), (1, 4), (2, 3, 4), (2, 3, 4, 4), (3, 3), (2, 4)])
        weights = [20, 4, 2, 1, 3, 1, 1, 1]
        dtype = rng.choices(DTYPES[:4], weights[:4])[0] if grad else rng.choices(DTYPES, weights)[0]
        seed = rng.randrange(10**4)
        layout = rng.random()
        if layout < 0.12 and len(shape) > 1:
            return f"values({(*shape[:-2], shape[-1], shape[-2])}, torch.{dtype}, {seed}).transpose(-1, -2)"
        if layout < 0.2 and shape:
            return f"values({(*shape[:-1], 2 * shape[-1])}, torch.{dtype}, {seed})[..., ::2]"
        if layout < 0.26 and shape:
            return f"values({(shape[0] + 2, *shape[1:])}, torch.{dtype}, {seed})[1:-1]"
        if layout < 0.3 and not grad:
            return f"values((1, *{shape}), torch.{dtype}, {seed}).expand(2, *{shape})"
        if layout < 0.5 and len(shape) == 4:
            return f"values({shape}, torch.{dtype}, {seed}).contiguous(memory_format=torch.channels_last)"
        return f"values({shape}, torch.{dtype}, {seed})"

    def _setup(self) -> tuple[str, ...]:
        rng = self.rng
        lines = [f"x0 = {self._values(grad=True)}.requires_grad_()"]
        for i in range(1, rng.randint(2, 5)):
            before = f"x{rng.randrange(i)}"
            kind = rng.choices(["leaf", "plain", "computed", "same", "view", "overlap"], [6, 7, 3, 0.4, 0.6, 0.3])[0]
            if kind == "leaf":
                lines.append(f"x{i} = {self._values(grad=True)}.requires_grad_()")
            elif kind == "plain":
                lines.append(f"x{i} = {self._values()}")
            elif kind == "computed":
                how = rng.choice([" * 1", ".sin()"])
                lines += [f"l{i} = {self._values(grad=True)}.requires_grad_()", f"x{i} = l{i}{how}"]
            elif kind == "same":
                lines.append(f"x{i} = {before}")
            elif kind == "view":
                lines.append(f"x{i} = {before}" + rng.choice([".detach()", "[...]", ".unsqueeze(0)", ".flatten()"]))
            else:
                lines += [f"l{i} = {self._values(grad=True)}.flatten()", f"x{i} = l{i}[:2]"]
                lines += [f"x{i}{i} = l{i}[1:]"]
        return tuple(lines)

    def _enter(self, state: tuple[str, ...], setup: tuple[str, ...]) -> None:
        torch.manual_seed(self.seed)
        program = Program(self.seed, state, setup)
        namespace = program.build()
        model = namespace["Model"]()
        arguments, _ = namespace["arguments"]()
        scope = self.scope
        scope.env = {**NAMESPACE, "self": model, **dict(zip(program.arguments, arguments, strict=True))}
        scope.names = [*program.arguments, *(f"self.{name}" for name in (*model._parameters, *model._buffers))]
        storages = [_storage(scope.value(name)) for name in scope.names]
        self.shared = {key for key in storages if storages.count(key) > 1}
        self.views = {_storage(scope.value(name)) for name in scope.names if scope.value(name)._is_view()}
        for name in scope.names:
            if not scope.value(name).requires_grad or scope.value(name).is_leaf:
                self.protected.add(_storage(scope.value(name)))
        self.layers = [f"self.{name}({{a}})" for name in model._modules]

    def _detach_an_input(self, setup: tuple[str, ...]) -> None:
        """Sometimes nothing but the value of an input is used: what it was computed from is the caller's alone."""
        computed = [assigned(text) for text in setup if re.match(r"x\d = l\d(?!\[)", text)]
        if computed and self.rng.random() < 0.3:
            name = self.rng.choice(computed)
            self._run("", f"v{len(self.body)} = {name}.detach()")
            self.scope.names.remove(name)

    def _step(self) -> None:
        rng = self.rng
        kinds = {**KINDS, **(RANDOM_KINDS if self.draws else {})}
        if self.layers:
            kinds["layer"] = (2, self.layers)
        kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        text = self.scope.fill(rng.choice(kinds[kind][1]))
        if text is None:
            return
        mode = rng.choices(GRAD_MODES, [12, 1, 0.3])[0]
        if "w" in kind and kind.startswith("writ"):
            mode = self._mode_of_write(text, mode)
            if mode == "refused":
                return
        elif not kind.endswith("effect"):
            text = f"v{len(self.body)} = {text}"
        self._run(mode, text)

    def _run_named(self, mode: str, text: str) -> str:
        """Its name, or "" where it cannot be."""
        name = f"v{len(self.body)}"
        self._run(mode, f"{name} = {text}")
        return name if name in self.scope.env else ""

    def _mode_of_write(self, text: str, mode: str) -> str:
        name = re.search(r"[xv]\d+|self\.[pb]\d", text)
        assert name is not None
        value = self.scope.value(name[0])
        key = _storage(value)
        refused = key in self.shared or (key in self.protected and value.requires_grad and key in self.views)
        if (refused or self._overlaps(key)) and self.rng.random() < 0.97:
            return "refused"
        if key in self.protected:
            return "torch.no_grad()" if self.rng.random() < 0.6 else "refused"
        return mode

    def _overlaps(self, key: int) -> bool:
        """Whether a tensor of this storage shows one element twice."""
        values = [value for name in self.scope.names if _storage(value := self.scope.value(name)) == key]
        return any(_span(value) < value.numel() for value in values)

    def _run(self, mode: str, text: str) -> None:
        scope = self.scope
        local = dict(scope.env)
        state = torch.get_rng_state()
        inside = f"with {mode}:\n    {text}" if mode else text
        try:
            exec(inside, local)
        except Exception as error:
            torch.set_rng_state(state)
            on_purpose = isinstance(error, ERRORS) and not assigned(text) and RAISED.search(f"{error} {text}")
            self.raised = bool(on_purpose) and self.rng.random() < 0.2
            self.body += [(mode, text)] if self.raised else []
            return
        name = assigned(text)
        if name:
            value = local[name]
            wrong = not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() > MAX_NUMEL
            if wrong or (value.numel() == 0 and self.rng.random() < 0.9) or value.is_conj() or value.is_neg():
                return
            scope.env[name] = value
            scope.names.append(name)
        self.body.append((mode, text))

    def _outputs(self) -> tuple[str, ...]:
        rng, names = self.rng, self.scope.names
        if rng.random() < 0.95:
            names = [name for name in names if _storage(self.scope.value(name)) not in self.shared] or names
        made = [name for name in names if name.startswith("v")] or names
        found = [made[-rng.randint(1, min(6, len(made)))] for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.1:
            found.append(rng.choice(names))
        if rng.random() < 0.9:
            found = list(dict.fromkeys(found))
        if not any(self.scope.value(name).requires_grad for name in found):
            found += [name for name in reversed(made) if self.scope.value(name).requires_grad][:1]
        if self.repeats is not None:
            found += [name for name in self.repeats.results() if name not in found]
        return tuple(found)

    def _after(self, outputs: tuple[str, ...], arguments: list[str], grad_mode: bool) -> tuple[str, ...]:
        rng = self.rng
        statements = []
        if rng.random() < 0.25:
            statements = [rng.choice(AFTER).format(i=rng.randrange(len(outputs))) for _ in range(rng.randint(1, 2))]
        named = [(f"out[{i}]", name) for i, name in enumerate(outputs)]
        named += [(f"args[{i}]", name) for i, name in enumerate(arguments)]
        named = [text for text, name in named if self.scope.value(name).requires_grad]
        if grad_mode and named and rng.random() < 0.3:
            hooked = [rng.choice(named) for _ in range(rng.randint(1, 3))]
            statements += [rng.choice(HOOKS).format(a=a, name=f"{i} of {a}") for i, a in enumerate(hooked)]
            rng.shuffle(statements)
        return tuple(statements)


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _span(value: Tensor) -> int:
    """Elements of memory between the first and the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def generate(seed: int, repeats: bool = False) -> Program:
    """The program of a seed: the same in every process. repeats: whether it may say things again (fuzz_repeats.py);
    one that does is another program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Generator(seed, repeats).program()


def without_stale_writes(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program without the last writes, as far as `fails`: eager has saved some of what they write."""
    for part in ("after", "body"):
        for i in reversed(range(len(getattr(program, part)))):
            if not fails(program):
                return program
            statement = getattr(program, part)[i]
            if not assigned(statement if isinstance(statement, str) else statement[1]):
                program = _without(program, part, i, i + 1)
    return program


def minimise(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: no single statement can be dropped, or replaced by one of its operands."""
    changed = True
    while changed:
        changed = False
        for candidate in _simpler(program):
            if fails(candidate):
                program, changed = candidate, True
                break
    return program


def _simpler(program: Program) -> Any:
    """Smaller programs, the boldest first."""
    for part in ("body", "after", "state", "setup"):
        length = len(getattr(program, part))
        size = length
        while size:
            for start in range(0, length, size):
                yield _without(program, part, start, start + size)
            size //= 2
    for i in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield _without(_without(program, "outputs", i, i + 1), "tangents", i, i + 1)
    for i, (mode, text) in enumerate(program.body):
        name = assigned(text)
        for operand in sorted(set(re.findall(r"\b(?:[xv]\d+|self\.[pb]\d)\b", text)) - {name}) if name else ():
            if text != f"{name} = {operand}":
                yield replace(program, body=(*program.body[:i], (mode, f"{name} = {operand}"), *program.body[i + 1 :]))
        if mode:
            yield replace(program, body=(*program.body[:i], ("", text), *program.body[i + 1 :]))
    settings = {"calls": 1, "plan": "save_all", "backward": "grad", "tangents": ("own",) * len(program.tangents)}
    for key, value in settings.items():
        if getattr(program, key) != value:
            yield replace(program, **{key: value})


def _without(program: Program, part: str, start: int, end: int) -> Program:
    kept = getattr(program, part)
    return replace(program, **{part: kept[:start] + kept[end:]})


__all__ = ["UNARY", "Program", "generate", "minimise", "values", "without_stale_writes"]
