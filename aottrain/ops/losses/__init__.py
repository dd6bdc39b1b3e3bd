"""Losses as operators of our own."""
