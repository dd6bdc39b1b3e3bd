"""Speed, memory, and where the figures go."""
