"""task=plan of a device that is not at hand: its rows, what sharding makes of them, how they are shown."""
