"""Converting archives to shards, compared with reading the same files by Python's tarfile.

    python -m benchmarks.archives --output archives.json

Makes 100,000 pairs of JPEGs of noise, 8 kB each, in tar archives of 10,000 pairs, and converts
them:

    samples   WebDataset, key.input.jpg, key.output.jpg and key.txt
    index     images in tar archives, and an index of JSON lines in a random order
    gzip      the same in .tar.gz, each in two parts

The other contender opens the same archives with tarfile and reads every file, one after the other.
Each measurement is a new process, the contenders in turn; conversions write to --work_dir. A try:

    python -m benchmarks.archives --pairs 1000 --rounds 1 --output quick.json

Needs a CPU, 4 GB of disk and 2 GB of memory; about six minutes.
"""

import io
import json
import multiprocessing
import resource
import shutil
import statistics
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import simplejpeg

from benchmarks.rows import check_counts, describe_machine, run_benchmark, write_rows
from diffusers_flax.data.archives.convert import convert_archives
from diffusers_flax.data.archives.tar import Parts, find_archives

SIDE = 64  # pixels
IMAGES = 64  # different ones
ARCHIVE_PAIRS = 10_000


@dataclass(frozen=True)
class Config:
    cases: tuple[Literal["samples", "index", "gzip"], ...] = ("samples", "index", "gzip")
    pairs: int = 100_000
    rounds: int = 3  # each contender is measured once in each
    work_dir: str = ""  # for archives and shards; "": a temporary directory
    output: str = "benchmarks/results/archives.json"


def make_archives(folder: Path, case: str, num_pairs: int) -> None:
    """Write the archives of a case, and its index."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (IMAGES, SIDE, SIDE, 3), np.uint8)
    images = [simplejpeg.encode_jpeg(pixels, quality=90) for pixels in noise]
    folder.mkdir(parents=True)
    rows = []
    for first in range(0, num_pairs, ARCHIVE_PAIRS):
        file = folder / f"{first // ARCHIVE_PAIRS:05d}.tar{'.gz' * (case == 'gzip')}"
        options = {"mode": "w:gz", "compresslevel": 1} if case == "gzip" else {"mode": "w"}
        with tarfile.open(file, **options) as archive:
            for n in range(first, min(first + ARCHIVE_PAIRS, num_pairs)):
                files = {
                    f"{n:09d}.input.jpg": images[n % IMAGES],
                    f"{n:09d}.output.jpg": images[7 * n % IMAGES],
                    f"{n:09d}.txt": f"make image {n} brighter".encode(),
                }
                for name, data in list(files.items())[: 3 if case == "samples" else 2]:
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                names = dict(zip(("input", "edited"), files))
                rows.append(names | {"edit": f"make image {n} brighter"})
        if case == "gzip":
            data, half = file.read_bytes(), file.stat().st_size // 2
            for part, content in (("aa", data[:half]), ("ab", data[half:])):
                Path(f"{file}.part-{part}").write_bytes(content)
            file.unlink()
    if case != "samples":
        lines = [json.dumps(rows[n]) + "\n" for n in rng.permutation(num_pairs)]
        (folder / "index.jsonl").write_text("".join(lines))


def read_by_tarfile(folder: Path, work_dir: Path) -> None:
    """Read all files of all archives."""
    for found in find_archives(folder, sorted(folder.glob("*.tar*"))):
        with open_parts(found.parts) as file, tarfile.open(fileobj=file) as archive:
            for member in archive:
                archive.extractfile(member).read()


def open_parts(paths: tuple[Path, ...]) -> io.BufferedReader:
    """An archive, whole or in parts, as one file."""
    return open(paths[0], "rb") if len(paths) == 1 else io.BufferedReader(Parts(paths), 1 << 20)


def convert(folder: Path, work_dir: Path) -> None:
    """Convert the archives to shards."""
    out = work_dir / "shards"
    shutil.rmtree(out, ignore_errors=True)
    convert_archives(folder, out)


CONTENDERS = {"tarfile": read_by_tarfile, "ours": convert}


def measure(name: str, folder: Path, work_dir: Path) -> tuple[float, float, float]:
    """Seconds of a contender, its CPU seconds, and this process's peak memory in MB."""
    start, cpu = time.perf_counter(), time.process_time()
    CONTENDERS[name](folder, work_dir)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def bench(config: Config, work_dir: Path, case: str) -> dict:
    """The row of a case."""
    folder = work_dir / case
    make_archives(folder, case, config.pairs)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.tar*"))
    row = {"pairs": config.pairs, "bytes": num_bytes}
    row |= {kind: {} for kind in ("seconds", "cpu_seconds", "peak_mb")}
    names = list(CONTENDERS)
    for number in range(config.rounds):
        for name in names[::-1] if number % 2 else names:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                figures = process.submit(measure, name, folder, work_dir).result()
            for kind, figure in zip(("seconds", "cpu_seconds", "peak_mb"), figures):
                row[kind].setdefault(name, []).append(figure)
    shutil.rmtree(folder)
    summary = {
        "pairs_per_second": config.pairs / min(row["seconds"]["ours"]),
        "peak_mb": max(row["peak_mb"]["ours"]),
    }
    for kind in ("seconds", "cpu_seconds"):
        ratios = [a / b for a, b in zip(row[kind]["tarfile"], row[kind]["ours"])]
        summary[f"{kind}_to_tarfile"] = statistics.median(ratios)
        summary[f"{kind}_to_tarfile_range"] = [min(ratios), max(ratios)]
    return row | {"summary": summary}


def run(config: Config) -> None:
    """Measure all cases, write each when it is measured."""
    check_counts(config, pairs=2, rounds=1)
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = Path(config.work_dir or temporary) / "archives"
        for case in config.cases:
            machine = describe_machine(["numpy", "pyarrow"])
            write_rows({case: bench(config, work_dir, case)}, machine, config.output)


def main(args=None):
    """Command line."""
    run_benchmark(Config, run, __doc__, args)


if __name__ == "__main__":
    main()
