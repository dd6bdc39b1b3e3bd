"""What is measured on this machine: by which clock, kept where, decided how. The only reader of AOTTRAIN_RATES."""
