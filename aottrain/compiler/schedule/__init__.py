"""From one partitioned graph to an ordered list of kernels and library calls."""
