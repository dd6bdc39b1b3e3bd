"""What values cost: bytes of their storages, and time to compute them again."""
