"""Matrix products of float32 on a CPU by other ways than ATen's own choice."""
