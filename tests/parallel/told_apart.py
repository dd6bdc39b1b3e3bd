"""`python -m aottrain` as one of several processes that are told different things.

python tests/parallel/told_apart.py key=value... 1::key=value...    # what follows 1:: is for process 1 alone
"""

import os
import runpy
import sys

if __name__ == "__main__":
    named = [argument.rpartition("::") for argument in sys.argv[1:]]
    sys.argv[1:] = [text for rank, _, text in named if rank in ("", os.environ["RANK"])]
    runpy.run_module("aottrain", run_name="__main__", alter_sys=True)
