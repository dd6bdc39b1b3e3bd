"""Rewrites of the joint graph, one in each file."""
