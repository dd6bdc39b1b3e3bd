"""Bugs in generated kernels: what a call is lowered to, and the C++ and the plain torch that it is rendered to."""

from __future__ import annotations

from aottrain.compiler.codegen import evaluation
from aottrain.compiler.codegen import row_passes as passes
from aottrain.compiler.codegen.cpp import circular as cpp_circular
from aottrain.compiler.codegen.cpp import columns as cpp_columns
from aottrain.compiler.codegen.cpp import lanes
from aottrain.compiler.codegen.cpp import pragmas as cpp_pragmas
from aottrain.compiler.codegen.cpp import reductions as cpp_reductions
from aottrain.compiler.codegen.cpp import render as cpp
from aottrain.compiler.codegen.cpp import segments as cpp_segments
from aottrain.compiler.codegen.cpp import text as cpp_text
from aottrain.compiler.codegen.cpp import tiles as cpp_tiles
from aottrain.compiler.codegen.triton import derived as triton_derived
from aottrain.compiler.codegen.triton import index as triton_index
from aottrain.compiler.codegen.triton import programs as triton_programs
from aottrain.compiler.codegen.triton import render as triton_render
from aottrain.compiler.codegen.triton import tiles as triton_tiles
from aottrain.compiler.lowering import indexing, norms, reductions, rules
from aottrain.compiler.lowering import random as lowering_random
from aottrain.compiler.lowering.elementwise import activations, arithmetic, pointwise
from aottrain.ir.kernels import kernel as kernels
from aottrain.ir.kernels import open_sizes
from tests.planted_bugs.planting import Area, TestsOf

SMALL = "tests/compiler/codegen/test_small_kernels.py::test_{}[{}]"


def evaluated(name: str) -> str:
    return SMALL.format("evaluated", name)


def as_cpp(name: str) -> str:
    return SMALL.format("as_cpp", name)


LOWERING = Area("lowering")
LOWERING.edit(
    "uniform numbers of halves have as many bits as those of float32",
    "tests/compiler/lowering/test_lowerings.py::test_draws_of_halves_are_those_of_the_operator[dtype0]",
    lowering_random._draw,
    'b.compute("floor", b.compute("mul", drawn, fine))',
    'b.compute("mul", drawn, fine)',
)
LOWERING.attribute(
    "numbers of a pow of halves are not rounded to halves",
    "tests/compiler/lowering/test_lowerings.py::test_pow_rounds_a_number_to_a_half[dtype0]",
    arithmetic,
    "in_halves",
    lambda number, own: number,
)
LOWERING.attribute(
    "a number beside a tensor of halves is not rounded",
    "tests/compiler/lowering/test_numbers.py::test_bits_are_those_of_eager[eq-torch.bfloat16]",
    pointwise,
    "rounded_number",
    lambda node, value, dtype: value,
)
LOWERING.attribute(
    "a factor without dimensions is rounded to the halves beside it",
    "tests/compiler/lowering/test_numbers.py::test_bits_are_those_of_eager[mul torch.float32-torch.bfloat16]",
    pointwise,
    "factor",
    lambda node: None,
)
LOWERING.attribute(
    "a quotient of halves is not rounded before it is truncated",
    "tests/compiler/lowering/test_numbers.py::test_bits_are_those_of_eager[truncated-torch.float16]",
    arithmetic,
    "_step",
    lambda b, op, x, y, stored: b.compute(op, x, y),
)
LOWERING.attribute(
    "numbers that do not fit a type wrap",
    "tests/conformance/errors/test_numbers_that_do_not_fit.py::test_is_refused_as_in_eager[int8 200-trace]",
    rules,
    "_is_refused",
    lambda node: False,
)
LOWERING.edit(
    "a cast's constant is not rounded to the type that it had",
    "tests/compiler/lowering/test_numbers.py::test_a_number_is_rounded_to_the_type_that_it_fills[torch.float32]",
    rules.Builder.cast,
    "held(instruction.value, instruction.dtype)",
    "instruction.value",
)
LOWERING.edit(
    "a softmax that is not shifted by its maximum, but by its sum",
    evaluated("log softmax"),
    reductions._softmax,
    'b.compute("sub", shifted, b.compute("log", total))',
    'b.compute("sub", x, b.compute("log", total))',
    quick=True,
)
LOWERING.edit(
    "a softmax's gradient without the sum",
    evaluated("softmax"),
    reductions._softmax_backward,
    'b.reduce("sum", product)',
    "product",
)
LOWERING.edit(
    "a mean divided by one less",
    evaluated("layer norm"),
    reductions.row_mean,
    "b.constant(count,",
    "b.constant(count - 1,",
)
LOWERING.edit(
    "a variance without its correction",
    evaluated("variance"),
    reductions._variance,
    "b.constant(count - correction,",
    "b.constant(count,",
    quick=True,
)
LOWERING.edit(
    "an extremum of the other kind",
    evaluated("variance"),
    reductions._extremum,
    '"max" if "amax"',
    '"min" if "amax"',
)
LOWERING.edit(
    "a root mean square without its eps",
    "tests/compiler/lowering/test_lowerings.py::test_other_ops[norms]",
    norms._rms_norm,
    "small = torch.finfo(compute).eps if eps is None else eps",
    "small = torch.finfo(compute).eps",
)
LOWERING.edit(
    "an RMS norm's gradient forgets what the mean depends on",
    "tests/compiler/lowering/test_lowerings.py::test_other_ops[norms]",
    norms._rms_norm_backward,
    'difference = b.compute("sub", scaled, b.compute("mul", normal, second))',
    "difference = scaled",
)
LOWERING.edit(
    "silu's slope without its second term",
    evaluated("activations"),
    activations._silu_backward,
    'rest = b.compute("fma", x, b.compute("sub", one, sigmoid), one)',
    "rest = one",
    quick=True,
)
LOWERING.edit(
    "elu from the wrong side",
    evaluated("activations"),
    activations._elu,
    'b.compare("lt", x, b.constant(0, dtype))',
    'b.compare("gt", x, b.constant(0, dtype))',
)
LOWERING.edit(
    "a remainder with the dividend's sign",
    evaluated("division"),
    arithmetic._remainder,
    'return remainder if "fmod" in str(node.target) else',
    "return remainder if True else",
)
LOWERING.edit(
    "floor division that truncates",
    evaluated("division"),
    arithmetic._floored,
    'b.compute("where", was_rounded_up,',
    'b.compute("where", b.compare("ne", x, x),',
)
LOWERING.edit(
    "an interpolation from the far end",
    evaluated("bounds"),
    arithmetic._lerp,
    'b.compute("where", is_near_start, forward, backward)',
    'b.compute("where", is_near_start, forward, end)',
)
LOWERING.edit(
    "a triangle without its diagonal",
    evaluated("bounds"),
    indexing._triangle,
    'b.compare("ge" if upper else "le", distance',
    'b.compare("ge" if upper else "lt", distance',
)
LOWERING.edit(
    "padding of zeros whatever is asked for",
    evaluated("parts"),
    indexing._pad,
    "guard=guard, other=value",
    "guard=guard, other=0",
    quick=True,
)
LOWERING.edit(
    "a slice's gradient ends too early",
    evaluated("parts"),
    indexing._slice_backward,
    "end = start + max(step * (count - 1) + 1, 0)",
    "end = start + max(step * (count - 2) + 1, 0)",
)
LOWERING.edit(
    "every draw is the first one",
    evaluated("dropout"),
    evaluation._uniform,
    "return (table[element] >>",
    "return (table[element * 0] >>",
)
LOWERING.edit(
    "two numbers that compare equal are one",
    evaluated("zeros"),
    rules.Builder.emit,
    "key = (repr(instruction.value), instruction.dtype)",
    "key = (instruction.value, instruction.dtype)",
)
LOWERING.edit(
    "low precision is not rounded on the way",
    as_cpp("low precision"),
    cpp_text.rounded,
    "dtype in NARROW",
    "False",
)

CPP = Area("C++")
SIDE_BY_SIDE = TestsOf("tests/compiler/codegen/cpp/test_lanes.py")
CPP.edit(
    "of rows side by side parts of long sums are lost",
    SIDE_BY_SIDE.rows_side_by_side + "[long rows]",
    lanes.Lanes._pass,
    'text = combined(reduce.op, f"A{value}[lane]", f"B{value}[lane]")',
    'text = f"A{value}[lane] = B{value}[lane];"',
)
CPP.edit(
    "elements of a short row are kept in one place",
    SIDE_BY_SIDE.rows_side_by_side + "[short rows]",
    lanes.Lanes.written,
    "self.held(row_position(self.kernel))",
    "self.held(str(0))",
)
CPP.edit(
    "what is held of rows side by side is held for one of them",
    SIDE_BY_SIDE.rows_side_by_side + "[channels]",
    lanes.Lanes.held,
    "* {_LANES} + lane",
    "* {_LANES}",
)
CPP.edit(
    "rows in memory's order are taken side by side",
    SIDE_BY_SIDE.others_are_written_row_by_row + "[long rows in memory's order]",
    lanes.find_lanes,
    "if not worth_it and not (_is_short(kernel.row_size) if reductions else _is_tiny(kernel)):",
    "if False:",
)
CPP.edit(
    "a reduction starts anew in each part of a long row",
    as_cpp("long rows"),
    cpp_reductions.join,
    'combined(reduce.op, f"a{value}", f"b{value}")',
    'f"a{value} = b{value};"',
)
CPP.edit(
    "a sum over a part of a row starts anew in each part of a long loop",
    as_cpp("sums in long rows"),
    cpp_reductions.join,
    'combined("sum", f"t{k}", f"u{k}")',
    'f"t{k} = u{k};"',
)
CPP.edit(
    "a row's total is that of its last loop",
    as_cpp("softmax"),
    cpp_reductions.end,
    'rounded(reduce.dtype, f"a{value}")',
    'rounded(reduce.dtype, f"a{value} * 0.5f")',
)
CPP.edit(
    "threads' parts of a sum over rows: one is left out",
    as_cpp("sums over rows"),
    cpp_columns.Columns._finish,
    '"for (i64 t = 0; t < threads; t++) {"',
    '"for (i64 t = 1; t < threads; t++) {"',
    quick=True,
)
CPP.edit(
    "a block's part is not added to the thread's",
    as_cpp("sums over rows"),
    cpp_columns.Columns._add,
    'combine, size = folded(column.op, f"t{k}[j]", f"l{k}[j]"), self._size(column)',
    'combine, size = f"t{k}[j] = l{k}[j];", self._size(column)',
)
CPP.edit(
    "a sum over rows is copied to where another order is",
    as_cpp("sums in another order"),
    cpp_columns.Columns._is_copied,
    "in_order and column.divisor",
    "column.divisor",
)
CPP.edit(
    "a mean over long rows is no more than their sum",
    as_cpp("sums over long rows"),
    cpp_columns.Columns._is_copied,
    "column.divisor == 1 and",
    "",
)
CPP.edit(
    "blocks of rows lose their last row",
    as_cpp("sums over rows"),
    cpp_columns.Columns.start,
    "{rows} < end ? block + {rows} : end;",
    "{rows} < end ? block + {rows} - 1 : end;",
)
CPP.edit(
    "all rows are added to the results of the first",
    TestsOf("tests/compiler/schedule/test_sums_over_rows.py").as_cpp_whatever_part_of_a_run_a_thread_has,
    cpp_columns.Columns.row,
    " + {place};",
    " + 0 * ({place});",
)
CPP.edit(
    "the tile's last rows are left out",
    as_cpp("across memory"),
    cpp_tiles.Tile._bounds,
    'end = f"{end} < {whole} ? {end} : {whole}"',
    'end = f"{end} < {whole} ? {end} : first_{loop}"',
)
ACROSS = TestsOf("tests/compiler/codegen/cpp/test_tiles.py")
CPP.edit(
    "what a piece of a row writes across memory is left in its copy",
    ACROSS.a_row_of_several_loops_goes_across_memory_in_pieces + "[to_channels_last-(8, 16)]",
    cpp_tiles.Pieces.render,
    'f"{target} = z{number}[{self._position}];"',
    'f"(void){target};"',
)
CPP.edit(
    "all channels of a piece have one place in its copy",
    ACROSS.a_row_of_several_loops_goes_across_memory_in_pieces + "[from_channels_last-(8, 16)]",
    cpp_tiles.Pieces._position.fget,
    'return f"{position} * {_PIECE + _GAP} + i',
    'return f"0 * {position} + i',
)
APART = ACROSS.elements_that_lie_apart_are_copied_for_a_loop_of_vectors
CPP.edit(
    "of a row in parts all elements are copied to where the first part begins",
    APART + "[cut_across-(67, 5)]",
    cpp_tiles.Scattered.around,
    'f"{each} x{value}[{loop}] = p',
    'f"{each} x{value}[{loop} - {segment.start}] = p',
)
CPP.edit(
    "what a loop of vectors writes apart is left in its copy",
    APART + "[norm_across-(96, 40)]",
    cpp_tiles.Scattered.around,
    "return before, after",
    "return before, []",
)
CPP.edit(
    "a loop over three channels fills no vector",
    SIDE_BY_SIDE.rows_of_three_fill_vectors_where_their_elements_are_dear + "[True]",
    lanes.find_lanes,
    "if reductions else _is_tiny(kernel)):",
    "if reductions else False):",
)
CPP.edit(
    "a loop is cut where its answer is still the old one",
    ("tests/compiler/codegen/cpp/test_segments.py::test_a_comparison_cuts_where_its_answer_changes", as_cpp("parts")),
    cpp_segments._first_other,
    "return bisect_left(range(size), True, key=lambda i: answer(i) != answer(0))",
    "return min(size, 1 + bisect_left(range(size), True, key=lambda i: answer(i) != answer(0)))",
)
CPP.edit(
    "guarded loads give what is in memory",
    as_cpp("parts"),
    cpp.Renderer._define,
    'f"const {kind} v{value} = blend_(v{instruction.guard}, e{value}, {other});"',
    'f"const {kind} v{value} = e{value};"',
)
CPP.edit(
    "constants of halves are those of float32",
    "tests/compiler/lowering/test_numbers.py::test_a_number_is_rounded_to_the_type_that_it_fills[torch.bfloat16]",
    cpp_text.literal,
    "number = held(value, dtype)",
    "number = held(value, torch.float64 if dtype is torch.float64 else torch.float32)",
)
CPP.edit(
    "an infinity is the largest number",
    as_cpp("all negative"),
    cpp_text.identity,
    'literal(-math.inf if op == "max" else math.inf, dtype)',
    "literal(0.0, dtype)",
)
CPP.edit(
    "the smaller is the maximum",
    as_cpp("variance"),
    cpp_text.combined,
    "{'>' if op == 'max' else '<'}",
    "{'<' if op == 'max' else '>'}",
)
CPP.edit(
    "negative numbers are false",
    as_cpp("casts"),
    cpp_text._cast,
    'return f"{text} != 0"',
    'return f"{text} > 0"',
)
CPP.edit(
    "bfloat16 is cut off, not rounded",
    "tests/compiler/codegen/cpp/test_rounding.py::test_the_bits_are_those_of_eager",
    cpp_text.to_stored,
    "'upper' if value is not None and holds(value, dtype) else 'to'",
    "'upper'",
)
CPP.edit(
    "an embedding's index is not checked from below",
    "tests/compiler/codegen/test_small_kernels.py::test_a_wrong_index_is_told",
    cpp.Renderer._define,
    "({index} < -{size}) | ({index} >= {size}) ? 0",
    "({index} > {size}) ? 0",
)
CPP.edit(
    "what is held of a row shares a buffer with what is still read",
    "tests/compiler/schedule/test_scheduling.py::test_a_chain_of_norms_holds_its_row_in_few_buffers",
    passes.row_buffers,
    "if (last[user], user) < (begin, value) and kernel.body[user].dtype is dtype",
    "if (last[user], user) < (-1, value)",
)
CPP.edit(
    "buffers of a row are shared too early",
    as_cpp("held rows"),
    passes.row_buffers,
    "if (last[user], user) < (begin, value) and kernel.body[user].dtype is dtype",
    "if kernel.body[user].dtype is dtype",
)
CPP.edit(
    "draws of a row begin at its second element",
    as_cpp("dropout"),
    cpp_text.run_of_draws,
    "first = affine_text(rest) +",
    'first = "4 + " + affine_text(rest) +',
)
CPP.edit(
    "far angles by the near way",
    as_cpp("far angles"),
    cpp_circular.with_far_angles,
    "if not angles:",
    "if angles:",
)

CHOSEN = TestsOf("tests/compiler/codegen/cpp/test_segments.py").what_a_row_chooses
CPP.edit(
    "the first choice of a chain decides",
    f"{CHOSEN}[by rows and elements-100]",
    cpp_segments.once_for_each,
    '{value: "true"}',
    '{value: "false"}',
)
CPP.edit(
    "what a row does not choose is computed as if it did",
    f"{CHOSEN}[by two of rows-100]",
    cpp_segments.once_for_each,
    '{before: "false" for before in conditions[:place]}',
    '{before: "true" for before in conditions[:place]}',
)

CPP.attribute(
    "neighbours that are far from the next ones are read through one pointer",
    TestsOf("tests/compiler/codegen/cpp/test_pointers.py").what_lies_between_is_not_read,
    cpp_pragmas,
    "_FAR",
    1 << 40,
)
OPEN_TRITON = Area("triton kernels for all sizes")
_OPEN = "tests/compiler/codegen/triton/test_triton.py::test_{}"
OPEN_TRITON.edit(
    "the last program of a size that is no multiple of a tile is left out",
    _OPEN.format("programs_are_as_many_as_each_size_needs"),
    triton_derived.Derived.rounded_up,
    'f"-(-{value} // {by})"',
    'f"max(1, {value} // {by})"',
    quick=True,
)
OPEN_TRITON.edit(
    "elements beyond the size of a call are not masked",
    _OPEN.format("programs_are_as_many_as_each_size_needs"),
    triton_index.Indices._is_masked,
    "return not divides(tile.width, self.counts[axis])",
    "return False",
)
OPEN_TRITON.edit(
    "programs take as many rows as they did in the call that was traced",
    _OPEN.format("rows_are_shared_by_programs_at_every_size"),
    triton_derived.Derived.share,
    'return self._named("each", f"max(-(-{tiles} * {others} // {most}), min({tiles}, {least}))", count)',
    'return self._named("each", f"{count}", count)',
)
OPEN_TRITON.edit(
    "offsets are as wide as in the call that was traced, without a guard",
    _OPEN.format("narrow_offsets_are_a_guard_on_the_sizes"),
    triton_tiles.needs_wide_offsets,
    "bool(count > _NARROW)",
    "bool(likely(count) > _NARROW)",
)
EQUAL = Area("equal kernels")
_DEPTH = "tests/compiler/test_depth.py::test_{}"
EQUAL.edit(
    "kernels of other instructions are taken for equal",
    _DEPTH.format("kernels_are_equal_where_all_but_names_and_draws_are_the_same"),
    kernels.made_of,
    "-1 if value in draws else id(instruction)",
    "-1 if value in draws else type(instruction)",
    quick=True,
)
EQUAL.edit(
    "each kernel of a repeated block is rendered",
    _DEPTH.format("kernels_of_further_blocks_are_not_rendered_again"),
    kernels.made_of,
    "return id(kernel.ranges),",
    "return kernel.name,",
)

_DRAWS = "tests/compiler/codegen/triton/test_triton.py::test_{}"
EQUAL.edit(
    "equal kernels draw what the first of them does",
    _DRAWS.format("the_draws_of_repeated_blocks_are_one_module_with_numbers_of_their_own"),
    triton_programs.link_triton,
    "with_draws(known[parts], call.kernel)",
    "with_draws(known[parts], kernels[0].kernel)",
    quick=True,
)
EQUAL.edit(
    "a draw's number is a constant of the kernel's text",
    _DRAWS.format("the_draws_of_repeated_blocks_are_one_module_with_numbers_of_their_own"),
    triton_render.Renderer._expression,
    "if value in self.draws:",
    "if False:",
)
EQUAL.edit(
    "a size has the name of a flag beside a maximum",
    "tests/compiler/codegen/cpp/test_open_sizes.py::test_one_compile_serves_sizes_and_strides[maxima of rows]",
    open_sizes.numbered,
    'f"size{k}"',
    'f"n{k}"',
)
