"""parquet_processing.py: the description and preview of a directory, mistakes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards import (
    encode,
    plain,
    smooth,
    write_numbered,
    write_shard,
)

import parquet_processing

SCRIPT = Path(parquet_processing.__file__)


def test_truncated_shards_are_named(tmp_path, capsys):
    write_numbered(tmp_path, [6, 6])
    data = (tmp_path / "shard-1.parquet").read_bytes()
    (tmp_path / "shard-1.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(SystemExit) as stop:
        parquet_processing.main(["--train_data_dir", str(tmp_path)])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert "shard-1.parquet cannot be read as parquet" in error


def run_script(*args, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_script_describes_a_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    colours = [(plain(40 * n), f"paint it {n}", plain(250 - 40 * n)) for n in range(6)]
    colours[2] = (b"bad", "paint it 2", plain(0))
    jpeg = encode(smooth(0, 40, 40), "JPEG")
    write_shard(folder / "a.parquet", colours, row_group_size=4)
    write_shard(folder / "b.parquet", [(jpeg, "日本 " * 60, plain(7))] * 2)
    done = run_script(
        "--train_data_dir", folder, "--resolution", 32, "--preview", "out/grid.png",
        "--num_preview", 4, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "" or done.stderr.startswith("no installed font has all letters")
    for words in (
        "shards      2,",
        "rows        8, row groups 3\n",
        "original_image: struct<bytes: binary, path: string>  <- original image",
        "edit_prompt: string  <- prompt",
        "checked     all 8 rows",
        "original_image: 5 x PNG 20x20 RGB, 2 x JPEG 40x40 RGB\n",
        "edited_image: 7 x PNG 20x20 RGB\n",
        "unreadable  1 of 8 rows\n",
        "a.parquet row 2: original_image: no known image format (3 bytes); save it as PNG ",
        "\nprompts     'paint it 0'\n            'paint it 3'\n            'paint it 4'\n",
        "\n            '日本 日本 ",
    ):
        assert words in done.stdout, (words, done.stdout)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["grid.png"]
    with Image.open(tmp_path / "out" / "grid.png") as sheet:
        assert sheet.mode == "RGB"
        pixels = np.asarray(sheet)
    assert (pixels[4:36, 4:36] == 0).all() and (pixels[4:36, 36:68] == 250).all()
    assert (pixels[36:60, 4:68] < 100).any()  # the prompt under the pair


def test_script_ends_with_one_line(tmp_path):
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "a.parquet", [(b"bad", "x", plain(1))] * 3)
    done = run_script("--train_data_dir", "data", cwd=tmp_path)
    assert done.returncode == 2
    assert "none of the 3 checked rows in data can be used; the first error: " in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "preview.png").exists()


def test_interrupt(tmp_path, capsys, monkeypatch):
    write_numbered(tmp_path, [8])

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(parquet_processing, "formats_of", interrupt)
    with pytest.raises(SystemExit) as stop:
        parquet_processing.main(["--train_data_dir", str(tmp_path), "--preview", ""])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted; run the same command again\n"


def test_a_sample_is_spread_over_the_folder(tmp_path, capsys):
    write_numbered(tmp_path, [30, 30], row_group_size=3)
    parquet_processing.main(
        ["--train_data_dir", str(tmp_path), "--num_checked", "16", "--preview", ""]
    )
    out = capsys.readouterr().out
    assert "checked     16 rows (a sample)" in out
    shown = [int(line.split("'")[1]) for line in out.split("prompts")[1].splitlines()]
    # The first two rows of 8 of the 20 row groups are checked; half of them are in the preview.
    assert shown == [3 * group for group in (0, 2, 5, 8, 10, 13, 16, 19)]
