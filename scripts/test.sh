#!/usr/bin/env bash
# The whole suite in phases (tests/conftest.py says which test belongs to which): what may share the machine on four
# workers; then the rest one after the other, and beside it what only computes, with the time that is left. Called by
# make. Usage: test.sh PYTHON [ARGUMENTS OF PYTEST...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

# Images of Python tend to set it; then every process that the tests start, some hundreds, compiles our modules again.
unset PYTHONDONTWRITEBYTECODE

selected=0 worst=0
# ended STATUS: remember how a phase did. 5 is pytest's word for "nothing was selected".
ended() {
    if [ "$1" != 5 ]; then selected=1; fi
    if [ "$1" != 5 ] && [ "$1" -gt "$worst" ]; then worst=$1; fi
}
# phase NAME ARGUMENTS...: run it.
phase() {
    local name=$1 status=0
    shift
    "$python" -m pytest --phase "$name" "$@" || status=$?
    ended "$status"
}

failed=.pytest_cache/v/cache/lastfailed
rm -f "$failed"

# Four workers for two cores: many tests wait for what is to happen. In the order of the files' names, so that short
# ones are last.
phase shared -n 4 --dist loadfile --no-loadscope-reorder "$@"
calm=0
if [ "$worst" -lt 2 ] && [[ " $* " == *" -n 0 "* ]]; then # somebody looks into tests
    phase alone "$@"
    phase calm "$@"
elif [ "$worst" -lt 2 ]; then # 2: interrupted, or pytest was called wrongly
    said=$(mktemp)
    nice -n 19 "$python" -m pytest --phase calm -o cache_dir=.pytest_cache/calm "$@" >"$said" 2>&1 &
    beside=$!
    trap 'kill "$beside" 2>/dev/null || true; rm -f "$said"' EXIT # what fails there is how this script ends
    phase alone "$@"
    wait "$beside" || calm=$?
    cat "$said"
fi

# Some thousand tests start hundreds of processes that keep deadlines on a machine with other things to do. A few that
# failed run once more, one after the other, and count if they fail again. Their names stay above: such a test is a
# defect, too, and to be mended.
if [ "$worst" = 1 ] && [ "$(grep -c '": true' "$failed")" -le 3 ]; then
    echo "==> what failed, once more"
    worst=0
    phase again --last-failed "$@"
fi
ended "$calm"
if [ "$selected" = 0 ]; then exit 5; fi
exit "$worst"
