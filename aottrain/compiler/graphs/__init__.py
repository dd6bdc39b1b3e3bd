"""What all stages do with fx graphs: new calls, simplification, effects, source locations, calls that are measured."""
