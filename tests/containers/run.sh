#!/usr/bin/env bash
# Images and compose files for real: builds router and node-cpu, runs 1P1D (deploy/compose) and 2P2D (kvrelay compose) with
# podman, streams through the published port, kills a container and waits for it. Usage: run.sh PYTHON, as root.
#
# Everything it makes lies under .cache/containers and is removed at the end, but for the base image's files.
# BASE_IMAGE names a base image; without one it is made by debootstrap, from DEBIAN_MIRROR. TORCH_CPU_INDEX is as in the
# Dockerfile. What pip is configured to on this machine (mirrors, folders, certificates) holds in the builds too.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(realpath -s "$1")
work=$PWD/.cache/containers
: "${DEBIAN_MIRROR:=http://deb.debian.org/debian}" "${KVRELAY_PORT:=18000}" "${PROMETHEUS_PORT:=18090}"
export KVRELAY_PORT PROMETHEUS_PORT COMPOSE_PROFILES=cpu PROMETHEUS_IMAGE=localhost/prometheus:debian
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf

fail() {
    echo "test-containers: $*" >&2
    exit 1
}

say() { printf '%(%H:%M:%S)T  %s\n' -1 "$*"; }

# step TEXT LOG COMMAND...: quietly; on failure the end of its output.
step() {
    local text=$1 log=$work/$2.log began=$SECONDS
    shift 2
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 30 "$log" >&2
        fail "this step failed: $text (the whole log was $log)"
    fi
    say "$text: done in $((SECONDS - began)) s"
}

[ "$(id -u)" = 0 ] || fail "run it as root: networks and mounts of containers are made"
# One mount namespace for all of it: podman keeps networks there, and crun refuses a machine that has both kinds of
# cgroups mounted.
if [ -z "${KVRELAY_UNSHARED:-}" ]; then
    KVRELAY_UNSHARED=1 exec unshare -m "$0" "$python"
fi
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi

mkdir -p "$work"
cd "$work"
# crun may not raise limits without CAP_SYS_RESOURCE; no systemd is needed for cgroups or events.
cat >containers.conf <<END
[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
END
printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' "$work/storage" "$work/run" >storage.conf

missing=()
for tool in podman buildah crun; do command -v $tool >/dev/null || missing+=("$tool"); done
if [ "${#missing[@]}" -gt 0 ]; then
    step "installing podman, buildah and crun" apt bash -c "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y \
        --no-install-recommends podman buildah crun debootstrap netavark aardvark-dns iptables iproute2 uidmap fuse-overlayfs"
fi

repository=$(cd ../.. && pwd)
clusters=()
cleanup() {
    local status=$? folder
    for folder in "${clusters[@]}"; do
        if [ "$status" != 0 ]; then (cd "$folder" && compose logs --tail 8 2>&1 | grep -v level=) >&2 || true; fi
        (cd "$folder" && COMPOSE_PROFILES=cpu,monitoring compose down -t 10 -v >/dev/null 2>&1) || true
    done
    podman system reset --force >/dev/null 2>&1 || true
    rm -rf "$work/storage" "$work/run" "$work/tools" "$work/prometheus-image" "$work"/cluster-*
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

compose() { "$work/tools/bin/podman-compose" "$@"; }

if [ ! -x tools/bin/podman-compose ]; then
    step "installing podman-compose" podman-compose bash -c \
        "'$python' -m venv tools && tools/bin/pip install podman-compose==1.6.0"
fi

# --- the base image
if [ -z "${BASE_IMAGE:-}" ]; then
    BASE_IMAGE=localhost/base:bookworm
    if [ ! -e base.tar ]; then
        rm -rf base
        step "making a base image with debootstrap" debootstrap debootstrap --variant=minbase \
            --include=python3,python3-venv,python3-dev,ca-certificates bookworm base "$DEBIAN_MIRROR"
        rm -rf base/var/cache/apt/archives base/var/lib/apt/lists
        tar -C base -cf base.tar.new . && mv base.tar.new base.tar
        rm -rf base
    fi
    step "importing the base image" import podman import base.tar "$BASE_IMAGE"
fi

# --- the images: with this machine's pip configuration as a secret, and what it names mounted
mounts=()
declare -A told=() # the environment wins over files, and comes first
printf '[global]\n' >pip.conf
while IFS='=' read -r key value; do
    key=${key##*.} value=${value#\'} value=${value%\'}
    case $key in
    cert | find-links | index-url | extra-index-url | timeout | default-timeout | trusted-host | no-index) ;;
    *) continue ;;
    esac
    key=${key#default-}
    if [ -n "${told[$key]:-}" ]; then continue; fi
    told[$key]=1
    printf '%s = %s\n' "$key" "$value" >>pip.conf
    for word in $value; do
        # An index of files leads to files beside it.
        if [[ $word == file://* ]]; then word=$(dirname "${word#file://}"); fi
        if [[ $word == /* && -e $word ]]; then mounts+=(--volume "$word:$word:ro"); fi
    done
done < <("$python" -m pip config list)
if [ -z "${TORCH_CPU_INDEX+given}" ]; then
    TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
    "$python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$TORCH_CPU_INDEX" \
        2>/dev/null || TORCH_CPU_INDEX=
fi

# build TARGET
build() {
    step "building $1" "build-$1" buildah bud --isolation chroot --format docker --layers --pull-never \
        --build-arg BASE_IMAGE="$BASE_IMAGE" --build-arg TORCH_CPU_INDEX="$TORCH_CPU_INDEX" \
        --secret id=pip.conf,src="$work/pip.conf" "${mounts[@]}" \
        -f "$repository/deploy/docker/Dockerfile" --target "$1" -t "localhost/kvrelay/$1:0.1.0" "$repository"
    podman image exists "localhost/kvrelay/$1:0.1.0"
}
for target in ${TARGETS:-router node-cpu}; do build "$target"; done
podman images --filter reference='localhost/kvrelay/*' --format '{{.Repository}} {{.Size}}' | sort
echo "base image: $(podman images --filter reference="$BASE_IMAGE" --format '{{.Size}}')"

# Debian's Prometheus in place of its own image, which only a registry has.
mkdir -p prometheus-image
cat >prometheus-image/Dockerfile <<END
FROM $BASE_IMAGE
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
END
step "building an image of Debian's Prometheus" build-prometheus buildah bud --isolation chroot --pull-never \
    -t "$PROMETHEUS_IMAGE" prometheus-image

step "the router's image has no torch, no pip and no cache" router-contents podman run --rm --network none --read-only \
    --entrypoint sh localhost/kvrelay/router:0.1.0 -c \
    'set -e; test "$(id -u)" = 10001; ! python -c "import torch"; ! python -m pip; ! test -e /root/.cache; kvrelay --help'

# --- the clusters. Podman's health checks need systemd's timers, so this asks by itself.
export PYTHONPATH=$repository
# try NAME WHAT...: what stream.py does with the cluster of containers in this folder.
try() { "$python" "$repository/tests/containers/stream.py" "http://127.0.0.1:$KVRELAY_PORT" "$@"; }

# up FOLDER
up() {
    clusters=("$1")
    (cd "$1" && compose up -d >"$work/up.log" 2>&1) || { cat "$work/up.log" >&2; fail "podman-compose up failed"; }
}

down() {
    for folder in "${clusters[@]}"; do (cd "$folder" && COMPOSE_PROFILES=cpu,monitoring compose down -t 10 -v >/dev/null 2>&1); done
    clusters=()
}

say "1P1D, from deploy/compose"
up "$repository/deploy/compose"
try --nodes 1 1 --kill kvrelay_decode-0_1
for name in prefill-0 decode-0 router; do
    podman healthcheck run "kvrelay_${name}_1" || fail "the health check of $name says no"
done
podman logs kvrelay_decode-0_1 2>&1 | grep "comes by direct" | tail -n 1
down

say "2P2D, from kvrelay compose"
"$python" -m kvrelay.cli compose --prefill 2 --decode 2 --port "$KVRELAY_PORT" --output cluster-2p2d
up "$work/cluster-2p2d"
try --nodes 2 2 --kill kvrelay_decode-0_1 --kill kvrelay_prefill-1_1
say "Prometheus (Debian's), with the configuration that it has in compose"
(cd cluster-2p2d && COMPOSE_PROFILES=monitoring compose up -d --no-deps prometheus >"$work/up.log" 2>&1) || { cat "$work/up.log" >&2; fail "no Prometheus"; }
try --nodes 2 2 --scraped "http://127.0.0.1:$PROMETHEUS_PORT"
down

say "1P1D over the containers' network, by NIXL"
"$python" -m kvrelay.cli compose --port "$KVRELAY_PORT" --kv-connector nixl --output cluster-nixl
up "$work/cluster-nixl"
try --nodes 1 1
podman logs kvrelay_decode-0_1 2>&1 | grep "comes by nixl" | tail -n 1
down
say "all done"
