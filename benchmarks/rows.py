"""Results files and command lines of the benchmarks.

`benchmarks/results/NAME.json` has the rows of benchmarks.NAME, {case: row}. Every row has "command"
and "machine".
"""

import json
import os
import platform
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from diffusers_flax.command_line import run_main
from diffusers_flax.compiling.chips import check_compiler
from diffusers_flax.loading.files import save_whole

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "diffusers", "transformers", "numpy")
GIB = 2**30


def run_benchmark(config_class, run, description, args=None):
    """Parse the flags, check --output, and run; arguments as for command_line.run_main."""

    def work(config):
        check_output(config.output)
        run(config)

    run_main(config_class, description, work, args, interrupted="the rows written so far are kept")


def check_counts(config, **lowest):
    """Raise a ValueError for a flag below its lowest value."""
    for name, least in lowest.items():
        if (value := getattr(config, name)) < least:
            raise ValueError(f"--{name} {value} must be at least {least}")


def check_output(output):
    """Raise a ValueError for a file that cannot be written or is not a results file.

    "" is the benchmark's own file.
    """
    if not output:
        return
    folder = Path(output).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from error
    read_rows(output)


def benchmark_command():
    """The command of this process, which runs a module of benchmarks/."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def describe_machine(packages=PACKAGES):
    """CPU, memory, load and versions of packages, for the row."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    machine = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
    }
    if machine["load_before"] > machine["cores"] / 2:
        print(
            f"warning: other work (load {machine['load_before']:.1f} on {machine['cores']} cores) "
            "slows down some contenders more than others",
            file=sys.stderr,
        )
    return machine


def read_rows(output):
    """The rows of a results file, {case: row}; {} if the file does not exist.

    Raises:
        ValueError: the file is damaged or not a results file.
    """
    output = Path(output)
    try:
        rows = json.loads(output.read_text()) if output.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output} cannot be read ({error}); name another") from error
    values = rows.values() if isinstance(rows, dict) else [None]
    if not all(isinstance(row, dict) and "command" in row for row in values):
        raise ValueError(f"--output {output} is not a results file; name another")
    return rows


def describe_compiler():
    """describe_machine with the TPU's compiler; a ValueError if that is not installed."""
    check_compiler()
    return describe_machine(("jax", "jaxlib", "libtpu"))


def write_rows(rows, machine, output):
    """Write rows into a results file, next to the rows of other cases, and print their numbers.

    Args:
        rows: {case: dict}.
        machine: describe_machine(), called before they were measured.
        output: the file.

    Returns:
        All rows of the file.
    """
    origin = {"command": benchmark_command(), "machine": machine}
    results = read_rows(output) | {case: row | origin for case, row in rows.items()}
    text = json.dumps(results, indent=1) + "\n"
    save_whole(Path(output), lambda file: file.write_text(text))
    for case, row in rows.items():
        print_numbers(row, case)
    return results


def print_numbers(row, title):
    """Print a row's numbers and texts, a line for each dict that has some."""
    cells = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if isinstance(value, int | float | str)
    ]
    if cells:
        print(f"{title}: {', '.join(cells)}", flush=True)
    for name, value in row.items():
        if isinstance(value, dict):
            print_numbers(value, f"{title}, {name}")


def psnr_cell(psnr, equal=""):
    """A PSNR in dB; `equal` if it is None, as for equal images."""
    return equal if psnr is None else f"{psnr:.1f} dB"


def markdown_table(header, lines):
    """A table in Markdown.

    Args:
        header: the titles of the columns, separated by |.
        lines: lists of cells.
    """
    columns = [title.strip() for title in header.split("|")]
    form = ["| " + " | ".join(cells) + " |" for cells in [columns, *lines]]
    return "\n".join([form[0], "|---" * len(columns) + "|", *form[1:]]) + "\n"


def rows_of(results, kind):
    """{name: row} of the rows whose case is "KIND NAME"."""
    prefix = f"{kind} "
    return {
        case.removeprefix(prefix): row for case, row in results.items() if case.startswith(prefix)
    }
