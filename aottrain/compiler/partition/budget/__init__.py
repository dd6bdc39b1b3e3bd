"""The strategy that holds a budget of peak memory: simulation, a family of plans, the choice."""
