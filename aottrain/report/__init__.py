"""What a compile decided, for people: a page and tables."""
