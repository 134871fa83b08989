"""Which rows fit into the time, by what they took before."""

import statistics
from typing import NamedTuple

START = 20  # seconds of imports, and of making rows
ARGUMENTS = 15  # seconds per row for random arrays, FLOPs and the peak
# Seconds until a contender's first result with its program from the cache; PyTorch traces again.
LOADED = {"ours": 15, "torch compiled": 30}
# Seconds until the first result without a figure of an earlier run.
UNKNOWN = {
    "full": {"ours": 180, "torch eager": 10, "torch channels_last": 10, "torch compiled": 170},
    "tiny": {"ours": 60, "torch eager": 5, "torch channels_last": 5, "torch compiled": 60},
}
UNKNOWN_PASS = 0.5  # seconds
UNKNOWN_IMAGE_BATCH = 6.0  # seconds of a pass of the row "image_batch"
AGREEMENT = 90  # seconds of the row "agreement", in a thread beside compilation


class Planned(NamedTuple):
    """A row of the plan: what it takes, in seconds."""

    name: str
    first: dict[str, float]  # {contender: until its first result}
    measuring: float


def in_order(cases, results):
    """Names of rows: not in the file, without figures of a contender, complete.

    Args:
        cases: {name: (row of the file, names of contenders)}.
        results: rows of the file.
    """

    def place(name):
        case, contenders = cases[name]
        known = results.get(case, {}).get("seconds", {})
        return (case not in results) + (not set(contenders) <= known.keys())

    return sorted(cases, key=place, reverse=True)


def earlier_row(case, kind, results):
    """The row of a case on this device, else on another one; {} if there is none."""
    others = (row for name, row in results.items() if name.endswith(f" {case}"))
    return results.get(f"{kind} {case}") or next(others, {})


def plan_row(name, contenders, earlier, cached, config):
    """A Planned row.

    Args:
        name: of the row.
        contenders: names.
        earlier: row of earlier_row.
        cached: contenders whose programs need not be compiled.
        config: Config.
    """
    unknown, first, measuring = UNKNOWN[config.size], {}, ARGUMENTS
    for contender in contenders:
        known = earlier.get("first_seconds", {}).get(contender)
        kind = contender if contender in unknown else "ours"
        seconds = statistics.median(known) if known else unknown[kind]
        first[contender] = min(seconds, LOADED[kind]) if contender in cached else seconds
        passes = earlier.get("seconds", {}).get(contender)
        guess = UNKNOWN_IMAGE_BATCH if name == "image_batch" else UNKNOWN_PASS
        a_pass = statistics.median(passes) if passes else guess
        measuring += a_pass * (1 + config.rounds) + config.rounds * max(a_pass, config.seconds)
    return Planned(name, first, 0 if config.compile_only else measuring)


def total_seconds(planned):
    """Seconds of a run: ours compile at once, in threads, PyTorch's one after the other."""
    ours = [t for row in planned for name, t in row.first.items() if name.startswith("ours")]
    theirs = sum(t for row in planned for name, t in row.first.items() if name.startswith("torch"))
    return START + max([theirs, *ours]) + sum(row.measuring for row in planned)


def choose_rows(candidates, minutes):
    """(rows that fit, rows that do not), in the order of the candidates."""
    chosen, left_out = [], []
    for row in candidates:
        fits = total_seconds([*chosen, row]) <= 60 * minutes
        (chosen if fits else left_out).append(row)
    return chosen, left_out


def describe(row):
    """A row's time, for the printed plan."""
    first = [f"{name} {seconds:.0f} s" for name, seconds in row.first.items()]
    return f"{row.name}: {', '.join([*first, f'measuring {row.measuring:.0f} s'])}"


def print_plan(chosen, left_out, minutes, kind):
    """Print what is measured and what is left out."""
    total = total_seconds(chosen) / 60
    print(f"plan: {total:.1f} of {minutes:g} minutes on {kind}; estimated until the first result:")
    for row in chosen:
        print(f"  {describe(row)}")
    for row in left_out:
        alone = total_seconds([row]) / 60
        print(f"left out, {alone:.1f} minutes alone: {describe(row)}")
    print(end="", flush=True)
