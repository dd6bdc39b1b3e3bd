"""What must still hold for a compiled program to be right for a call."""
