"""What the command line can run: train, compare, plan."""
