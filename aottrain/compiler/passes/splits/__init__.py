"""Rewrites that take one op apart, so that kernels can share its parts."""
