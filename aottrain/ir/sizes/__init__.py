"""Sizes that are known at a call alone: as expressions, and as polynomials while kernels are planned."""
