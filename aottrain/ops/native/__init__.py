"""The C++ texts that operators and generated kernels share."""
