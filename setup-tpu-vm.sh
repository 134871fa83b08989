#!/usr/bin/env bash
# Put what the scripts need on a machine: aria2, curl, .venv, jax for its accelerator, requirements.txt.
#
#   bash setup-tpu-vm.sh            a TPU VM; on a slice, run it on every worker at once:
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="git clone URL_OF_THIS_REPOSITORY scripts; cd scripts && bash setup-tpu-vm.sh"
#   bash setup-tpu-vm.sh cuda       a machine with NVIDIA GPUs (CUDA 12 or newer driver)
#   bash setup-tpu-vm.sh cpu        any other
#   bash setup-tpu-vm.sh aria2      aria2 and curl alone, with which script.sh downloads
#
# Safe to run again: what is there already is left alone. Then: source .venv/bin/activate
# PYTHON=python3.12 chooses the interpreter, 3.11 or newer. Asks nothing.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "[$(hostname)] $*"; }

target=${1:-tpu}
torch=${TORCH:-torch==2.13.0}
case $target in
    tpu) extra=tpu ;;
    cuda) extra=cuda12 ;;
    cpu | aria2) extra= ;;
    -h | --help)
        sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
    *)
        say "unknown target '$target'; use tpu, cuda, cpu or aria2" >&2
        exit 2
        ;;
esac

apt_install() {
    say "installing $*"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    # A fresh VM may still be updating itself: wait for its lock.
    apt_get="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"
    $apt_get update && $apt_get install -y "$@" >/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
}

if ! command -v aria2c >/dev/null || ! command -v curl >/dev/null; then
    command -v apt-get >/dev/null || {
        say "aria2 (aria2c) and curl are needed; install them with this system's package manager" >&2
        exit 2
    }
    apt_install aria2 curl
fi
[ "$target" = aria2 ] && exit 0

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    # TPU images come with Ubuntu 22.04, whose python3 is 3.10 and whose archive has 3.11 beside it.
    [ -n "$python" ] || { apt_install python3.11 python3.11-venv && python=$(find_python); } || true
    if [ -z "$python" ]; then
        say "Python 3.11 or newer is needed; install one, or name one by PYTHON=..." >&2
        exit 2
    fi
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "making .venv with Python $version"
    rm -rf .venv
    # Debian and Ubuntu keep venv in a package of its own.
    "$python" -m venv .venv >/dev/null 2>&1 ||
        { apt_install "python$version-venv" && "$python" -m venv --clear .venv; }
fi
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
say "installing packages for $target (some minutes the first time)"
# torch only reads checkpoints, on the host. Its CPU build is a tenth of the size of the CUDA build
# that the package index has; where PyTorch's own index is out of reach, the large one does as well.
pip install --no-index "$torch" 2>/dev/null ||
    pip --retries 1 install "$torch" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    pip install "$torch"
pip install -r requirements.txt ${extra:+"jax[$extra]"}
touch .venv/installed
say "jax $(.venv/bin/python -c 'import jax; print(jax.__version__)') for $target is installed"
say "done; now: source .venv/bin/activate"
