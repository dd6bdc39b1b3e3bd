"""What autograd sees of a program beside its own node: links between results, hooks, second derivatives."""
