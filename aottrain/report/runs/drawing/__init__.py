"""Pages of runs as HTML: curves, tables, one run, several."""
