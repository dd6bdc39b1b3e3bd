"""What the command line can run: a module for each name of aottrain.config.choices.TASKS."""
