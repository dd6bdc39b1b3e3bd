"""What a run is told: frozen dataclasses, and how plain values become them."""
