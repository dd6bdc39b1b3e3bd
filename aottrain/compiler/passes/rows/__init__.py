"""Rows that are looked up, and rows that are added to others by their numbers."""
