"""script.sh with the real aria2c and a faulty local server; files of a few MB."""

import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flaky_server import Fault, FlakyServer
from helpers import ROOT, slow, wait_for

SCRIPT = ROOT / "script.sh"
CONNECTIONS = 4
BLOCK = 16 * 1024  # aria2 records unfinished pieces in blocks and loses partial blocks
QUICK = {
    "RETRY_WAIT": "1",
    "MAX_WAIT": "1",
    "MAX_ROUNDS": "3",
    "SAVE_EVERY": "1",
    "CONNECTIONS": str(CONNECTIONS),
}


@pytest.fixture(autouse=True)
def aria2c():
    assert shutil.which("aria2c"), "these tests need aria2: sudo apt-get install aria2"


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "my data"


def make_files(count, size, seed=0):
    rng = random.Random(seed)
    return {f"train-{i:05d}.parquet": rng.randbytes(size + 1000 * i) for i in range(count)}


def write_plan(folder, server, files, worker=3, sizes=None, known=("size", "sha256")):
    """Write a plan as script.py does; its directory has a space in its name."""
    path = folder / "my plan" / f"download-{worker}.txt"
    path.parent.mkdir(exist_ok=True)
    entries = []
    for name, content in files.items():
        size = (sizes or {}).get(name, len(content))
        entry = f"# size={size}\n" if "size" in known else ""
        entry += f"{server.url(name)}\n  out={name}\n"
        if "sha256" in known:
            entry += f"  checksum=sha-256={hashlib.sha256(content).hexdigest()}\n"
        entries.append(entry)
    path.write_text("".join(entries))
    return path


def environment(**changes):
    """The script's environment: short waits, without this machine's proxies and tokens."""
    kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    variables = kept | QUICK | {"HF_HOME": "/no/such/directory"} | changes
    return {name: value for name, value in variables.items() if value is not None}


def start(plan, dest, script=SCRIPT, **changes):
    return subprocess.Popen(
        ["bash", script, plan, dest],
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process, worker=3):
    """Wait for the script; return its exit code and its lines without the host prefix."""
    output, _ = process.communicate(timeout=50)
    prefix = f"[{socket.gethostname()} worker {worker}] "
    lines = output.splitlines()
    assert all(line.startswith(prefix) for line in lines), output
    return process.returncode, [line.removeprefix(prefix) for line in lines]


def run(plan, dest, **changes):
    return end(start(plan, dest, **changes))


def missing(lines):
    return sorted(line.split(": ")[1] for line in lines if line.startswith("missing: "))


def assert_complete(dest, files):
    assert sorted(p.name for p in dest.iterdir()) == sorted([".verified", *files])
    for name, content in files.items():
        assert (dest / name).read_bytes() == content, name


@contextlib.contextmanager
def watched(dest, files):
    """Check the content of every file as soon as it has its final name or changes."""
    seen, bad, over = {}, [], threading.Event()

    def look():
        while not over.is_set():
            for path in list(dest.glob("*.parquet")):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    if seen.get(path.name) != (stat.st_ino, stat.st_size, stat.st_mtime_ns):
                        seen[path.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                        if path.read_bytes() != files[path.name]:
                            bad.append(path.name)
            time.sleep(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not bad, f"partial or wrong under a final name: {bad}"


def children(pid):
    """{command name: pid} of the children of pid."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, rest = re.fullmatch(r"\d+ \((.*)\) (.*)", stat.read_text().strip()).groups()
            if int(rest.split()[1]) == pid:
                found[name] = int(stat.parent.name)
    return found


def saved_bytes(unfinished, controls="*.aria2"):
    """Bytes that a resume skips, from aria2's control files (format: aria2 manual)."""
    total = 0
    for path in unfinished.glob(controls):
        data = path.read_bytes()
        piece = int.from_bytes(data[10:14])
        length = int.from_bytes(data[14:22])
        at = 34 + int.from_bytes(data[30:34])
        bits = int.from_bytes(data[34:at])
        pieces = -(-length // piece)
        width = 8 * (at - 34)
        for i in range(pieces):
            if bits >> (width - 1 - i) & 1:
                total += min(piece, length - i * piece)
        opened = int.from_bytes(data[at : at + 4])
        at += 4
        for _ in range(opened):
            size = int.from_bytes(data[at + 8 : at + 12])
            total += BLOCK * int.from_bytes(data[at + 12 : at + 12 + size]).bit_count()
            at += 12 + size
    return total


def test_everything_goes_wrong_and_all_is_complete_in_the_end(tmp_path, dest):
    files = make_files(6, 2_000_000)
    names = list(files)
    faults = {
        names[0]: Fault(hub=[429, 429]),
        names[1]: Fault(hub=[503, 503], cuts=2),
        names[2]: Fault(cuts=5),
        names[3]: Fault(cdn=[403, 403, 503]),
        names[4]: Fault(link_requests=1, cdn=[429], hub=[500]),
        names[5]: Fault(link_requests=0),
    }
    with FlakyServer(files, faults) as server:
        plan = write_plan(tmp_path, server, files)
        with watched(dest, files):
            process = start(plan, dest, MAX_ROUNDS="4")
            # Signed links of this file fail at first, until the CDN recovers.
            refused = (names[5], 403)
            wait_for(lambda: refused in [r[2:4] for r in server.requests], "a bad link")
            faults[names[5]].link_requests = 1
            code, lines = end(process)
    assert code == 0, lines
    assert_complete(dest, files)
    assert lines[-1].startswith("complete: 6 files, 12 MB, all verified; fetched 12 MB in ")
    assert len((dest / ".verified").read_text().splitlines()) == 6
    statuses = {request[3] for request in server.requests}
    assert {403, 429, 500, 503} <= statuses, "the server did not misbehave as told"


@pytest.mark.slow
def test_wrong_short_and_absent_files_are_named_and_the_others_complete(tmp_path, dest):
    files = make_files(5, 900_000)
    right, wrong, short, once, absent = files
    bad = random.Random(1).randbytes(len(files[wrong]))
    faults = {
        wrong: Fault(wrong=[bad] * 99),
        short: Fault(wrong=[files[short][:800_000]] * 99),
        once: Fault(wrong=[bytes(len(files[once]))]),
        absent: Fault(hub=[404] * 99),
    }
    with FlakyServer(files, faults) as server:
        plan = write_plan(tmp_path, server, files)
        with watched(dest, files):
            code, lines = run(plan, dest)
        assert code == 1
        assert missing(lines) == sorted([wrong, short, absent])
        digest = hashlib.sha256(files[wrong]).hexdigest()
        assert f"missing: {wrong}: wrong SHA-256, expected {digest}" in lines
        assert f"missing: {short}: wrong size, 800000 instead of {len(files[short])} bytes" in lines
        assert any(
            line.startswith(f"missing: {absent}: ") and "not found" in line for line in lines
        )
        assert (dest / ".unfinished").is_dir(), (
            "the loader must see that the directory is incomplete"
        )
        for name in (right, once):
            assert (dest / name).read_bytes() == files[name]
        # A file below 1 MiB is one request; a wrong one is requested twice.
        sent = {name: server.sent[name] for name in files}
        assert sent[right] == len(files[right]) and sent[once] == 2 * len(files[once])
        assert sent[wrong] == 2 * len(bad) and sent[short] == 2 * 800_000 and sent[absent] == 0
        assert sum(request[2] == absent for request in server.requests) == 1

        faults.clear()
        server.faults.clear()
        code, lines = run(plan, dest)
        assert code == 0, lines
        assert_complete(dest, files)
        assert server.sent[right] == len(files[right])


@pytest.mark.slow
def test_killed_at_random_moments_it_fetches_nothing_twice_beyond_what_the_resume_needs(
    tmp_path, dest
):
    rng = random.Random(7)
    files = make_files(4, 5_000_000)
    rate = 200_000  # bytes/s of each of 4 x CONNECTIONS connections: 3.2 MB/s, 6 s without kills
    saved, wasted = 0, {}
    with FlakyServer(files, rate=rate) as server, watched(dest, files):
        plan = write_plan(tmp_path, server, files)
        for kind in ("group", "script", "aria2"):
            process = start(plan, dest, RETRY_WAIT="2")
            sent = sum(server.sent.values())
            wait_for(lambda sent=sent: sum(server.sent.values()) > sent + 300_000, "download")
            time.sleep(rng.uniform(1.3, 1.9))
            aria2 = children(process.pid)["aria2c"]
            if kind == "group":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(aria2 if kind == "aria2" else process.pid, signal.SIGKILL)
            if kind != "aria2":  # after losing aria2 the script retries in RETRY_WAIT seconds
                process.communicate(
                    timeout=3
                )  # an orphan that holds the pipe would hang an ssh session
            wait_for(lambda pid=aria2: not Path(f"/proc/{pid}/fd/0").exists(), "aria2c's end")
            time.sleep(0.3)  # lets the server finish the requests it has received
            arrived = sum(server.sent.values()) - sent
            before, saved = saved, saved_bytes(dest / ".unfinished")
            assert saved > before, "nothing was kept"
            wasted[kind] = arrived - (saved - before)
        sent = sum(server.sent.values())
        code, lines = end(process)
        assert code == 0, lines
        assert_complete(dest, files)
        # The last run downloads the bytes that were not saved.
        wasted["last"] = sum(server.sent.values()) - sent - (sum(map(len, files.values())) - saved)
    print(wasted)
    # A kill loses the bytes since the last save, about a second on an idle machine. In addition
    # every connection that ends may leave one partial block unrecorded and one in flight.
    blocks = 2 * 4 * CONNECTIONS * BLOCK
    assert wasted["group"] <= 4 * CONNECTIONS * rate * 1.5 + blocks
    assert wasted["script"] <= blocks  # aria2 saves before it ends
    assert wasted["aria2"] <= 4 * CONNECTIONS * rate * 1.5 + blocks
    assert wasted["last"] <= blocks


def interrupt(plan, dest, server, files):
    """Start a download and end it when a part of every file is saved."""
    process = start(plan, dest, FILES=str(len(files)))
    for name in files:
        wait_for(
            lambda kept=f"{name}.aria2.kept": saved_bytes(dest / ".unfinished", kept), "a save"
        )
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143
    server.rate = 2_000_000
    server.sent.clear()
    server.requests.clear()


@pytest.mark.slow
def test_damaged_control_files_are_replaced(tmp_path, dest):
    """Control files that a full disk, a power cut or another program damaged, or of other files."""
    files = make_files(9, 2_000_000)
    with FlakyServer(files, rate=300_000) as server:
        plan = write_plan(tmp_path, server, files)
        interrupt(plan, dest, server, files)
        unfinished = dest / ".unfinished"
        control = {name: (unfinished / f"{name}.aria2").read_bytes() for name in files}
        good, empty, zeros, cut, other, beyond, short, whole, kept = files
        damaged = {
            empty: b"",
            zeros: bytes(len(control[zeros])),
            cut: control[cut][:-5],
            other: control[good],
            beyond: control[beyond][:34] + b"\xff" + control[beyond][35:],  # aria2 never ends
            short: control[short][:34] + b"\x80" + control[short][35:],
            whole: b"",
            kept: b"",
        }
        for name, content in damaged.items():
            (unfinished / f"{name}.aria2").write_bytes(content)
            if name != kept:
                (unfinished / f"{name}.aria2.kept").unlink()
        (unfinished / short).write_bytes(files[short][:1000])
        (unfinished / whole).write_bytes(files[whole])
        code, lines = run(plan, dest)
    assert code == 0, lines
    assert_complete(dest, files)
    message = "aria2's control file is damaged; what cannot be verified is fetched again"
    assert lines[:-1] == [f"{name}: {message}" for name in damaged if name != kept]
    assert whole not in {request[2] for request in server.requests}
    assert all(server.sent[name] < len(files[name]) for name in (good, kept))


@pytest.mark.slow
def test_a_full_disk_costs_what_arrived_since_the_last_save(tmp_path, dest):
    """aria2 replaces its control files by empty ones when the disk is full."""
    files = make_files(2, 6_000_000)
    with FlakyServer(files, rate=300_000) as server:
        plan = write_plan(tmp_path, server, files, known=("sha256",))
        dest.mkdir()
        steps = 'mount -t tmpfs -o size=4m tmpfs "$2" && '
        steps += (
            '{ bash "$0" "$1" "$2"; mount -o remount,size=40m "$2"; bash "$0" "$1" "$2"; } 2>&1'
        )
        command = ["unshare", "--map-root-user", "--mount", "bash", "-c", steps, SCRIPT, plan, dest]
        process = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if not process.stdout:
        pytest.skip(f"needs the right to mount a tmpfs: {process.stderr}")
    no_space, complete = (line.partition("] ")[2] for line in process.stdout.splitlines())
    assert no_space.startswith(f"error: no space in {dest}")
    megabytes = re.match(r"complete: 2 files, 12 MB, all verified; fetched (\d+) MB", complete)[1]
    assert int(megabytes) < 10


@pytest.mark.slow
def test_the_second_run_is_quick_and_asks_nothing(tmp_path, dest):
    files = make_files(30, 50_000)
    with FlakyServer(files) as server:
        plan = write_plan(tmp_path, server, files)
        assert run(plan, dest, FILES="8")[0] == 0
        asked = len(server.requests)
        began = time.monotonic()
        code, lines = run(plan, dest)
        assert time.monotonic() - began < 10  # a second on an idle machine
        assert code == 0 and len(server.requests) == asked
        assert lines[0].startswith("complete: 30 files, 1 MB, all verified; fetched 0 MB in ")

        # A touched file is only hashed; a file with other bytes of the same length is downloaded.
        touched, changed, shorter, *_ = files
        os.utime(dest / touched)
        (dest / changed).write_bytes(bytes(len(files[changed])))
        (dest / shorter).write_bytes(files[shorter][:-1])
        code, lines = run(plan, dest)
        assert code == 0, lines
        assert_complete(dest, files)
        assert {request[2] for request in server.requests[asked:]} == {changed, shorter}


@pytest.mark.slow
def test_leftovers_that_only_look_complete_are_not_taken(tmp_path, dest):
    # A kill before aria2's first save may leave a file of full length with holes.
    files = make_files(2, 100_000)
    with FlakyServer(files) as server:
        for known in (("size", "sha256"), ("size",), ()):
            plan = write_plan(tmp_path, server, files, known=known)
            shutil.rmtree(dest, ignore_errors=True)
            (dest / ".unfinished").mkdir(parents=True)
            for name, content in files.items():
                with open(dest / ".unfinished" / name, "wb") as file:
                    file.truncate(len(content))
            code, lines = run(plan, dest)
            assert code == 0, lines
            assert_complete(dest, files)
            assert ("all verified" in lines[-1]) == ("sha256" in known)


@pytest.mark.slow
def test_without_checksum(tmp_path, dest):
    """A file without size and checksum is downloaded even if one of its name exists."""
    files = make_files(3, 10_000)
    first, second, third = files
    with FlakyServer(files) as server:
        plan = write_plan(tmp_path, server, {first: files[first]})
        unknown = write_plan(tmp_path, server, {second: files[second]}, worker=4, known=())
        sized = write_plan(tmp_path, server, {third: files[third]}, worker=5, known=("size",))
        plan.write_text("".join(part.read_text() for part in (plan, unknown, sized)))
        dest.mkdir()
        (dest / second).write_bytes(files[second][:5000])
        (dest / third).write_bytes(files[third])
        code, lines = run(plan, dest)
        assert code == 0, lines
        assert_complete(dest, files)
        assert lines[-1].startswith("complete: 3 files, 0 MB, 2 of them without a checksum; ")
        assert {request[2] for request in server.requests} == {first, second}
        asked = len(server.requests)
        assert run(plan, dest)[0] == 0
        assert len(server.requests) == asked, ".verified knows the file"


def test_files_are_on_disk_before_they_get_their_names(tmp_path, dest):
    """sync, mv and .verified in this order; a power cut itself cannot be tested."""
    files = make_files(2, 1000)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sync", "mv"):
        real = shutil.which(tool)
        (tools / tool).write_text(f'#!/bin/sh\necho {tool} "$@" >>{tmp_path}/calls\n{real} "$@"\n')
        (tools / tool).chmod(0o755)
    with FlakyServer(files) as server:
        plan = write_plan(tmp_path, server, files)
        assert run(plan, dest, PATH=f"{tools}:{os.environ['PATH']}")[0] == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    for name in files:
        mine = [call.split()[0] for call in calls if f"/.unfinished/{name}" in call]
        assert mine == ["sync", "mv"]


@pytest.mark.slow
def test_directories_of_archives_are_kept(tmp_path):
    """In downloads/, with failures, a wrong file, a kill and a changed file."""
    names = ("Single/a.tar.000", "Single/a.tar.001", "Multi/x/a.tar.000", "index.parquet")
    rng = random.Random(3)
    files = {name: rng.randbytes(1_500_000 + 1000 * i) for i, name in enumerate(names)}
    faults = {
        names[0]: Fault(hub=[429], cuts=1),
        names[1]: Fault(wrong=[bytes(len(files[names[1]]))]),
        names[3]: Fault(link_requests=1, cdn=[403]),
    }
    dest = tmp_path / "downloads"

    def run_bare():
        pipe, streams = subprocess.PIPE, {"stderr": subprocess.STDOUT, "text": True}
        command = ["bash", SCRIPT, plan]
        return subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, **streams)

    def assert_all():
        paths = [path for path in dest.rglob("*") if path.is_file()]
        assert {path.relative_to(dest).as_posix() for path in paths} == {".verified", *names}
        for name, content in files.items():
            assert (dest / name).read_bytes() == content, name

    with FlakyServer(files, faults, rate=400_000) as server:
        plan = write_plan(tmp_path, server, files)
        plan.write_text("# archives\n" + plan.read_text())
        process = run_bare()
        wait_for(lambda: sum(server.sent.values()) > 1_000_000, "download")
        process.kill()
        process.communicate(timeout=10)
        assert (dest / ".unfinished" / "Multi" / "x").is_dir()
        server.rate = None
        code, lines = end(run_bare())
        assert code == 0, lines
        assert_all()
        asked = len(server.requests)
        os.utime(dest / names[0])
        (dest / names[2]).write_bytes(bytes(len(files[names[2]])))
        code, lines = end(run_bare())
        assert code == 0, lines
        assert_all()
        assert {request[2] for request in server.requests[asked:]} == {names[2]}


@pytest.mark.parametrize(
    "name", ["a/../x", *slow("../x", "/x", "a//x", "a/./x", ".hidden/x", "a/.hidden", "a/", "..")]
)
def test_names_that_leave_the_directory_are_refused(tmp_path, dest, name):
    with FlakyServer({}) as server:
        plan = write_plan(tmp_path, server, {name: b"x"})
        code, lines = run(plan, dest)
    assert code == 2 and not dest.exists()
    assert lines[-1].startswith(f"error: line 3 of {plan} is not in script.py's format")


@pytest.mark.slow
def test_one_at_a_time_and_signals_end_it_at_once(tmp_path, dest):
    files = make_files(2, 3_000_000)
    with FlakyServer(files, rate=200_000) as server:
        plan = write_plan(tmp_path, server, files)
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            process = start(plan, dest)
            sent = sum(server.sent.values())
            wait_for(lambda sent=sent: sum(server.sent.values()) > sent + 300_000, "download")
            if number == signal.SIGTERM:
                other_code, other_lines = run(plan, dest, LOCK_WAIT="1")
                assert other_code == 2
                assert (
                    other_lines[-1]
                    == f"error: another script.sh is busy in {dest}; wait until it ends"
                )
            # Ctrl-C reaches all processes of the terminal, other signals only the script.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            began = time.monotonic()
            ended, lines = end(process)
            assert time.monotonic() - began < 3
            assert ended == code and lines[-1] == "interrupted; the same command resumes"
            assert len(lines) == 1
        server.rate = None
        code, lines = run(plan, dest)
        assert code == 0, lines
        assert_complete(dest, files)


@pytest.mark.slow
def test_mistakes_end_in_one_line_and_2(tmp_path, dest):
    def refused(plan=None, dest=dest, **changes):
        code, (line,) = run(plan or good, dest, **changes)
        assert code == 2 and line.startswith("error: ")
        return line.removeprefix("error: ")

    files = make_files(2, 1000)
    with FlakyServer(files) as server:
        good = write_plan(tmp_path, server, files, sizes={"train-00001.parquet": 4 * 10**18})
        assert refused().startswith(f"no space in {dest}: at least 4000000000000 MB needed, ")
        bare = tmp_path / "bin"
        bare.mkdir()
        for tool in ("bash", "uname", "nproc"):
            (bare / tool).symlink_to(shutil.which(tool))
        assert refused(PATH=str(bare)).startswith("aria2c or curl is not installed: sudo apt-get")
        for bad in ("dir=/etc", "  out=../x", "# size=12x", "  checksum=sha-256=", "http://h/x"):
            good.write_text(bad + "\n")
            assert str(good) in refused()
        assert not server.requests
        good = write_plan(tmp_path, server, files)
    (tmp_path / "file").touch()
    assert refused(dest=tmp_path / "file").startswith("cannot make the directory ")
    assert refused(CONNECTIONS="17") == "CONNECTIONS=17 is not a whole number from 1 to 16"
    good.write_text(good.read_text() * 2)
    assert "has the name train-00000.parquet twice; make the plan again" in refused()
    for words, message in (
        ([good.with_name("download-9.txt")], "no such plan: .*download-9.txt; make one: python "),
        (["--dest", dest], "--dest is unknown, there are no flags; see bash script.sh --help"),
        ([good.parent], f"{good.parent} is a directory; name the plan's file, such as plan/"),
        ([good, dest, dest], "too many arguments; see bash script.sh --help"),
    ):
        command = ["bash", SCRIPT, *words]
        process = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert (process.returncode, process.stdout) == (2, "")
        assert re.match(rf"\[.*\] error: {message}", process.stderr)


def test_an_empty_part_is_complete(tmp_path, dest):
    plan = tmp_path / "download-3.txt"
    plan.write_text("# more workers than shards\n")
    code, (line,) = run(plan, dest)
    assert code == 0
    expected = r"complete: 0 files, 0 MB, all verified; fetched 0 MB in \d+ s, 0 MB/s"
    assert re.fullmatch(expected, line)


@pytest.mark.parametrize("redirect", [True, *slow(False)])
def test_the_token_reaches_the_hub_and_nothing_else(tmp_path, dest, redirect):
    files = make_files(2, 2_000_000)
    token = "hf_TheSecretOfThisTest"
    shown, modes = [], set()
    with FlakyServer(files, rate=2_000_000, token=token, redirect=redirect) as server:
        plan = write_plan(tmp_path, server, files)
        process = start(plan, dest, HF_ENDPOINT=server.endpoint + "/", HF_TOKEN=token)
        while process.poll() is None:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    shown.append(token.encode() in path.read_bytes())
            for path in dest.rglob("*"):
                with contextlib.suppress(OSError):
                    shown.append(path.is_file() and token.encode() in path.read_bytes())
                    if path.name.startswith((".aria2.log", ".links.")):
                        modes.add(path.stat().st_mode & 0o777)
            time.sleep(0.02)
        code, lines = end(process)
        assert code == 0, lines
        assert_complete(dest, files)
        assert shown and not any(shown) and token not in "".join(lines)
        assert modes == {0o600}, "signed links are anybody's"
        asked = {request[::4] for request in server.requests}  # (host, Authorization)
        cdn = {("localhost", None)} if redirect else set()
        assert asked == {("127.0.0.1", f"Bearer {token}"), *cdn}
        heads = [request for request in server.requests if request[:2] == ("127.0.0.1", "HEAD")]
        assert len(heads) == 2


@pytest.mark.slow
def test_resolving_the_links(tmp_path, dest):
    """A signal ends the script at once; one unanswered request does not delay other files."""
    files = make_files(3, 1000)
    first, *others = files
    faults = {first: Fault(delay=60)}
    with FlakyServer(files, faults) as server:
        plan = write_plan(tmp_path, server, files)
        process = start(plan, dest, HF_ENDPOINT=server.endpoint, HF_TOKEN="hf_x")
        links = dest / ".unfinished"
        wait_for(lambda: len(server.requests) == 4, "two links")
        curl = children(process.pid)["curl"]
        assert len(list(links.glob(".links.*"))) == 1
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code, lines = end(process)
        assert time.monotonic() - began < 2
        assert (code, lines) == (143, ["interrupted; the same command resumes"])
        assert not list(links.glob(".links.*")) and not Path(f"/proc/{curl}/fd/0").exists()

        faults[first].delay, faults[first].hub = 0, [0]
        server.requests.clear()
        code, lines = run(plan, dest, HF_ENDPOINT=server.endpoint, HF_TOKEN="hf_x")
        assert code == 0, lines
        assert_complete(dest, files)
        assert "1 files are pending (no answer from the hub); next try in 1 s" in lines
        heads = [name for _, method, name, *_ in server.requests if method == "HEAD"]
        assert sorted(heads) == sorted([first] * 3 + others * 2)


@pytest.mark.slow
def test_default_plan(tmp_path):
    files = make_files(8, 1000)
    nobody = {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_ID": "0"}
    plans = tmp_path / "plan"
    noted = plans / f"worker-{socket.gethostname()}"

    def call(*words, check=False, **variables):
        env = environment(HOSTNAME="login", **variables)
        return subprocess.run(
            words, cwd=tmp_path, env=env, check=check, capture_output=True, text=True
        )

    def run_bare(worker, **variables):
        """Run without arguments; delete the downloaded file and return its name."""
        done = call("bash", SCRIPT, **variables)
        assert done.returncode == 0 and f"worker {worker}] complete" in done.stdout, done.stdout
        (name,) = (path.name for path in (tmp_path / "data").glob("*.parquet"))
        shutil.rmtree(tmp_path / "data")
        return name

    def error():
        done = call("bash", SCRIPT, **nobody)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    assert "plan/ has 0 plans" in error()
    with FlakyServer(files) as server:
        # The index that script.py writes on the second of two slices with four hosts each.
        urls = tmp_path / "urls.txt"
        urls.write_text("".join(f"{server.url(name)} {len(files[name])}\n" for name in files))
        slices = {
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "a,b,c,d",
            "MEGASCALE_SLICE_ID": "1",
            "MEGASCALE_NUM_SLICES": "2",
        }
        call(sys.executable, ROOT / "script.py", "--urls", urls, check=True, **slices)
        assert noted.read_text() == "4\n"
        assert len(list(plans.glob("download-*.txt"))) == 8
        part = (plans / "download-4.txt").read_text()
        (mine,) = (name for name in files if f"out={name}\n" in part)
        assert run_bare(4, **slices) == run_bare(4) == mine

        noted.unlink()
        assert "plan/ has 8 plans" in error(), (
            "a worker of a slice is one of several by this number"
        )
        assert "run script.py here" in error()
        part = (plans / "download-3.txt").read_text()
        assert f"out={run_bare(3, TPU_WORKER_ID='3')}\n" in part

        # A single part is the default.
        for k in range(8):
            if k != 5:
                (plans / f"download-{k}.txt").unlink()
        run_bare(5, **nobody)


@pytest.mark.slow
def test_progress_in_lines(tmp_path, dest):
    files = make_files(2, 2_000_000)
    total = sum(map(len, files.values()))
    with FlakyServer(files, rate=300_000) as server:
        plan = write_plan(tmp_path, server, files)
        code, lines = run(plan, dest, PROGRESS_EVERY="1")
        assert code == 0
        shown = [
            re.fullmatch(r"(\d)/2 files, (\d) MB of 4 MB, \d MB/s, .* min left", line)
            for line in lines[:-1]
        ]
        assert len(shown) >= 2 and all(shown), lines
        megabytes = [int(match[2]) for match in shown]
        assert megabytes == sorted(megabytes) and megabytes[-1] <= total // 10**6
