"""join_sums: a sum that autograd adds up term by term becomes one concatenation or one product.

Some code takes its steps one after the other: x[:, t] in a loop, with one weight for all steps. The gradient of x is
then a sum of one term for each step, each as large as x and zero but for its part. The gradient of the weight is a sum
of products, each over the few rows of one step. The memory traffic is the number of steps times the size of a term.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, placeholders, required_spec, spec_of

aten = torch.ops.aten

# Fewer terms are as well added in the kernel that reads them, unless they are all that there is, in equal parts: then
# the kernel that makes them writes each to its place.
_FEWEST = 3
# Of which kernels write each to its place.
_MOST_TILES = 8


def join_sums(joint: JointGraph) -> JointGraph:
    """The same program with one concatenation for terms that are parts of one tensor, and one product for products,
    which rounds otherwise than eager does. The graph itself where there are no such sums."""
    if not any(_terms(node) for node in calls(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    tangents = [node for node in placeholders(graph) if node.name in {tangent.name for tangent in joint.tangents}]
    depends = _tangents_of(graph, tangents)
    for node in list(calls(graph)):
        terms = _terms(node)
        if terms:
            _join(*_folded(node, terms), depends)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


@dataclass(frozen=True)
class _Part:
    """A term that is `gradient` in [start, end) of a dimension, or at each step there, and zero elsewhere."""

    term: fx.Node
    gradient: fx.Node
    dim: int
    start: int
    end: int
    step: int = 1


def _tangents_of(graph: fx.Graph, tangents: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """By call and input the tangents that it depends on, each a bit."""
    depends = {tangent: 1 << i for i, tangent in enumerate(tangents)}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            depends[node] = depends.get(node, 0) | depends.get(source, 0)
    return depends


def _terms(node: fx.Node) -> list[fx.Node]:
    """What a chain of additions that ends here adds up, where some of it may be joined."""
    if not _is_sum(node) or any(_continues(user, node) for user in node.users):
        return []
    terms: list[fx.Node] = []
    stack = [node]
    while stack:
        term = stack.pop()
        if term is node or (_is_sum(term) and _is_read_once(term) and _alike(term, node)):
            stack += [source for source in reversed(term.args) if isinstance(source, fx.Node)]
        else:
            terms.append(term)
    alone = _only_here(terms)
    candidates = [term for term in alone if _part(term) is not None or _product(term) is not None]
    parts = [part for term in alone if (part := _part(term)) is not None]
    return terms if len(candidates) >= _FEWEST or any(map(_cover, _by_places(parts).values())) else []


def _only_here(terms: Sequence[fx.Node]) -> list[fx.Node]:
    """Those that the sum has once, and that nothing else reads. An addition that reads a value twice is one reader."""
    times = Counter(terms)
    return [term for term in terms if times[term] == 1 and len(term.users) == 1]


def _tiles(parts: Sequence[_Part]) -> list[list[_Part]] | None:
    """Of parts that take turns along two dimensions, for each turn along the first those along the second, in order;
    None where they are not all of the tensor."""
    whole = {part.term for part in parts}
    inner = {part.term: _part(part.gradient) for part in parts if whole.issuperset(part.gradient.users)}
    rows: dict[int, list[_Part]] = {}
    for part in sorted(parts, key=lambda part: part.start):
        within = inner.get(part.term)
        if within is None or part.step < 2 or within.step < 2 or within.dim == part.dim:
            return None
        rows.setdefault(part.start, []).append(within)
    first = [next(part for part in parts if part.start == start) for start in rows]
    kinds = {(part.dim, part.step) for part in parts}, {(part.dim, part.step) for row in rows.values() for part in row}
    tiles = [sorted(row, key=lambda part: part.start) for row in rows.values()]
    covers = max(map(len, kinds)) == 1 and _cover(first) and all(map(_cover, tiles))
    return tiles if covers and len(tiles) * len(tiles[0]) <= _MOST_TILES else None


def _by_places(parts: Sequence[_Part]) -> dict[tuple[int, int], list[_Part]]:
    """Those of one dimension and one step that do not overlap, in order."""
    places: dict[tuple[int, int], list[_Part]] = {}
    for part in sorted(parts, key=lambda part: (part.dim, part.step)):
        places.setdefault((part.dim, part.step), []).append(part)
    return {key: _disjoint(same) for key, same in places.items()}


def _cover(parts: Sequence[_Part]) -> bool:
    """Whether they are all of their dimension, in equal parts."""
    if not parts:
        return False
    size, step, count = required_spec(parts[0].term).shape[parts[0].dim], parts[0].step, len(parts)
    if step > 1:
        whole = all(part.end - part.start == size - step + 1 for part in parts)
        return whole and [part.start for part in parts] == list(range(step)) and size % step == 0
    return {part.end - part.start for part in parts} == {size // count} and size % count == 0


def _is_sum(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is aten.add.Tensor
        and not node.kwargs
        and not marks_of(node)
        and all(isinstance(source, fx.Node) and _alike(source, node) for source in node.args)
    )


def _continues(user: fx.Node, node: fx.Node) -> bool:
    """Whether the chain goes on there: `_terms` begins at its end."""
    return _is_read_once(node) and _is_sum(user) and _alike(user, node)


def _is_read_once(node: fx.Node) -> bool:
    """A sum that is doubled is one term twice: taken apart each time, thirty doublings would be a billion terms."""
    return len(node.users) == 1 and next(iter(node.users)).args.count(node) == 1


def _alike(a: fx.Node, b: fx.Node) -> bool:
    one, other = spec_of(a), spec_of(b)
    if one is None or other is None or one.symbolic is not None:
        return False
    return one.same_layout(other) and one.dtype is other.dtype


def _join(root: fx.Node, terms: Sequence[fx.Node], depends: Mapping[fx.Node, int]) -> None:
    """Terms that are there once, for nothing else, are replaced; the others are added to them in their order.

    One product is for terms of which the same operand hangs on the same tangents: where some of these do not come, all
    of it is dropped, or none.
    """
    alone = _only_here(terms)
    parts_of_tensors = [part for term in alone if (part := _part(term)) is not None]
    products = {term: product for term in alone if (product := _product(term)) is not None}
    with root.graph.inserting_before(root):
        joined: dict[fx.Node, fx.Node] = {}
        tiles = _tiles(parts_of_tensors) if parts_of_tensors else None
        if tiles is not None:
            whole = _tiled(root, parts_of_tensors[0].dim, tiles)
            joined, parts_of_tensors = dict.fromkeys((part.term for part in parts_of_tensors), whole), []
        for (_, step), parts in _by_places(parts_of_tensors).items():
            if step > 1 and _cover(parts):
                joined |= dict.fromkeys((part.term for part in parts), _interleaved(root, parts))
            elif step == 1 and (len(parts) >= _FEWEST or _cover(parts)):
                joined |= dict.fromkeys((part.term for part in parts), _concatenated(root, parts))
        kinds: dict[tuple[Any, ...], dict[fx.Node, fx.Node]] = {}
        for term, (call, transposed) in products.items():
            kind = transposed, *(depends.get(operand, 0) for operand in call.args if isinstance(operand, fx.Node))
            kinds.setdefault(kind, {})[term] = call
        for (transposed, *_), same in sorted(kinds.items(), key=lambda pair: pair[0][0]):
            if len(same) >= _FEWEST and _pays(list(same.values())):
                whole = _multiplied(list(same.values()))
                joined |= dict.fromkeys(same, add_call(root, aten.t.default, (whole,)) if transposed else whole)
        if not joined:
            return
        left = list(dict.fromkeys(joined.get(term, term) for term in terms))
        # A term that is there twice is added twice.
        left += [term for i, term in enumerate(terms) if term not in joined and term in terms[:i]]
        total = left[0]
        for term in left[1:]:
            total = add_call(root, aten.add.Tensor, (total, term))
    if _alike(total, root):
        root.replace_all_uses_with(total)


def _folded(root: fx.Node, terms: Sequence[fx.Node]) -> tuple[fx.Node, Sequence[fx.Node]]:
    """The sum and its terms, where all of them are parts with one term for each place: elsewhere each adds zeros."""
    parts = [part for term in _only_here(terms) if (part := _part(term)) is not None]
    places: dict[tuple[int, int, int, int], list[_Part]] = {}
    for part in parts:
        places.setdefault((part.dim, part.start, part.end, part.step), []).append(part)
    alike = all(_alike(part.gradient, same[0].gradient) for same in places.values() for part in same)
    alike &= all(_part(part.gradient) is None for part in parts)  # a part of a part has a place of its own in it
    if len(parts) < len(terms) or len(places) in (1, len(parts)) or not alike:
        return root, terms
    with root.graph.inserting_before(root):
        folded: list[fx.Node] = []
        for first, *others in places.values():
            gradient = first.gradient
            for other in others:
                gradient = add_call(root, aten.add.Tensor, (gradient, other.gradient))
            folded.append(add_call(root, first.term.target, (gradient, *first.term.args[1:])))
        total = folded[0]
        for term in folded[1:]:
            total = add_call(root, aten.add.Tensor, (total, term))
    if not _alike(total, root):
        return root, terms
    root.replace_all_uses_with(total)
    unread = [root]
    while unread:  # a gradient's readers are counted
        node = unread.pop()
        sources = [] if node in terms else node.all_input_nodes
        node.graph.erase_node(node)
        unread += [source for source in sources if not source.users]
    return total, folded


def _product(term: fx.Node) -> tuple[fx.Node, bool] | None:
    """The matrix product that a term is, and whether it is its transpose."""
    transposed = False
    while term.target is aten.t.default and len(term.users) == 1:
        term, transposed = term.all_input_nodes[0], not transposed
    is_product = term.target is aten.mm.default and len(term.users) == 1 and not term.kwargs and not marks_of(term)
    return (term, transposed) if is_product else None


def _part(term: fx.Node) -> _Part | None:
    if term.target not in (aten.select_backward.default, aten.slice_backward.default) or term.kwargs or marks_of(term):
        return None
    arguments: tuple[Any, ...] = term.args
    gradient, sizes, dim, start, *rest = arguments
    if not all(isinstance(value, int) for value in (dim, start, *rest)):
        return None
    gradient_spec = required_spec(gradient)
    dim = dim % len(sizes)
    size = sizes[dim]
    begin = min(max(start + size if start < 0 else start, 0), size)
    if term.target is aten.select_backward.default:
        return _Part(term, gradient, dim, begin, begin + 1)
    count, step = gradient_spec.shape[dim], rest[1]
    return _Part(term, gradient, dim, begin, begin + max(step * (count - 1) + 1, 0), step)


def _disjoint(parts: Sequence[_Part]) -> list[_Part]:
    """In order of their places, without those that overlap one before. Of steps each start is another place."""
    disjoint: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.start, part.end)):
        if part.step > 1:
            disjoint += [part] if part.start not in [other.start for other in disjoint] else []
            continue
        if part.end > part.start and (not disjoint or part.start >= disjoint[-1].end):
            disjoint.append(part)
    return disjoint


def _concatenated(root: fx.Node, parts: Sequence[_Part]) -> fx.Node:
    """The parts in their places, zeros between them."""
    shape, dim = list(required_spec(root).shape), parts[0].dim
    steps = [part for part in parts if part.term.target is aten.select_backward.default]
    if dim == len(shape) - 1 and len(steps) == shape[dim]:
        return add_call(root, aten.stack.default, ([part.gradient for part in parts], dim))
    pieces: list[fx.Node] = []
    end = 0
    for part in (*parts, None):
        start = shape[dim] if part is None else part.start
        if start > end:
            gap = [*shape[:dim], start - end, *shape[dim + 1 :]]
            pieces.append(add_call(root, aten.new_zeros.default, (parts[0].gradient, gap)))
        if part is not None:
            chosen = part.term.target is aten.select_backward.default
            pieces.append(add_call(root, aten.unsqueeze.default, (part.gradient, dim)) if chosen else part.gradient)
            end = part.end
    return add_call(root, aten.cat.default, (pieces, dim))


def _interleaved(root: fx.Node, parts: Sequence[_Part]) -> fx.Node:
    """The parts that take turns along their dimension."""
    stacked = add_call(root, aten.stack.default, ([part.gradient for part in parts], parts[0].dim + 1))
    return add_call(root, aten.view.default, (stacked, list(required_spec(root).shape)))


def _tiled(root: fx.Node, dim: int, tiles: Sequence[Sequence[_Part]]) -> fx.Node:
    """The parts that take turns along this dimension and along their own."""
    within = tiles[0][0].dim
    places = within + 1 + (dim < within), dim + 1 + (within < dim)  # where the turns are among the whole's dimensions
    turned = _turned(root, [[part.gradient for part in row] for row in tiles], places)
    if turned is not None:
        return turned
    rows = [add_call(root, aten.stack.default, ([part.gradient for part in row], within + 1)) for row in tiles]
    stacked = add_call(root, aten.stack.default, (rows, places[1]))
    return add_call(root, aten.view.default, (stacked, list(required_spec(root).shape)))


def _turned(root: fx.Node, tiles: Sequence[Sequence[fx.Node]], places: tuple[int, int]) -> fx.Node | None:
    """What takes turns, where it is all of one value in equal slices: a copy of it in another order of dimensions.
    places: those of the turns along the second dimension, and along the first one, in the whole."""
    slices = [part for row in tiles for part in row]
    first: tuple[Any, ...] = slices[0].args
    if any(part.target is not aten.slice.Tensor or part.args[:2] != first[:2] or len(part.args) > 4 for part in slices):
        return None
    source, dim = first[0], first[1] % len(required_spec(slices[0]).shape)
    size, width = required_spec(source).shape[dim], required_spec(slices[0]).shape[dim]
    starts = [[part.args[2] // width if isinstance(part.args[2], int) else -1 for part in row] for row in tiles]
    rows, columns = len(tiles), len(tiles[0])
    by_rows = starts == [[i * columns + j for j in range(columns)] for i in range(rows)]
    if len(slices) * width != size or not (
        by_rows or starts == [[i + rows * j for j in range(columns)] for i in range(rows)]
    ):
        return None
    shape = list(required_spec(source).shape)
    counts = [rows, columns] if by_rows else [columns, rows]
    parts = add_call(root, aten.view.default, (source, [*shape[:dim], *counts, width, *shape[dim + 1 :]]))
    row, column = (dim, dim + 1) if by_rows else (dim + 1, dim)
    order = [d for d in range(len(shape) + 2) if d not in (dim, dim + 1)]
    for place, turn in sorted(zip(places, (column, row), strict=True)):
        order.insert(place, turn)
    copy = add_call(root, aten.permute.default, (parts, order))
    copy = add_call(root, aten.clone.default, (copy,), memory_format=torch.contiguous_format)
    return add_call(root, aten.view.default, (copy, list(required_spec(root).shape)))


def _pays(products: Sequence[fx.Node]) -> bool:
    """Whether copying all operands once moves less memory than a result for each product."""
    rows, columns = required_spec(products[0]).shape
    terms = sum(required_spec(product.args[0]).shape[1] for product in products)
    return 2 * terms * (rows + columns) <= len(products) * rows * columns


def _multiplied(products: Sequence[fx.Node]) -> fx.Node:
    last = products[-1]
    operands: list[tuple[Any, ...]] = [product.args for product in products]
    lefts, rights = ([pair[i] for pair in operands] for i in (0, 1))
    if all(left.target is aten.t.default for left in lefts):
        whole = add_call(last, aten.cat.default, ([left.args[0] for left in lefts], 0))
        left = add_call(last, aten.t.default, (whole,))
    else:
        left = add_call(last, aten.cat.default, (lefts, 1))
    return add_call(last, aten.mm.default, (left, add_call(last, aten.cat.default, (rights, 0))))
