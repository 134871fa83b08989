#!/usr/bin/env bash
# Install what the scripts need: aria2, curl, .venv, jax for this accelerator, requirements.txt.
#
#   bash setup-tpu-vm.sh            for the TPU or NVIDIA GPUs that it finds here, else for the CPU
#   bash setup-tpu-vm.sh cuda       for NVIDIA GPUs; jax's CUDA 13 if the driver is 580 or newer and
#                                   the GPU is of 2018 or later (compute capability 7.5), else CUDA 12
#   bash setup-tpu-vm.sh tpu        for a TPU
#   bash setup-tpu-vm.sh cpu        for the CPU
#   bash setup-tpu-vm.sh aria2      only aria2 and curl, which script.sh needs
#   bash setup-tpu-vm.sh chromium   only Chromium, which the tests of edit_app.py need
#
# With one NVIDIA GPU, and with the driver installed; the last line must print [CudaDevice(id=0)]:
#   bash setup-tpu-vm.sh cuda
#   source .venv/bin/activate
#   python -c "import jax; print(jax.devices())"
#
# On a TPU slice, run it on every worker at once:
#   gcloud compute tpus tpu-vm ssh $TPU_NAME --zone=$ZONE --worker=all \
#       --command="git clone URL_OF_THIS_REPOSITORY scripts; cd scripts && bash setup-tpu-vm.sh"
#
# Safe to run again: installed parts are kept. Then: source .venv/bin/activate
# PYTHON=python3.12 selects the interpreter, 3.11 or newer. Asks no questions.
[ -n "${BASH_VERSION-}" ] || { echo "run it with bash: bash $0" >&2; exit 2; }
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "[$(uname -n)] $*"; }
fail() { say "error: $*" >&2; exit 2; }

targets='tpu, cuda, cpu, aria2 or chromium'
case ${1-} in
    '' | tpu | cuda | cpu | aria2 | chromium) target=${1-} ;;
    -h | --help)
        sed -n '2,/^\[ -n/{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
    *) fail "unknown target '$1'; name one of $targets, or none" ;;
esac
[ $# -le 1 ] || fail "$# targets are given; name one of $targets, or none"
torch=${TORCH:-torch==2.13.0}

# The TPUs that jax looks for. Source: _TPU_PCI_DEVICE_IDS in jax/_src/hardware_utils.py.
has_tpu() {
    grep -qsE '^PCI_ID=1AE0:00(27|56|5E|62|63|6F|76)$' "${SYSFS:-/sys}"/bus/pci/devices/*/uevent
}

# One line per GPU, such as "580.65.06, 9.0": driver and compute capability. Drivers before 510 say
# only their version.
list_gpus() {
    for columns in driver_version,compute_cap driver_version; do
        lines=$(nvidia-smi --query-gpu=$columns --format=csv,noheader 2>/dev/null) || continue
        echo "$lines"
        return
    done
    return 1
}

if [ -z "$target" ]; then
    if has_tpu; then
        target=tpu
    elif list_gpus >/dev/null; then
        target=cuda
    else
        target=cpu
        say "nvidia-smi lists no GPU with a driver from 525 on, and there is no TPU:" \
            "installing for the CPU; if this is wrong: bash setup-tpu-vm.sh cuda, or tpu"
    fi
fi
extra= cudnn=
[ "$target" != tpu ] || extra=tpu
if [ "$target" = cuda ]; then
    extra=cuda12
    if gpus=$(list_gpus); then
        # Versions: jax's installation guide, and CUDA 13, which left GPUs before Turing.
        case $(awk -F '[., ]+' '
            $1 < 525 { old = 1 }
            $1 < 580 { cuda12 = 1 }
            $(NF - 1) * 10 + $NF < 75 { before_turing = 1 }
            END { print old ? "old" : before_turing ? "before Turing" : cuda12 ? "cuda12" : "cuda13" }
            ' <<<"$gpus") in
            old)
                gpus=${gpus%%[, $'\n']*}
                fail "the NVIDIA driver $gpus is too old for jax; install 525 or newer, or 580 for CUDA 13"
                ;;
            # cuDNN's support matrix: 9.11 left these GPUs; jax takes 9.10.2 and later.
            'before Turing') cudnn='nvidia-cudnn-cu12>=9.10.2,<9.11' ;;
            cuda13) extra=cuda13 ;;
        esac
    else
        say "nvidia-smi lists no GPU with a driver from 525 on; installing jax's CUDA 12 anyway"
    fi
fi

apt_install() {
    say "installing $*"
    as_root=$([ "$(id -u)" = 0 ] || echo sudo)
    # A new VM may still be installing updates, so wait up to 300 s for the apt lock.
    apt_get="$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"
    $apt_get update && $apt_get install -y "$@" >/dev/null
}

find_python() { # among $PYTHON, else among the usual names
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
}

if [ "$target" = chromium ]; then
    command -v apt-get >/dev/null || fail "install Chromium with this system's package manager"
    apt_install --no-install-recommends chromium
    exit 0
fi

if ! command -v aria2c >/dev/null || ! command -v curl >/dev/null; then
    command -v apt-get >/dev/null ||
        fail "install aria2 and curl with this system's package manager"
    apt_install aria2 curl
fi
[ "$target" = aria2 ] && exit 0

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    [ -n "$python" ] || [ -z "${PYTHON-}" ] || fail "PYTHON=$PYTHON is no Python 3.11 or newer"
    # TPU VMs run Ubuntu 22.04: python3 is 3.10, and its archive also has 3.11.
    [ -n "$python" ] || { apt_install python3.11 python3.11-venv && python=$(find_python); } || true
    [ -n "$python" ] || fail "no Python 3.11 or newer; install one, or name it with PYTHON=..."
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
pip install -r requirements.txt --editable . ${extra:+"jax[$extra]"} ${cudnn:+"$cudnn"}
# jax would look for the accelerator of an earlier target in every program.
for package in libtpu jax-cuda{12,13}-{plugin,pjrt}; do
    [[ $package = libtpu && $extra = tpu || $package = "jax-$extra-"* ]] || others+=("$package")
done
pip uninstall --yes "${others[@]}" 2>/dev/null
touch .venv/installed
say "jax $(.venv/bin/python -c 'import jax; print(jax.__version__)') for ${extra:-the CPU} is installed"
show='import jax; print(jax.devices())'
if [ "$target" = tpu ]; then # on a slice it waits for all workers
    say "to see the devices, on all workers at once: .venv/bin/python -c '$show'"
elif [ "$target" = cpu ] || [ -n "$gpus" ]; then
    platform=${extra:0:4} # cuda, or empty
    devices=$(JAX_PLATFORMS=${platform:-cpu} .venv/bin/python -c "$show" 2>&1 | tail -n 1) ||
        { say "error: jax finds no device: $devices" >&2 && exit 1; }
    say "jax.devices(): $devices"
fi
say "done; now: source .venv/bin/activate"
