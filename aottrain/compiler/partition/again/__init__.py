"""What bounds recompute, and what is computed again although it is saved."""
