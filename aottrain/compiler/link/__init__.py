"""The partitioned graphs become functions that run, by the chosen kernels, and one program."""
