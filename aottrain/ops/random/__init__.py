"""Random draws as pure functions, and eager's own generators as ops."""
