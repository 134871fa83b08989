"""benchmarks/archives.py with few pairs: both contenders read the same files."""

import json

import pytest
from edit_sets import read_shards

from benchmarks import archives


@pytest.mark.parametrize("case", archives.Config.cases)
def test_all_pairs_are_converted(tmp_path, monkeypatch, case):
    monkeypatch.setattr(archives, "ARCHIVE_PAIRS", 15)
    archives.make_archives(tmp_path / "set", case, 40)
    archives.convert(tmp_path / "set", tmp_path)
    texts = {row["edit_prompt"] for row in read_shards(tmp_path / "shards")}
    assert texts == {f"make image {n} brighter" for n in range(40)}
    read = []
    original = archives.tarfile.ExFileObject.read
    monkeypatch.setattr(
        archives.tarfile.ExFileObject, "read", lambda self: read.append(self) or original(self)
    )
    archives.read_by_tarfile(tmp_path / "set", tmp_path)
    assert len(read) == 40 * (3 if case == "samples" else 2)


def test_the_command(tmp_path):
    output = tmp_path / "archives.json"
    archives.main(["--pairs", "20", "--rounds", "1", "--output", str(output)])
    rows = json.loads(output.read_text())
    assert set(rows) == set(archives.Config.cases)
    assert all(row["summary"]["cpu_seconds_to_tarfile"] > 0 for row in rows.values())
