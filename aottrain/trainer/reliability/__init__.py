"""What keeps a long run going: steps that are undone, memory that runs out, bad numbers, checks in flight."""
