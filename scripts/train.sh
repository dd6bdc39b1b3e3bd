#!/usr/bin/env bash
# Train with no setup but Python 3.10+: bash scripts/train.sh recipe=transformer partition.budget=0.4
# Makes .venv beside this clone on first use. Relative paths are the caller's, and outputs go where the caller is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
exec "$python" -m aottrain "$@"
