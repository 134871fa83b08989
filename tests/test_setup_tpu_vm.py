"""setup-tpu-vm.sh with stubs of the commands that install: the choice of jax's extra, mistakes."""

import os
import re
import shutil
import subprocess

import pytest
from helpers import ROOT, slow

NO_GPU = "nvidia-smi lists no GPU with a driver from 525 on"
TURING = ("580.65.06, 7.5",)
CUDNN = "nvidia-cudnn-cu12>=9.10.2,<9.11"  # the last for GPUs before Turing
PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
case $* in
    *'jax.devices()'*) echo "$DEVICES" && [[ $DEVICES = \\[* ]] ;;
    *'jax.__version__'*) echo 0.10.2 ;;
esac
"""
NVIDIA_SMI = """#!/bin/bash
[[ $* != *compute_cap* || $GPUS = *,* ]] || { echo 'Field "compute_cap" is not valid'; exit 2; }
printf '%s' "$GPUS"
[ -n "$GPUS" ]
"""


def command(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def setup(
    folder, *args, gpus=(), tpu=False, devices="[CpuDevice(id=0)]", python=PYTHON, **variables
):
    """Run the script where the accelerators are gpus (lines of nvidia-smi) and a TPU.

    Returns:
        (exit code, lines of output without the host, calls of .venv/bin/python).
    """
    shutil.copy(ROOT / "setup-tpu-vm.sh", folder)
    command(folder / ".venv/bin/python", python)
    tools = folder / "tools"
    for tool in ("aria2c", "curl"):
        command(tools / tool, "#!/bin/bash\n")
    command(tools / "nvidia-smi", NVIDIA_SMI)
    for number in range(60):  # network cards of a VM, and TPU chips
        device = folder / f"sys/bus/pci/devices/{number:02}/uevent"
        device.parent.mkdir(parents=True)
        device.write_text(f"DRIVER=x\nPCI_ID=1AE0:00{'63' if tpu and number < 4 else '42'}\n")
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "GPUS": "".join(f"{gpu}\n" for gpu in gpus),
        "SYSFS": str(folder / "sys"),
        "DEVICES": devices,
    }
    process = subprocess.run(
        ["bash", "setup-tpu-vm.sh", *args],
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    lines = [line.partition("] ")[2] for line in process.stdout.splitlines()]
    return process.returncode, lines, calls


@pytest.mark.parametrize(
    "args, machine, extra",
    [
        ((), {"gpus": ("580.65.06, 9.0",), "devices": "[CudaDevice(id=0)]"}, "cuda13"),
        ((), {"gpus": TURING, "tpu": True}, "tpu"),
        ((), {}, None),
        (("cuda",), {"gpus": TURING, "devices": "[CudaDevice(id=0)]"}, "cuda13"),
        *slow(
            (("cuda",), {"gpus": ("580.65.06, 7.0",), "devices": "[CudaDevice(id=0)]"}, "cuda12"),
            (("cuda",), {"gpus": ("570.133.20, 12.0",), "devices": "[CudaDevice(id=0)]"}, "cuda12"),
            (
                ("cuda",),
                {"gpus": (*TURING, "580.65.06, 6.1"), "devices": "[CudaDevice(id=0)]"},
                "cuda12",
            ),
            (("cuda",), {}, "cuda12"),
            (("cpu",), {"gpus": TURING}, None),
            (("tpu",), {}, "tpu"),
        ),
    ],
)
def test_which_jax_is_installed(tmp_path, args, machine, extra):
    code, lines, calls = setup(tmp_path, *args, **machine)
    assert code == 0, lines
    (install,) = (call for call in calls if "-r requirements.txt" in call)
    old = any(float(gpu.split()[1]) < 7.5 for gpu in machine.get("gpus", ())) and extra == "cuda12"
    packages = [
        "requirements.txt --editable .",
        *([f"jax[{extra}]"] if extra else []),
        *([CUDNN] if old else []),
    ]
    assert install.partition("-r ")[2] == " ".join(packages)
    assert f"jax 0.10.2 for {extra or 'the CPU'} is installed" in lines
    (removed,) = (call.split("--yes ")[1].split() for call in calls if "uninstall" in call)
    assert ("libtpu" in removed) == (extra != "tpu")
    assert ("jax-cuda12-plugin" in removed) == (extra != "cuda12")
    assert ("jax-cuda13-pjrt" in removed) == (extra != "cuda13")
    shown = machine.get("devices", "[CpuDevice(id=0)]")
    is_shown = extra != "tpu" and not (extra and not machine)
    assert (f"jax.devices(): {shown}" in lines) == is_shown
    assert sum(line.startswith(NO_GPU) for line in lines) == (
        not machine and args in ((), ("cuda",))
    )


@pytest.mark.variants
@pytest.mark.parametrize(
    "args, machine, message",
    [
        (
            ("gpu",),
            {},
            "unknown target 'gpu'; name one of tpu, cuda, cpu, aria2 or chromium, or none",
        ),
        (("cpu", "tpu"), {}, "2 targets are given; name one of tpu, .*"),
        (
            ("cuda",),
            {"gpus": ("470.57.02, 7.0",)},
            "the NVIDIA driver 470.57.02 is too old for jax; .*",
        ),
    ],
)
def test_mistakes_end_in_one_line_and_2(tmp_path, args, machine, message):
    code, (line,), calls = setup(tmp_path, *args, **machine)
    assert (code, calls) == (2, [])
    assert re.fullmatch(f"error: {message}", line)


def test_a_gpu_that_jax_cannot_use(tmp_path):
    reason = "RuntimeError: Unable to initialize backend 'cuda'"
    code, lines, _ = setup(tmp_path, gpus=TURING, devices=reason)
    assert code == 1 and lines[-1] == f"error: jax finds no device: {reason}"


def test_sh_is_not_bash(tmp_path):
    if not (sh := shutil.which("dash")):
        pytest.skip("needs dash")
    for script, run_with in (("setup-tpu-vm.sh", "cpu"), ("script.sh", "plan")):
        process = subprocess.run([sh, ROOT / script, run_with], capture_output=True, text=True)
        assert process.returncode == 2 and process.stdout == ""
        assert process.stderr == f"run it with bash: bash {ROOT / script}\n"
