"""What autograd allocates while it puts gradients into `.grad`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from aottrain.ir.graph import GraphSignature, OutputKind, required_spec, storage_root
from aottrain.ir.tensor import TensorSpec, strides_without_gaps


def copied_gradient_bytes(signature: GraphSignature, gradients: Iterable[fx.Node | None]) -> int:
    """The most that it holds beside all gradients. A gradient whose strides are not those of its tensor is copied,
    and lives until then with what else lies in its storage.

    gradients: of each primal that has one, in the order of the signature.
    """
    specs = [spec for spec in signature.outputs if spec.kind is OutputKind.GRADIENT]
    copied = Counter[fx.Node]()
    for spec, value in zip(specs, gradients, strict=True):
        primal = signature.inputs[spec.target]
        if value is None or not primal.leaf or primal.spec.symbolic is not None:
            continue
        if not _becomes_grad(required_spec(value), primal.spec):
            copied[storage_root(value)] += primal.spec.nbytes
    return max(copied.values(), default=0)


def _becomes_grad(gradient: TensorSpec, leaf: TensorSpec) -> bool:
    """As torch's `obeys_layout_contract` says: strides of dimensions of one number do not count. A sparse gradient has
    none, and is taken as it is."""
    if len(gradient.stride) < len(gradient.shape):
        return True
    pairs = zip(leaf.shape, gradient.stride, strides_without_gaps(leaf.shape, leaf.stride), strict=True)
    return leaf.numel == 0 or all(size == 1 or one == other for size, one, other in pairs)
