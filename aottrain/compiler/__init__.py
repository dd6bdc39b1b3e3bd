"""From a call of the user's code to a compiled program; `pipeline` has the stages in order."""
