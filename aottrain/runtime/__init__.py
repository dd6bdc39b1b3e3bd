"""Runs what the compiler made: no graphs to decide on, no policy."""
