"""What a user brings: recipes, and classes and functions of their own that a configuration names."""
