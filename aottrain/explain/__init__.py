"""What a compile decided, as plain data and as text for a terminal."""
