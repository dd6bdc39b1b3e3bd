"""Finished and running runs, read from their folders, as pages: one run, a comparison, a sweep."""
