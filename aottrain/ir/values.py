"""Values that are no tensors."""

import torch

# Values that compare by equality and hash: guards may hold them.
PLAIN_TYPES = (
    type(None), bool, int, float, complex, str, bytes, slice, type(...),
    torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout,
)  # fmt: skip
