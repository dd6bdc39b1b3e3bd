"""The blocks of a model as its program shows them: which repeated module each op was written in.

A block is one call of a module, so a module that runs several times is several blocks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx

from aottrain.errors import ConfigError
from aottrain.ir.graph import info, module_stack_of
from aottrain.ir.ops import OpKind

# Two modules are alike where so much of their operators is the same: a block that also shrinks its input is still one.
_ALIKE = 0.5
_NUM_NAMED = 8
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, order=True)
class Block:
    """One run (from 0) of the module at this path."""

    path: str
    run: int = 0

    def __str__(self) -> str:
        return f"{self.path or 'the module'}{f' (run {self.run + 1})' if self.run else ''}"


@dataclass
class _Contents:
    """What one candidate holds: its operators, and the modules that they were written in."""

    ops: Counter[str] = field(default_factory=Counter)
    modules: set[str] = field(default_factory=set)
    num_products: int = 0

    @property
    def is_block(self) -> bool:
        """More than one layer: a matrix product or convolution, and something around it."""
        return self.num_products > 1 or (self.num_products == 1 and len(self.modules) > 1)


def find_blocks(nodes: Iterable[fx.Node], patterns: Sequence[str] = ()) -> dict[fx.Node, Block]:
    """The block that each op is in; ops outside of all blocks are left out.

    patterns: module paths such as `blocks.*` or `layer.*.attention`. The last names of a path decide: `blocks.*` finds
    `model.blocks.3` too. Without patterns: see `repeated_blocks`.

    Raises ConfigError where a pattern matches no module, or no module is repeated.
    """
    around = _modules_around(nodes)
    if patterns:
        return _outermost(around, _named(around, patterns))
    blocks = repeated_blocks(around)
    if not blocks:
        raise ConfigError(
            "partition=checkpoint: the program has no repeated block. Name modules with partition.modules"
            f" (it has {_examples(around)}), or take another partition"
        )
    return blocks


def repeated_blocks(nodes: Iterable[fx.Node]) -> dict[fx.Node, Block]:
    """The block that each op is in: of the outermost modules that stand in a list beside one alike, else of those with
    numbered names (`block1`, `block2`), else of those that run several times. Empty where there are none."""
    around = _modules_around(nodes)
    contents: dict[Block, _Contents] = {}
    for node, candidates in around.items():
        for block in candidates:
            block_contents = contents.setdefault(block, _Contents())
            block_contents.modules.add(candidates[-1].path)
            if not info(node).is_free:
                block_contents.ops[str(node.target)] += 1
                block_contents.num_products += info(node).kind is OpKind.COMPUTE
    for family_of in (_in_a_list, _numbered, _itself):
        repeated = _repeated(contents, family_of)
        if repeated:
            return _outermost(around, repeated)
    return {}


def _modules_around(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[Block]]:
    return {node: [Block(*entry) for entry in module_stack_of(node) if entry[0]] for node in nodes}


def _named(around: Mapping[fx.Node, Sequence[Block]], patterns: Sequence[str]) -> set[Block]:
    blocks = {block for candidates in around.values() for block in candidates}
    unused = [pattern for pattern in patterns if not any(_matches(block.path, pattern) for block in blocks)]
    if unused:
        text = f"no module of the program matches (it has {_examples(around)})"
        raise ConfigError([f"partition.modules=[{pattern}]: {text}" for pattern in unused])
    return {block for block in blocks if any(_matches(block.path, pattern) for pattern in patterns)}


def _matches(path: str, pattern: str) -> bool:
    names, pattern_names = path.split("."), pattern.split(".")
    return len(names) >= len(pattern_names) and all(map(fnmatchcase, names[-len(pattern_names) :], pattern_names))


def _in_a_list(block: Block) -> str | None:
    parent, _, name = block.path.rpartition(".")
    return parent + "." if name.isdigit() else None


def _numbered(block: Block) -> str | None:
    parent, _, name = block.path.rpartition(".")
    return f"{parent}.{_DIGITS.sub('#', name)}" if _DIGITS.search(name) else None


def _itself(block: Block) -> str | None:
    return block.path


def _repeated(contents: Mapping[Block, _Contents], family_of: Callable[[Block], str | None]) -> set[Block]:
    """All blocks of the families in which two are alike."""
    families: dict[str, list[Block]] = {}
    for block in sorted(contents):
        name = family_of(block)
        if name is not None and contents[block].is_block:
            families.setdefault(name, []).append(block)
    return {
        block
        for family in families.values()
        if any(_alike(contents[a].ops, contents[b].ops) for a, b in itertools.pairwise(family))
        for block in family
    }


def _alike(one: Counter[str], other: Counter[str]) -> bool:
    return (one & other).total() >= _ALIKE * (one | other).total()


def _outermost(around: Mapping[fx.Node, Sequence[Block]], blocks: set[Block]) -> dict[fx.Node, Block]:
    within = {node: [block for block in candidates if block in blocks] for node, candidates in around.items()}
    return {node: blocks_of_node[0] for node, blocks_of_node in within.items() if blocks_of_node}


def _examples(around: Mapping[fx.Node, Sequence[Block]]) -> str:
    """Some module paths, numbers as `*`, the shortest first."""
    paths = {_DIGITS.sub("*", block.path) for candidates in around.values() for block in candidates}
    examples = sorted(paths, key=lambda path: (path.count("."), path))[:_NUM_NAMED]
    return ", ".join(examples) or "none: modules are told apart where one calls another"
