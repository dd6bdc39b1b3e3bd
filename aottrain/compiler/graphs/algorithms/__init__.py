"""Algorithms on plain integers: no torch, so that they are tested by hand-drawn examples."""
