"""KernelIR as text that runs: C++ for a CPU, Triton for CUDA; and run in plain torch, as the oracle for both."""
