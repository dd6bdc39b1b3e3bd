"""Decide what to save (plan), then cut the joint graph in two (split). The two never mix."""
