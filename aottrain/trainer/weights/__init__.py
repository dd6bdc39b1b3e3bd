"""Which weights a run trains: chosen by name, adapted, averaged."""
