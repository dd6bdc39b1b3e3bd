"""Kernels as values: loop nests, the integer functions that address them, passes over many tensors."""
