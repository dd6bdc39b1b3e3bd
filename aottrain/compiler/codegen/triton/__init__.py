"""A KernelIR as Triton."""
