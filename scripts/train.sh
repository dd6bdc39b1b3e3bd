#!/usr/bin/env bash
# Train with no setup but Python 3.10+: bash scripts/train.sh recipe=transformer partition.budget=0.4
# Makes .venv beside this clone on first use. Relative paths are the caller's, and outputs go where the caller is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
export AOTTRAIN_COMMAND="bash $0"  # how to go on with a run, as it is typed here
exec "$python" -m aottrain "$@"
