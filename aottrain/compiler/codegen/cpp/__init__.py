"""A KernelIR as C++."""
