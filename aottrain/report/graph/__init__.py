"""Pictures of programs: folded to their repeated blocks, laid out in layers, drawn as SVG."""
