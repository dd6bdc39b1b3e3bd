"""Runs beside each other, each in a process of its own or in turns, and what they are measured by."""
