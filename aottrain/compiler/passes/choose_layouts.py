"""choose_layouts: convolutions, and the ops between them, in channels_last where the libraries are faster that way.

Only values within the program change, and each region of it by itself: where images are large channels_last saves a
copy before and after each convolution, where they are small and weights are large it costs copies of these. Inputs are
copied once where a convolution reads them, and each result has the strides that eager gives it. What pays is measured:
each distinct convolution once in either layout, and each copy at the border of a region, kept on disk. Without a clock
the bytes decide that a library copies to turn images around, and on a GPU whether it has kernels that want them so.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.measured_calls import call_of
from aottrain.compiler.lowering.rules import LOW_PRECISION
from aottrain.compiler.passes.layouts.regions import Prices, across_reads, cheapest_regions
from aottrain.compiler.passes.layouts.rewriting import Rewriting, alike, images_of, in_channels_last, is_candidate
from aottrain.ir.graph import JointGraph, OutputKind, calls, info, required_spec
from aottrain.ir.kernels.registers import BUSY_PROGRAMS
from aottrain.ir.settings.decisions import AS_GIVEN, CHANNELS_LAST, SOURCES, Decision, Timing
from aottrain.ir.tensor import TensorSpec
from aottrain.ir.units import format_seconds
from aottrain.measure.calls import OpCall, convolutions_round
from aottrain.measure.decisions import Timed, decide
from aottrain.measure.rates import Rates, rates_for
from aottrain.measure.timings import calls_timed

aten = torch.ops.aten

# Of the time of the convolutions: less is not worth another rounding.
_GAIN = 0.03
# What is measured: all as eager has it, all in channels_last, and what is between.
_REGIONS = "by region"
# So many programs are looked at: copies are measured that stand in one of these, and the others have a price by bytes.
_MAX_CUTS = 4
_NANOSECONDS = 1e9
# Launches of a batch norm on a GPU beyond the one that it is for images as given, whose rows are its channels. In
# channels_last its mean and its sums are over rows: each has a kernel more that adds up what programs found, and what
# follows from the sums is another.
_MORE_LAUNCHES = {"aottrain.batch_spread.default": 5, "aottrain.batch_norm_sums.default": 2}
# As given a channel is one program's, which passes over its images so often in the launches that each stands for.
_PASSES = {"aottrain.batch_spread.default": 3, "aottrain.batch_norm_sums.default": 4}
# Convolutions of one channel each in halves: as given they take as much longer as reading and writing their images so
# often. For 64 of 128 x 32 x 32 on an H200 the forward took 82 us, 16 in channels_last, and reading and writing 8.
_DEPTHWISE_PASSES = 8


@dataclass(frozen=True)
class LayoutChoice:
    """In which layout a program's convolutions run."""

    graph: fx.Graph | None = None
    """The program with its images in channels_last; None where it stays as it was."""
    reason: str = ""
    """In words, for the report; empty where there is no convolution."""


def choose_layouts(joint: JointGraph) -> LayoutChoice:
    """The decision for all convolutions of a program, forward and backward."""
    convolutions = [node for node in calls(joint.graph) if is_candidate(node)]
    if not convolutions:
        return LayoutChoice()
    laid = Rewriting(joint.graph, frozenset(joint.signature.output_indices(OutputKind.TOTAL))).run()
    chooser = _Chooser(laid, convolutions)
    decision = decide("layouts", _decision_key(convolutions), chooser.by_model(), chooser.timed, chooser.prefer)
    choice, count = str(decision.choice), f"{len(convolutions)} convolutions, forward and backward,"
    if choice == AS_GIVEN:
        return LayoutChoice(None, f"{count} as the program has them: {_times_text(decision)}")
    part = "" if choice == CHANNELS_LAST else f"{len(_convolutions_of(choice, convolutions))} of "
    return LayoutChoice(chooser.program(choice).graph, f"{part}{count} in channels_last: {_times_text(decision)}")


def _decision_key(convolutions: Sequence[fx.Node]) -> str:
    """The same for programs of the same convolutions in the same order."""
    texts = [str(call and call.plain_text) for call in map(call_of, convolutions)]
    return f"{len(convolutions)} convolutions {hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:12]}"


def _choice_of(chosen: Collection[fx.Node], convolutions: Sequence[fx.Node]) -> str:
    """`channels_last`, `as given`, or `channels_last: 0-6, 9`, by the place of each convolution in the program."""
    places = [i for i, node in enumerate(convolutions) if node in chosen]
    if len(places) in (0, len(convolutions)):
        return CHANNELS_LAST if places else AS_GIVEN
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0])]
    return f"{CHANNELS_LAST}: " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _convolutions_of(choice: str, convolutions: Sequence[fx.Node]) -> list[fx.Node]:
    """Those that the choice names."""
    if choice in (AS_GIVEN, CHANNELS_LAST):
        return list(convolutions) if choice == CHANNELS_LAST else []
    runs = re.findall(r"(\d+)(?:-(\d+))?", choice.removeprefix(CHANNELS_LAST))
    places = {i for first, last in runs for i in range(int(first), int(last or first) + 1)}
    return [node for i, node in enumerate(convolutions) if i in places]


def _times_text(decision: Decision) -> str:
    if not decision.times:
        return SOURCES[decision.source]
    seconds = {name: format_seconds(timing.seconds) for name, timing in decision.times.items()}
    whole, unchanged = seconds[CHANNELS_LAST], seconds[AS_GIVEN]
    busy = f"; {SOURCES[decision.source]}" if decision.source in ("busy", "shared") else ""
    if decision.choice in (AS_GIVEN, CHANNELS_LAST) or _REGIONS not in seconds:
        return f"{whole} with copies, as given {unchanged}{busy}"
    return f"{seconds[_REGIONS]} with copies, all {whole}, as given {unchanged}{busy}"


def _prefer(times: Mapping[str, Timing]) -> str:
    """Of the three: all as given, all in channels_last, by region."""
    best = min((name for name in times if name != AS_GIVEN), key=lambda name: times[name].seconds)
    is_worth_it = times[best].seconds <= (1 - _GAIN) * times[AS_GIVEN].seconds
    return best if is_worth_it else AS_GIVEN


@dataclass
class _Chooser:
    """Finds the cheapest regions of one program."""

    laid: Rewriting
    """The program with all convolutions in channels_last."""
    convolutions: Sequence[fx.Node]
    _regions: str = CHANNELS_LAST
    """The cheapest choice that `timed` has found."""
    _copies: dict[Any, Timed] = field(default_factory=dict)
    """Of what was measured of copies at borders, by `_copy_key`."""
    _programs: dict[str, Rewriting] = field(default_factory=dict)

    def program(self, choice: str) -> Rewriting:
        """What these convolutions are in channels_last in, and between them whatever makes the copies smallest."""
        if choice == CHANNELS_LAST and not self._more_launches:
            return self.laid
        if choice not in self._programs:
            chosen = set(_convolutions_of(choice, self.convolutions))
            known: dict[fx.Node, Prices] = {
                node: (None, 0) if node in chosen else (0, None) for node in self.convolutions
            } | self._norms_in_bytes
            calls = cheapest_regions(self.laid, known, lambda value, into: required_spec(value).nbytes)
            self._programs[choice] = Rewriting(self.laid.source, self.laid.inner, calls, self.laid).run()
        return self._programs[choice]

    def by_model(self) -> str:
        """The choice without a clock: by the bytes that each layout copies."""
        prices: dict[fx.Node, Prices] = {node: _model_prices(node) for node in self.convolutions}
        prices |= self._norms_in_bytes
        return self._cheapest(prices, lambda value, into: _model_copy_price(value))

    def _cheapest(self, prices: Mapping[fx.Node, Prices], copy_price: Callable[[fx.Node, bool], int]) -> str:
        return _choice_of(cheapest_regions(self.laid, prices, copy_price), self.convolutions)

    def timed(self) -> Timed:
        """The convolutions as they are, all in channels_last, and in the cheapest regions, each with the copies that it
        takes. The spread is the largest; nothing is measured where one call is not."""
        alone = {node: _convolution_timed(node) for node in self.convolutions}
        if (without := _without_times(alone.values())) is not None:
            return without
        prices: dict[fx.Node, Prices] = {node: _prices(timed.times) for node, timed in alone.items()}
        of_a_byte = _NANOSECONDS / self._rates.bytes_per_s
        for norm, (given, laid) in self._norms_in_bytes.items():
            prices[norm] = round((given or 0) * of_a_byte), round((laid or 0) * of_a_byte)
        found = self._regions = CHANNELS_LAST
        for _ in range(_MAX_CUTS):
            self._regions = found
            self._measure_copies(found)
            if (without := _without_times(self._copies.values())) is not None:
                return without
            found = self._cheapest(prices, self._copy_price)
            if found in (self._regions, AS_GIVEN):
                break
        idle = sum(given or 0 for given, _ in self._norms_in_bytes.values()) / self._rates.bytes_per_s
        times = {AS_GIVEN: _total([*(timed.times[AS_GIVEN] for timed in alone.values()), Timing(idle)])}
        times[CHANNELS_LAST] = self._total(alone, CHANNELS_LAST)
        if self._regions != CHANNELS_LAST:
            times[_REGIONS] = self._total(alone, self._regions)
        return Timed(times, _source([*alone.values(), *self._copies.values()]))

    def prefer(self, times: Mapping[str, Timing]) -> str:
        best = _prefer(times)
        return self._regions if best == _REGIONS else best

    def _total(self, alone: Mapping[fx.Node, Timed], choice: str) -> Timing:
        chosen = set(_convolutions_of(choice, self.convolutions))
        each = [timed.times[CHANNELS_LAST if node in chosen else AS_GIVEN] for node, timed in alone.items()]
        program = self.program(choice)
        laid = program.chosen
        norms = sum(price[laid is None or norm in laid] or 0 for norm, price in self._norms_in_bytes.items())
        each += [Timing(norms / self._rates.bytes_per_s)] if norms else []
        copies = program.copies.values()
        each += [self._copies[self._copy_key(*copy)].times[CHANNELS_LAST] for copy in copies]
        across = across_reads(self.laid, laid)
        return _total([*each, *(Timing(self._copy_price(value, True) / _NANOSECONDS) for value in across)])

    @cached_property
    def _more_launches(self) -> dict[fx.Node, int]:
        """Of the norms on a GPU that may be in channels_last."""
        norms = [node for node in calls(self.laid.source) if info(node).name in _MORE_LAUNCHES]
        images = {norm: norm.all_input_nodes[0] for norm in norms if required_spec(norm.args[0]).device.type == "cuda"}
        return {n: _MORE_LAUNCHES[info(n).name] for n, x in images.items() if not alike(self.laid.new[x], x)}

    @property
    def _rates(self) -> Rates:
        return rates_for(required_spec(self.convolutions[0].args[0]).device)

    @cached_property
    def _norms_in_bytes(self) -> dict[fx.Node, Prices]:
        """The prices of norms on a GPU: bytes that could be moved while it is not kept busy, or starts more kernels."""
        each = self._rates.op_overhead_s * self._rates.bytes_per_s if self._more_launches else 0.0
        return {norm: (_idle_bytes(norm), round(count * each)) for norm, count in self._more_launches.items()}

    def _measure_copies(self, choice: str) -> None:
        """Those in the program, each kind once."""
        for node, copy in self.program(choice).copies.items():
            if (key := self._copy_key(*copy)) not in self._copies:
                self._copies[key] = _copy_timed(node)

    def _copy_key(self, value: fx.Node, into: bool) -> tuple[TensorSpec, TensorSpec, bool]:
        return required_spec(value), required_spec(self.laid.new[value]), into

    def _copy_price(self, value: fx.Node, into: bool) -> int:
        known = self._copies.get(self._copy_key(value, into), Timed()).times
        return round(_NANOSECONDS * (known[CHANNELS_LAST].seconds if known else _copy_seconds(value)))


def _idle_bytes(norm: fx.Node) -> int:
    """Of a norm of images as given."""
    images = required_spec(norm.args[0])
    passes = _PASSES[info(norm).name] * images.nbytes
    return round(passes * max(0.0, BUSY_PROGRAMS / images.shape[1] - 1))


def _source(seen: Collection[Timed]) -> str:
    """The least certain."""
    sources = {timed.source for timed in seen}
    return next(source for source in ("model", "busy", "shared", "measured", "cache") if source in sources)


def _without_times(seen: Collection[Timed]) -> Timed | None:
    """What is answered where one of the calls has no time that can be added to others."""
    if not seen or (_source(seen) != "model" and all(timed.times for timed in seen)):
        return None
    return Timed() if _source(seen) == "model" else Timed(source=_source(seen))


def _prices(times: Mapping[str, Timing]) -> Prices:
    """In nanoseconds: in channels_last it must be worth another rounding."""
    given, laid = (times[name].seconds * _NANOSECONDS for name in (AS_GIVEN, CHANNELS_LAST))
    return round((1 - _GAIN) * given), round(laid)


def _model_prices(node: fx.Node) -> Prices:
    """Bytes that the call copies: images into the library's own layout and back, or the weight and its gradient, which
    in channels_last have another layout, too, unless they are of one pixel."""
    images = images_of(node)
    weight = required_spec(node.args[images[-1] + 1])
    num_weights = 2 if node.target is aten.convolution_backward.default else 1
    of_weights = 2 * num_weights * weight.nbytes * (math.prod(weight.shape[2:]) > 1)
    moved = [required_spec(node.args[i]) for i in images] + _image_results(node)
    if weight.device.type == "cpu":
        return 2 * sum(spec.nbytes for spec in moved), of_weights
    groups = node.args[-2 if node.target is aten.convolution_backward.default else -1]
    if groups != 1:
        # Of one channel each they run about as well in either layout, but for halves, for which cuDNN has kernels in
        # channels_last alone; of more many times as long in channels_last.
        slower = _DEPTHWISE_PASSES * sum(spec.nbytes for spec in moved) if weight.dtype in LOW_PRECISION else 0
        return (slower, of_weights) if weight.shape[1] == 1 else (0, None)
    laid = [2 * spec.nbytes for spec in moved if _is_for_tensor_cores(spec)]
    return sum(laid), 2 * sum(spec.nbytes for spec in moved) - sum(laid) + of_weights


def _model_copy_price(value: fx.Node) -> int:
    """Bytes that a copy moves, on a CPU twice, as in `_copy_timed`: a library turns images around faster."""
    spec = required_spec(value)
    return (4 if spec.device.type == "cpu" else 2) * spec.nbytes


def _is_for_tensor_cores(images: TensorSpec) -> bool:
    """Whether cuDNN has kernels for tensor cores that read these in channels_last, and turns others around for them: of
    whole groups of 16 bytes, and of float32 where it may be rounded to TF32."""
    if images.dtype is torch.float32 and not convolutions_round():
        return False
    return images.shape[1] * images.dtype.itemsize % 16 == 0


def _image_results(node: fx.Node) -> list[TensorSpec]:
    if node.target is aten.convolution.default:
        return [required_spec(node)]
    wants_gradient = node.args[10][0]  # type: ignore[index]
    return [required_spec(node.args[1])] if wants_gradient else []


def _total(times: Sequence[Timing]) -> Timing:
    return Timing(sum(time.seconds for time in times), max(time.spread for time in times))


def _convolution_timed(node: fx.Node) -> Timed:
    call = call_of(node)
    assert call is not None
    images = images_of(node)
    args = tuple(in_channels_last(arg) if i in images else arg for i, arg in enumerate(call.args))
    return calls_timed({AS_GIVEN: call, CHANNELS_LAST: OpCall(call.target, args, call.kwargs, call.result_bytes)})


def _copy_timed(node: fx.Node) -> Timed:
    """A copy from one layout into the other: measured, for it may run at a tenth of what memory gives. Twice, for the
    kernel that it becomes a part of goes across memory in its place, and that of a norm in two passes."""
    call = call_of(node)
    assert call is not None
    timed = calls_timed({"copy": call})
    if timed.source == "model":
        timed = Timed({"copy": Timing(_copy_seconds(node))}, "cache")  # by rates that were measured before
    if not timed.times:  # the machine was found busy before anything ran
        return timed
    copy = timed.times["copy"]
    return Timed({CHANNELS_LAST: Timing(2 * copy.seconds, copy.spread)}, timed.source)


def _copy_seconds(node: fx.Node) -> float:
    """At the rate of memory."""
    rates = rates_for(required_spec(node).device)
    return 2 * required_spec(node).nbytes / rates.bytes_per_s + rates.op_overhead_s / 2
