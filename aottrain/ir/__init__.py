"""What flows through the compiler, as values: it knows torch.fx and nothing of ours above it."""
