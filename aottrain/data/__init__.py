"""Batches that follow from (seed, step) alone."""
