# Sourced by train.sh and test.sh, not run. `prepare_environment [extra]` makes or refreshes <clone>/.venv and sets
# $python to its interpreter. AOTTRAIN_TORCH names another torch, as any pip requirement ("torch==2.12.0", a wheel's path).

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
python="$venv/bin/python"
# Exact on purpose: a range would let pip replace a torch that is already there by a newer one, gigabytes at a time.
torch_requirement="${AOTTRAIN_TORCH:-torch==2.13.0}"

fail() {
    echo "aottrain: $1" >&2
    exit 1
}

is_usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local candidate newest_without_venv=""
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        is_usable "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
        newest_without_venv="${newest_without_venv:-$candidate}"
    done
    [ -z "$newest_without_venv" ] ||
        fail "$newest_without_venv has no venv module; install it (on Debian and Ubuntu the package python3-venv)"
    fail "Python 3.10 or newer is needed; none of python3, python3.13 ... python3.10 is on PATH"
}

# How many tests run at once: one for each processor that this process may use; each worker holds a gigabyte or so.
num_test_workers() {
    "$python" -c 'import os; f = getattr(os, "sched_getaffinity", None)
print(min(8, len(f(0)) if f else os.cpu_count() or 1))'
}

# A torch that aottrain does not take would be fetched, which is gigabytes, and then be of no use.
check_torch() {
    "$python" "$root/scripts/requirements.py" check "$torch_requirement" || exit 1
}

# install_tree [extra]: into $python's environment, from $root; torch stays the one that was asked for.
install_tree() {
    local pip=("$python" -m pip install -qq --disable-pip-version-check) beside
    check_torch
    "${pip[@]}" "$torch_requirement" || fail "cannot install $torch_requirement"
    beside="$("$python" "$root/scripts/requirements.py" beside "${1:-}")" || exit 1
    case "$beside" in
        "$root"*) "${pip[@]}" -e "$beside" ;;
        *) "${pip[@]}" -r <(echo "$beside") && "${pip[@]}" --no-deps -e "$root" ;;  # pip alone would replace torch
    esac || fail "cannot install aottrain's dependencies"
}

# What an installation depends on: when this text changes, install again.
fingerprint() {
    echo "$root $torch_requirement $(cat "$root/pyproject.toml" "$root/aottrain/versions.py" | cksum)"
}

prepare_environment() {
    local extra="${1:-}" base_python
    local stamp="$venv/.installed${extra:+-$extra}"
    if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
        return
    fi
    if [ ! -e "$venv" ]; then
        base_python="$(find_python)" || exit 1
        echo "aottrain: making $venv and installing into it (once; a few minutes)" >&2
        "$base_python" -m venv "$venv" || { rm -rf "$venv"; fail "cannot make a virtual environment in $venv"; }
    else
        echo "aottrain: installing into $venv" >&2
    fi
    is_usable "$python" && "$python" -m pip --version >/dev/null 2>&1 ||
        fail "$venv is not a virtual environment of Python 3.10 or newer with pip; remove it and try again"
    rm -f "$venv"/.installed*
    install_tree "$extra"
    fingerprint >"$venv/.installed"
    fingerprint >"$stamp"
}
