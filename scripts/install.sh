#!/usr/bin/env bash
# Installs packages into a virtual environment by uv, which takes a tenth of pip's CPU time, and by pip where uv cannot.
# Called by setup.sh and by tests. Usage: install.sh TOOLS ENVIRONMENT ARGUMENTS OF PIP INSTALL...
# TOOLS: the virtual environment that has pip and, if it could be had, uv; ENVIRONMENT: the one to install to.
set -euo pipefail
tools=$1 environment=$2
shift 2
pip=("$tools/bin/python" -m pip --disable-pip-version-check --no-input)

# setting NAME: what this machine's pip is told by its files and variables, which uv does not read.
settings=$("${pip[@]}" config list)
setting() { sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" <<<"$settings" | sed 's/\\n/ /g' | head -n 1; }

by_uv() {
    local index wheels certificates options=(--index-strategy unsafe-best-match)
    index=$(setting index-url) certificates=$(setting cert)
    if [ -n "$index" ]; then options+=(--default-index "$index"); fi
    for index in $(setting extra-index-url); do options+=(--index "$index"); done
    for wheels in $(setting find-links); do options+=(--find-links "$wheels"); done
    if [ -n "$certificates" ]; then export SSL_CERT_FILE=$certificates; fi
    "$tools/bin/uv" --quiet pip install --python "$environment/bin/python" "${options[@]}" "$@"
}

if [ -x "$tools/bin/uv" ] && by_uv "$@"; then exit 0; fi
exec "${pip[@]}" --python "$environment/bin/python" install "$@"
