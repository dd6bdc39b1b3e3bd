"""`python -m aottrain`."""

import signal
import sys

try:
    from aottrain.cli import main
except KeyboardInterrupt:
    sys.exit(128 + signal.SIGINT)

code = main()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is written: what Python does at its end is not worth a traceback
sys.exit(code)
