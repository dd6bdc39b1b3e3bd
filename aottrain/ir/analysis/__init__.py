"""What is found out about graphs: what depends on what, when a value dies, and asking each node once."""
