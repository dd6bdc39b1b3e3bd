"""Operators of our own: what programs call where ATen has nothing that fits."""
