#!/usr/bin/env bash
# Install what the scripts need: aria2, curl, .venv, jax for this accelerator, requirements.txt.
#
#   bash setup-tpu-vm.sh            a TPU VM; on a slice, run it on every worker at once:
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="git clone URL_OF_THIS_REPOSITORY scripts; cd scripts && bash setup-tpu-vm.sh"
#   bash setup-tpu-vm.sh cuda       a machine with NVIDIA GPUs (CUDA 12 or newer driver)
#   bash setup-tpu-vm.sh cpu        a machine without accelerator
#   bash setup-tpu-vm.sh aria2      only aria2 and curl, which script.sh needs
#   bash setup-tpu-vm.sh chromium   only Chromium, which the tests of edit_app.py need
#
# Safe to run again: installed parts are kept. Then: source .venv/bin/activate
# PYTHON=python3.12 selects the interpreter, 3.11 or newer. Asks no questions.
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "[$(hostname)] $*"; }

target=${1:-tpu}
torch=${TORCH:-torch==2.13.0}
case $target in
    tpu) extra=tpu ;;
    cuda) extra=cuda12 ;;
    cpu | aria2 | chromium) extra= ;;
    -h | --help)
        sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
    *)
        say "unknown target '$target'; use tpu, cuda, cpu, aria2 or chromium" >&2
        exit 2
        ;;
esac

apt_install() {
    say "installing $*"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    # A new VM may still be installing updates, so wait up to 300 s for the apt lock.
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

if [ "$target" = chromium ]; then
    command -v apt-get >/dev/null || {
        say "install Chromium with this system's package manager" >&2
        exit 2
    }
    apt_install --no-install-recommends chromium
    exit 0
fi

if ! command -v aria2c >/dev/null || ! command -v curl >/dev/null; then
    command -v apt-get >/dev/null || {
        say "install aria2 and curl with this system's package manager" >&2
        exit 2
    }
    apt_install aria2 curl
fi
[ "$target" = aria2 ] && exit 0

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    # TPU VMs run Ubuntu 22.04: python3 is 3.10, and its archive also has 3.11.
    [ -n "$python" ] || { apt_install python3.11 python3.11-venv && python=$(find_python); } || true
    if [ -z "$python" ]; then
        say "no Python 3.11 or newer; install one, or name it with PYTHON=..." >&2
        exit 2
    fi
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    say "making .venv with Python $version"
    rm -rf .venv
    # Debian and Ubuntu have venv in a separate package.
    "$python" -m venv .venv >/dev/null 2>&1 ||
        { apt_install "python$version-venv" && "$python" -m venv --clear .venv; }
fi
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
say "installing packages for $target (some minutes the first time)"
# torch only reads checkpoints, on the host. PyTorch's index has a CPU build, a tenth of the size of
# the CUDA build on PyPI; the CUDA build is the fallback if that index cannot be reached.
pip install --no-index "$torch" 2>/dev/null ||
    pip --retries 1 install "$torch" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    pip install "$torch"
pip install -r requirements.txt ${extra:+"jax[$extra]"}
touch .venv/installed
say "jax $(.venv/bin/python -c 'import jax; print(jax.__version__)') for $target is installed"
say "done; now: source .venv/bin/activate"
