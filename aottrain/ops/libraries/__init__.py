"""Calls of libraries behind ATen, as operators whose results have sizes that are known before their values."""
