#!/usr/bin/env bash
# Run every test with no setup but Python 3.10+: bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
cd "$root"
exec "$python" -m pytest "$@"
