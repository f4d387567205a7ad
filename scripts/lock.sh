#!/usr/bin/env bash
# Writes the lock files of the images, deploy/docker/*.lock: what pyproject.toml asks for, in the versions of
# constraints.txt, with the hashes of all files that the index has of them. Called by `make lock`; needs uv.
# TORCH_CPU: where the CPU build of torch is, an index or a folder with its wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${UV:=uv}" "${TORCH_CPU:=https://download.pytorch.org/whl/cpu}"

# lock NAME FROM OPTIONS...
lock() {
    local file=deploy/docker/$1.lock
    shift
    {
        echo "# Written by 'make lock' from pyproject.toml and constraints.txt; not to be edited."
        "$UV" pip compile "$@" --quiet --no-header --no-annotate --generate-hashes --constraints constraints.txt \
            --python-version 3.11 --python-platform x86_64-manylinux_2_28
    } >"$file.new"
    mv "$file.new" "$file"
    echo "$file: $(grep -c == "$file") packages"
}

cpu_build=$(mktemp)
trap 'rm -f "$cpu_build"' EXIT
echo "torch==$(sed -n 's/^torch==//p' constraints.txt)+cpu" >"$cpu_build"
case $TORCH_CPU in
http*) from=(--index "$TORCH_CPU" --index-strategy unsafe-best-match) ;;
*) from=(--find-links "$TORCH_CPU") ;;
esac
# The package nixl asks for its builds for CUDA 12 and CUDA 13; one is enough, and either works without a GPU.
node=(--extra tracing --extra node --extra nixl --no-emit-package nixl-cu12)

lock build - <<<"setuptools$(sed -n 's/^requires = .*setuptools\([^"]*\)".*/\1/p' pyproject.toml)"
lock model - --no-deps <<<"$(sed -n 's/^INSTALL = .* \(.*\)"/\1/p' kvrelay/embedded.py)"
lock router pyproject.toml --extra tracing
lock node-cpu pyproject.toml "${node[@]}" "${from[@]}" --override "$cpu_build"
lock node-cuda pyproject.toml "${node[@]}"
