"""Load generated Triton modules, and launch their kernels.

A module is a real file, as Triton reads a kernel's source from its file: kept in the cache folder by content. Triton
itself keeps what it compiles from it on disk.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aottrain.compat_dispatch import maker_on
from aottrain.errors import ConfigError
from aottrain.runtime.cuda.direct import Direct, direct
from aottrain.runtime.multi_tensor import Run, TensorTables
from aottrain.toolchain.cache import cache_folder, is_own, private_folder, say_once, temporary_folder_error

# Of the tensors, of the sizes of a call where each has its own, and of the numbers of its random draws if it makes any.
Launch = Callable[..., None]
_MOST_INT32 = 1 << 31
_PART = 256  # bytes: pieces of scratch memory start at multiples of it

_ON_A_CPU = (
    "kernel='triton' needs a CUDA device; on a CPU Triton only interprets kernels, slowly and for tests: set "
    "TRITON_INTERPRET=1 before Python starts; allowed there without it: 'aten', 'cpp'"
)
# The interpreter replaces functions of triton.language while a kernel runs: one at a time.
_interpreter = threading.Lock()


def check_device(device: torch.device) -> None:
    """Raises ConfigError where kernels cannot run: no Triton, or a CPU without its interpreter."""
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"kernel='triton' needs a CUDA device, and this program is on {device.type}")
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise ConfigError(f"kernel='triton' needs the package triton, which cannot be imported: {error}") from error
    if device.type == "cpu" and not (triton.knobs.runtime.interpret and _is_interpreted(tl.sum)):
        raise ConfigError(_ON_A_CPU)


def _is_interpreted(function: Any) -> bool:
    """What Triton made of a function depends on the variable when its module was imported."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(function, InterpretedFunction)


def triton_launch(source: str) -> Launch:
    """Runs a module's kernels in order on the parameters' tensors.

    An index out of range is an IndexError under the interpreter. On a device it fails an assertion there, which a
    later call reports, as eager's own kernels do: to look for it at once, the host would have to wait for each kernel.
    """
    module = load_module(source)
    if hasattr(module, "launches"):
        return _sized_launch(module, "fn.check_index(" in source)
    scratch = [(_torch_type(name), count) for name, count in module.SCRATCH]
    checked = "fn.check_index(" in source
    options = {"enable_fp_fusion": False, "debug": checked, "sanitize_overflow": False}
    interpreted = _is_interpreted(module.LAUNCHES[0][0])
    num_buffers = sum(name[0] == "p" for name in module.LAUNCHES[0][3])
    steps: list[tuple[Any, list[int], dict[str, Any]]] = []
    for kernel, programs, warps, names in module.LAUNCHES:
        positions = _positions(names, num_buffers)
        settings = {**options, "num_warps": warps}
        if interpreted:
            steps.append((kernel[(programs, 1, 1)], positions, settings))
        else:
            steps.append((_Prepared(kernel, programs, settings), positions, {}))
    if not interpreted:
        return _Started(steps, scratch)

    def launch(tensors: Sequence[Tensor], draws: Sequence[int] = ()) -> None:
        scratch_tensors = [torch.empty(count, dtype=dtype, device=tensors[0].device) for dtype, count in scratch]
        _interpreted(steps, [*tensors, *draws, *reversed(scratch_tensors)])

    return launch


class _Started:
    """A module's kernels in order. Once Triton has compiled them all for a device, one call starts all of them there;
    what that call does not start, Triton does."""

    def __init__(self, steps: Sequence[tuple[_Prepared, list[int], dict[str, Any]]], scratch: Sequence[Any]):
        self.steps, self.scratch = steps, scratch
        self.parts, self.scratch_bytes = [], 0
        for dtype, count in scratch:
            self.parts.append(self.scratch_bytes)
            self.scratch_bytes += -(-count * dtype.itemsize // _PART) * _PART
        self.by_device: dict[int, Direct | None] = {}
        self.guarded = torch.cuda.device_count() != 1
        self.is_watched = steps[0][0].is_watched

    def __call__(self, tensors: Sequence[Tensor], draws: Sequence[int] = ()) -> None:
        first, done = tensors[0], 0
        index = first.get_device()
        memory = maker_on(first.device)((self.scratch_bytes,), (1,), torch.uint8) if self.scratch_bytes else None
        known = self.by_device.get(index)
        if known is not None and not (self.guarded and index != torch.cuda.current_device()) and not self.is_watched():
            done = known(tensors, 0 if memory is None else memory.data_ptr(), draws)
            if done == known.count:
                return
        scratch: list[Tensor] = []
        if memory is not None:
            pieces = zip(self.parts, self.scratch, strict=True)
            scratch = [memory[at : at + count * dtype.itemsize].view(dtype) for at, (dtype, count) in pieces]
        _launched(self.steps[done:], [*tensors, *draws, *reversed(scratch)])
        if index not in self.by_device:
            self._prepare(index, len(tensors), len(draws))

    def _prepare(self, index: int, num_buffers: int, num_draws: int) -> None:
        compiled = [prepared.compiled.get(index) for prepared, _, _ in self.steps]
        if any(each is None for each in compiled):
            return
        kernels = [
            (each[0], prepared.programs, places)
            for each, (prepared, places, _) in zip(compiled, self.steps, strict=True)
            if each is not None
        ]
        stream = partial(self.steps[0][0].driver.active.get_current_stream, index)
        self.by_device[index] = direct(kernels, num_buffers, num_draws, self.parts, stream)


def _torch_type(name: str) -> torch.dtype:
    return getattr(torch, "bool" if name == "int1" else name)


def _positions(names: Sequence[str], num_buffers: int) -> list[int]:
    """Of a kernel's arguments in the parameters, which are followed by the numbers of draws and by the scratch buffers,
    the last one first."""
    first = {"p": 0, "d": num_buffers}
    return [(-1 - int(name[1:])) if name[0] == "s" else first[name[0]] + int(name[1:]) for name in names]


def _sized_launch(module: ModuleType, checked: bool) -> Launch:
    """Runs a module's kernels for the sizes of each call, from which follow its programs and its scratch memory.

    checked: whether it asserts that indices are in range.
    """
    options = {"enable_fp_fusion": False, "debug": checked, "sanitize_overflow": False}
    prepared: dict[Any, _Prepared] = {}

    def launch(tensors: Sequence[Tensor], sizes: Sequence[int] = (), draws: Sequence[int] = ()) -> None:
        scratch, kernels = module.launches(*sizes)
        device = tensors[0].device
        made = [torch.empty(count, dtype=_torch_type(name), device=device) for name, count in scratch]
        steps: list[Any] = []
        for kernel, programs, warps, names, numbers in kernels:
            positions = _positions(names, len(tensors))
            settings = {**options, "num_warps": warps}
            if _is_interpreted(kernel):
                start = partial(_with_numbers, kernel[(programs, 1, 1)], numbers)
                steps.append((start, positions, settings))
            else:
                if kernel not in prepared:
                    prepared[kernel] = _Prepared(kernel, programs, settings)
                steps.append((partial(prepared[kernel].on_grid, programs, numbers), positions, {}))
        run = _interpreted if _is_interpreted(kernels[0][0]) else _launched
        run(steps, [*tensors, *draws, *reversed(made)])

    return launch


def _with_numbers(start: Any, numbers: Sequence[int], *tensors: Tensor | int, **settings: Any) -> None:
    start(*tensors, *numbers, **settings)


class _Prepared:
    """One kernel on its grid. The first launch on a device goes through Triton, those after it directly.

    At every launch Triton binds the arguments, describes them and looks up what it compiled for such ones, which takes
    several times as long as the launch. Here the types never change: they are the program's. Triton compiles another
    kernel where an address is no multiple of 16, so such a launch goes through Triton again.
    """

    def __init__(self, kernel: Any, programs: int, options: Mapping[str, Any]):
        from triton import knobs
        from triton.runtime.driver import driver

        self.kernel, self.options, self.programs = kernel, options, programs
        # By device: what Triton compiled, what launches it, the function, what Triton packed.
        self.compiled: dict[int, tuple[Any, Any, Any, Any]] = {}
        self.settings, self.driver = knobs.runtime, driver

    def __call__(self, *tensors: Tensor | int) -> None:
        self.on_grid(self.programs, (), *tensors)

    def on_grid(self, programs: int, numbers: Sequence[int], *tensors: Tensor | int) -> None:
        """tensors: after them the numbers of draws; numbers: arguments after these."""
        bits, arguments = 0, list[int]()
        for given in tensors:
            argument = given if isinstance(given, int) else given.data_ptr()
            bits |= argument if argument is not given else 0
            arguments.append(argument)
        index = tensors[0].device.index  # type: ignore[union-attr]  # a kernel takes buffers first
        compiled = self.compiled.get(index)
        small = not numbers or max(numbers) < _MOST_INT32  # a larger one is of another type, and another kernel
        if compiled is None or bits % 16 or not small or self.is_watched():
            kernel = self.kernel[(programs, 1, 1)](*tensors, *numbers, **self.options)
            if bits % 16 == 0 and small and hasattr(kernel, "packed_metadata"):
                self.compiled[index] = kernel, kernel.run, kernel.function, kernel.packed_metadata
            return
        _, start, function, metadata = compiled
        stream = self.driver.active.get_current_stream(index)
        start(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *numbers)

    def is_watched(self) -> bool:
        """Whether a profiler of Triton's wants to hear of each launch."""
        before, after = self.settings.launch_enter_hook, self.settings.launch_exit_hook
        return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def _launched(steps: Sequence[Any], tensors: Sequence[Any]) -> None:
    device = next(given.device for given in reversed(tensors) if not isinstance(given, int))
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launched(steps, tensors)
        return
    for start, positions, options in steps:
        start(*[tensors[position] for position in positions], **options)


@cache
def _integers_wrap() -> None:
    """The interpreter takes no options, and works out in 64 bits whether each sum of integers overflows, which it then
    tells nobody: a quarter of its time."""
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _interpreted(steps: Sequence[Any], tensors: Sequence[Any]) -> None:
    with _interpreter, np.errstate(all="ignore"):
        _integers_wrap()
        for start, positions, options in steps:
            try:
                start(*[tensors[position] for position in positions], **options)
            except Exception as error:
                if _failed_assertion(error):
                    raise IndexError("index out of range in self") from None
                raise


def _failed_assertion(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, AssertionError) and "index out of range" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@cache
def load_module(source: str) -> ModuleType:
    """The module of a generated text, from its file in the cache folder, or in one of this process."""
    name = f"aottrain_triton_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
    path, folder = None, cache_folder()
    if folder is not None:
        try:
            path = _written(folder / "triton" / f"{name}.py", source)
        except OSError as error:
            say_once(f"generated kernels are not kept for other processes: {error}")
    try:
        path = path or _written(private_folder() / f"{name}.py", source)
    except OSError as error:
        raise temporary_folder_error(error) from error
    module = ModuleType(name)
    module.__file__ = str(path)  # where Triton reads its kernels' source
    # Not by an import: that would run bytecode beside the file, which another user may have written.
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def _written(path: Path, source: str) -> Path:
    """The file with this text; written beside it and renamed, so that no process ever reads half of it. Raises OSError,
    also where another user may write it."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with suppress(OSError, ValueError):
        if is_own(path) and path.read_text(encoding="utf-8") == source:
            return path
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        written.write_text(source, encoding="utf-8")
        written.chmod(0o600)
        os.replace(written, path)
    if not is_own(path):
        raise PermissionError(f"others may write to {path.parent}")
    return path


def multi_tensor_run(source: str, tables: TensorTables) -> Run:
    """Launches a module's stages on tables of tensors: one program for each block, one where a stage runs once."""
    check_device(tables.device)
    module = load_module(source)
    run_steps = _interpreted if _is_interpreted(module.STAGES[0][0]) else _launched
    lists, blocks = tables.program.lists, tables.segment_blocks
    steps: list[tuple[Any, dict[str, Any], bool]] = []
    arguments_by_stage: list[list[Any]] = []
    for kernel, over, segment, warps, names in module.STAGES:
        arguments = [tables.device_pointers[lists.index(n)] if n in lists else tables.tables[n] for n in names]
        options = {"enable_fp_fusion": False, "sanitize_overflow": False, "num_warps": warps}
        if over == "blocks":
            programs = blocks[segment + 1] - blocks[segment]
            arguments_by_stage.append([tables.owner, tables.start, tables.counts, blocks[segment], *arguments])
        else:
            programs = 1
            arguments_by_stage.append([tables.num_tensors if over == "all tensors" else tables.num_blocks, *arguments])
        steps.append((kernel[(programs, 1, 1)] if programs else None, options, over == "blocks"))

    def run(_: object, first: int, last: int) -> None:
        alignment = 16 if not (tables.pointers % 16).any() else 1
        for (start, options, over_blocks), arguments in zip(
            steps[first:last], arguments_by_stage[first:last], strict=True
        ):
            if start is not None:
                alignment_option = {"ALIGNMENT": alignment} if over_blocks else {}
                run_steps([(start, range(len(arguments)), {**options, **alignment_option})], arguments)

    return run
