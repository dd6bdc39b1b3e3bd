"""`python -m aottrain`. What Ctrl-C does before and after the command line listens to it, aottrain/__init__.py says."""

import sys

from aottrain.cli import main

sys.exit(main())
