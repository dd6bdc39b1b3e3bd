"""`python -m aottrain`."""

import sys

from aottrain.cli import main

sys.exit(main())
