"""What a step does on a CUDA device alone: launches of Triton kernels, whole programs as CUDA graphs."""
