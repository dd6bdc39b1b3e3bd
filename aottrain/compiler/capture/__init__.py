"""A call of the user's code as a pure function of explicit state, and its run on fakes."""
