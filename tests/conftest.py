"""Plans in tests do not depend on how fast the machine is that runs them."""

from __future__ import annotations

import os

os.environ["AOTTRAIN_RATES"] = "default"
