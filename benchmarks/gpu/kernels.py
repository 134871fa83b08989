"""Time by kernel of one pass on a GPU."""

import gzip
import tempfile
from collections import defaultdict
from pathlib import Path

import jax


def kernel_rows(profile):
    """What ran on the GPU, by kernel and operation, the longest first.

    Args:
        profile: jax.profiler.ProfileData.

    Returns:
        [(microseconds, launches, kernel, operation or command buffer, module)]; the last two are
        "" for PyTorch's kernels.
    """
    sums = defaultdict(lambda: [0.0, 0])
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # summaries of the same events
            for event in line.events:
                stats = dict(event.stats)
                total = sums[event.name, stats.get("hlo_op", ""), stats.get("hlo_module", "")]
                total[0] += event.duration_ns / 1000
                total[1] += 1
    return sorted(((*total, *names) for names, total in sums.items()), reverse=True)


def write_kernels(run, file):
    """Profile a pass and write its kernels.

    Args:
        run: does a pass to its end.
        file: Path of the table, tab-separated and compressed, see kernel_rows.

    Returns:
        (milliseconds in kernels, launches).

    Raises:
        ValueError: the profile has no kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (written,) = Path(folder).rglob("*.xplane.pb")
        rows = kernel_rows(jax.profiler.ProfileData.from_file(str(written)))
    if not rows:
        raise ValueError("the profile has no kernels of a GPU")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{row[0]:.1f}\t" + "\t".join(map(str, row[1:])) + "\n" for row in rows]
    file.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return sum(row[0] for row in rows) / 1000, sum(row[1] for row in rows)
