#!/usr/bin/env bash
# Run every test with no setup but Python 3.10+: bash scripts/test.sh [pytest arguments]
# With --whole every combination that the tests know, else a sample of them.
# Tests run on all processors. `-n 0` among the arguments runs them in one process, which `--pdb` needs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test
cd "$root"
# worksteal: each worker starts with its half of the files, so what a file makes once is mostly made once, and who is
# done first takes from the others: files differ a hundredfold in time.
exec "$python" -m pytest -n "$(num_test_workers)" --dist worksteal "$@"
