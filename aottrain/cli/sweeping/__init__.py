"""Sweeps whose jobs are found while it runs, or run elsewhere."""
