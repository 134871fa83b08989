"""parquet_processing.py --pairs --num_held_out with archives and shards."""

import json

import numpy as np
import pytest
from edit_sets import SETS, make_set, pairs_of, read_shards, refuse, run, write_lines, write_tar
from known_sets import plain

from diffusers_flax.data.archives import convert, held_out
from diffusers_flax.data.images import decode_image
from diffusers_flax.evaluation.held_out import pairs_of_jsonl


def held_out_pairs(folder):
    """{instruction: (original grey, edited grey)} of the list of held-out pairs."""
    edits = [json.loads(line) for line in (folder / "edits.jsonl").read_text().splitlines()]
    return {
        edit["edit"]: tuple(
            int(np.asarray(decode_image((folder / edit[key]).read_bytes()))[0, 0, 0])
            for key in ("input", "truth")
        )
        for edit in edits
    }


def flags_of(folder, number, *args):
    return ["--num_held_out", str(number), "--held_out_dir", str(folder), *args]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=() if x == "AILab-CVC/SEED-Data-Edit" else pytest.mark.slow)
        for x in SETS
    ],
)
def test_held_out_pairs_are_whole_sequences(tmp_path, name):
    """Every pair is in one of both, turns stay together, and the choice is the seed's."""
    pairs = make_set(name, tmp_path / "set")
    turns = {text for text in pairs if text.split()[0] in ("turn", "first", "second", "third")}
    chosen = []
    for seed in range(6):
        out, folder = tmp_path / f"data-{seed}", tmp_path / f"held-{seed}"
        run(tmp_path / "set", out, *flags_of(folder, 3, "--seed", str(seed)))
        held, kept = held_out_pairs(folder), pairs_of(read_shards(out))
        assert held | kept == pairs and not held.keys() & kept.keys()
        assert not turns & held.keys() or turns <= held.keys()
        assert len(held) == 3 + (len(turns) - 1) * bool(turns & held.keys())
        chosen.append(frozenset(held))
        # Of shards, by the content of their images.
        if seed == 0:
            run(tmp_path / "set", tmp_path / "all")
            run(tmp_path / "all", tmp_path / "part", *flags_of(tmp_path / "held", 3))
            held = held_out_pairs(tmp_path / "held")
            assert held | pairs_of(read_shards(tmp_path / "part")) == pairs
            shared = {greys[0] for greys in held.values()}
            kept = pairs_of(read_shards(tmp_path / "part")).values()
            assert not shared & {greys[0] for greys in kept}
            assert not turns & held.keys() or turns <= held.keys()
    assert len(set(chosen)) > 1
    again = tmp_path / "again"
    run(tmp_path / "set", tmp_path / "data-again", *flags_of(again, 3, "--seed", "5"))
    assert frozenset(held_out_pairs(again)) == chosen[5]


def test_copies_of_a_held_out_image_are_not_trained_on(tmp_path, capsys):
    """WebDataset has the original once for each of its edits."""
    members = {}
    for n in range(12):
        members |= {f"{n}.input.png": plain(n // 3), f"{n}.output.png": plain(100 + n)}
        members[f"{n}.txt"] = f"do {n}".encode()
    write_tar(tmp_path / "set" / "x.tar", members)
    run(tmp_path / "set", tmp_path / "data", *flags_of(tmp_path / "held", 1))
    held, kept = held_out_pairs(tmp_path / "held"), pairs_of(read_shards(tmp_path / "data"))
    ((original, _),) = held.values()
    assert len(kept) == 9 and original not in {greys[0] for greys in kept.values()}
    assert "left out    2 pairs: its original image is held out" in capsys.readouterr().out


def test_a_killed_conversion_holds_out_the_same(tmp_path, monkeypatch):
    make_set("AILab-CVC/SEED-Data-Edit", tmp_path / "set")
    monkeypatch.setattr(convert, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(convert, "SHARD_BYTES", 400)
    run(tmp_path / "set", tmp_path / "whole", *flags_of(tmp_path / "held-whole", 4))
    close, out, folder = convert.Shards._close_shard, tmp_path / "data", tmp_path / "held"

    def interrupted(self, stop):
        close(self, stop)
        raise KeyboardInterrupt

    starts = 0
    while not (out / "manifest.json").exists():
        starts += 1
        with monkeypatch.context() as patch:
            patch.setattr(convert.Shards, "_close_shard", interrupted)
            with pytest.raises(SystemExit) if starts < 3 else pytest.MonkeyPatch.context():
                if starts > 2:
                    patch.setattr(convert.Shards, "_close_shard", close)
                run(tmp_path / "set", out, *flags_of(folder, 4))
    assert starts == 3
    assert pairs_of(read_shards(out)) == pairs_of(read_shards(tmp_path / "whole"))
    files = [
        {x.relative_to(y): x.read_bytes() for x in y.rglob("*.*") if x.suffix != ".jsonl"}
        for y in (tmp_path / "held-whole", folder)
    ]
    assert files[0] == files[1] and len(files[0]) >= 8
    assert held_out_pairs(folder) == held_out_pairs(tmp_path / "held-whole")


def test_from_an_edit_set_to_scores(tmp_path):
    """The list is what evaluate_edits.py reads."""
    make_set("a1557811266/Inter-Edit-Train", tmp_path / "set")
    run(tmp_path / "set", tmp_path / "data", *flags_of(tmp_path / "held", 2))
    pairs = pairs_of_jsonl(tmp_path / "held" / "edits.jsonl")
    assert len(pairs) == 2 and all(pair.edited and pair.mask for pair in pairs)


def test_directories_and_numbers_that_do_not_fit(tmp_path, capsys):
    folder = tmp_path / "set"
    write_tar(folder / "x.tar", {f"{n}{x}.png": plain(n) for n in range(3) for x in "ab"})
    rows = [{"input": f"{n}a.png", "edited": f"{n}b.png", "edit": f"{n}"} for n in range(3)]
    write_lines(folder / "i.jsonl", rows)
    for directory, number, words in (
        (tmp_path / "data", 1, "is in --output_dir"),
        (folder / "held", 1, "is in --pairs"),
        (tmp_path / "held", 3, "--num_held_out 3 must be less than the 3 original images"),
    ):
        error = refuse(folder, tmp_path / "data", capsys, *flags_of(directory, number))
        assert words in error
    (tmp_path / "mine" / "original").mkdir(parents=True)
    error = refuse(folder, tmp_path / "data", capsys, *flags_of(tmp_path / "mine", 1))
    assert "--held_out_dir" in error and "is not empty" in error


def test_groups_by_hand():
    """Columns: original, edited. 5 edits the result of 1; 2 has the original of 0."""
    keys = np.array([[10, 11], [20, 21], [10, 12], [30, 31], [40, 41], [21, 22]])
    same_row = np.array([False] * 4 + [True, False])
    groups = held_out.group_originals(keys, same_row)
    assert groups.tolist() == [0, 1, 0, 2, 2, 1]
