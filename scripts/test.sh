#!/usr/bin/env bash
# Run the whole suite in phases; tests/conftest.py says which test belongs to which. `make test` calls it.
# Usage: test.sh PYTHON [ARGUMENTS OF PYTEST...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

# Images of Python tend to set it; then each of the hundreds of processes that the tests start compiles our modules again.
unset PYTHONDONTWRITEBYTECODE

selected=0 worst=0
# ended STATUS: remember how a phase ended. 5 is pytest's status for "no test was selected".
ended() {
    if [ "$1" = 5 ]; then return; fi
    selected=1
    if [ "$1" -gt "$worst" ]; then worst=$1; fi
}
# phase NAME ARGUMENTS...: run it.
phase() {
    local name=$1 status=0
    shift
    "$python" -m pytest --phase "$name" "$@" || status=$?
    ended "$status"
}

beside=
if [[ " $* " != *" -n 0 "* ]]; then # with -n 0 somebody debugs: one phase at a time
    # What only computes gets the time that the other phases leave.
    output=$(mktemp)
    nice -n 19 "$python" -m pytest --phase calm -o cache_dir=.pytest_cache/calm "$@" >"$output" 2>&1 &
    beside=$!
    trap 'kill "$beside" 2>/dev/null || true; rm -f "$output"' EXIT
fi

# Four workers for two cores: many tests wait for other processes. In the order of the files' names, so that short
# ones are last.
phase shared -n 4 --dist loadfile --no-loadscope-reorder "$@"
if [ "$worst" -lt 2 ]; then # 2: interrupted, or pytest was called wrongly
    phase alone "$@"
    if [ -e /proc/driver/nvidia/version ]; then phase gpu "$@"; fi
fi

if [ -z "$beside" ]; then
    phase calm "$@"
else
    status=0
    wait "$beside" || status=$?
    cat "$output"
    ended "$status"
fi
if [ "$selected" = 0 ]; then exit 5; fi
exit "$worst"
