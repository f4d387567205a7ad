#!/usr/bin/env bash
# The whole suite in two phases (tests/conftest.py says which test belongs to which): what may share the machine on two
# workers, then the rest one after the other. Called by make. Usage: test.sh PYTHON [ARGUMENTS OF PYTEST...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

selected=0 worst=0
# phase NAME ARGUMENTS...: run it, and remember how it ended. 5 is pytest's word for "nothing was selected".
phase() {
    local name=$1 status=0
    shift
    "$python" -m pytest --phase "$name" "$@" || status=$?
    if [ "$status" != 5 ]; then selected=1; fi
    if [ "$status" != 5 ] && [ "$status" -gt "$worst" ]; then worst=$status; fi
}

# By files, because tests of a file share what is slow to make; in the order of their names, so that short ones are last.
phase shared -n 2 --dist loadfile --no-loadscope-reorder "$@"
if [ "$worst" -lt 2 ]; then phase alone "$@"; fi # 2: interrupted, or pytest was called wrongly
if [ "$selected" = 0 ]; then exit 5; fi
exit "$worst"
