"""What `torch.compile(..., backend="aottrain")` finds. It is imported for that alone, before anything is traced."""

from __future__ import annotations

from aottrain.compat_checkpoint import follow_checkpoints
from aottrain.compat_dynamo import guard_methods_of_classes, leave_functions_inside_transforms, look_again, refuse_by
from aottrain.compiler.frontends.dynamo import backend, refuse

__all__ = ["backend"]

guard_methods_of_classes()
leave_functions_inside_transforms()
look_again()
follow_checkpoints()
refuse_by(backend, refuse)
