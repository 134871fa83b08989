"""Memory of devices and of the host: how much there is, and the most that was in use."""

import re
import sys
from pathlib import Path


def peak_memory(devices, reset=False):
    """The most memory in use since the process began, or since the last reset where possible.

    Args:
        devices: jax devices.
        reset: start again from what is in use; Linux can do it, a device cannot.

    Returns:
        (bytes of the fullest device, "device"), or (bytes of this process, "process") for devices
        that do not report it, such as a CPU.
    """
    stats = [device.memory_stats() or {} for device in devices]
    if all("peak_bytes_in_use" in x for x in stats):
        return max(x["peak_bytes_in_use"] for x in stats), "device"
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024, "process"
    except (OSError, ValueError, IndexError):
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


def available_memory(devices):
    """Bytes of memory that programs of a device can use; None: unknown.

    It is the host's for CPUs, which share it.

    Args:
        devices: jax devices of one kind; those of other processes do not tell.
    """
    if devices[0].platform == "cpu":
        return host_memory()
    local = next(x for x in devices if x.process_index == x.client.process_index())
    return (local.memory_stats() or {}).get("bytes_limit")


def host_memory():
    """Bytes of memory and swap that this machine or container has; None: unknown."""
    try:
        lines = Path("/proc/meminfo").read_text()
        total = sum(int(x) << 10 for x in re.findall(r"(?:Mem|Swap)Total: +(\d+) kB", lines))
        limit = Path("/sys/fs/cgroup/memory.max")
        limit = limit.read_text().strip() if limit.exists() else "max"
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return None
