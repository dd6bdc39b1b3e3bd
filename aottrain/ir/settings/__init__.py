"""What a caller may ask, as values: names to choose from, a memory budget, the record of what was decided."""
