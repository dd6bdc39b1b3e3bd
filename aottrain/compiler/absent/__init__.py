"""Planning for a device that this machine has not: tensors without memory on it, and what a step would take there."""
