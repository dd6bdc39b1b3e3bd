"""The Triton functions that operators and generated kernels share."""
