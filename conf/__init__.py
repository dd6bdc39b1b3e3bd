"""Values only: the YAML files that the command line composes. A package so that they are installed with the code."""
