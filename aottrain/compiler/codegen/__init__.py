"""KernelIR as text that runs: `cpp` for a CPU, `triton` for CUDA; and run in plain torch, as the oracle for both."""
