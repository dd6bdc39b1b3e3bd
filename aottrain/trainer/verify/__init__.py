"""A compiled step and an update against eager's, with what rounding explains."""
