"""The memory that a program has used."""

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
