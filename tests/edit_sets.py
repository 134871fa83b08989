"""Synthetic copies of edit sets that come as an index with archives, in their schemas.

make_set(NAME, folder) writes the files as they are downloaded, with tiny grey images, and returns
the pairs that shards made of it must have: {instruction: (original grey, edited grey)}.
"""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from known_sets import half_mask, plain

import parquet_processing

SIZE = (16, 16)


def write_tar(file, members, mode="w", **options):
    """Write a tar archive of {name: bytes}, or of a list of (name, bytes)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode, **options) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file


def write_image(file, grey):
    """Write a PNG of one grey."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(plain(grey))


def split(file, suffixes):
    """Replace a file by parts of about equal size, whose names end in the suffixes."""
    data = file.read_bytes()
    size = -(-len(data) // len(suffixes))
    for number, suffix in enumerate(suffixes):
        part = file.with_name(file.name + suffix)
        part.write_bytes(data[number * size : (number + 1) * size])
    file.unlink()


def write_lines(file, rows):
    """Write JSON lines, gzipped if the name says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file.write_bytes(gzip.compress(data) if file.name.endswith(".gz") else data)


def write_parquet(file, rows):
    """Write rows as a parquet index."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def imgedit(folder, count):
    """ImgEdit: parquet with lists of paths, archives in .tar.split.000, also several turns."""
    rows, members, pairs = [], {}, {}
    for n in range(count):
        base = f"results_add_part0/{n:05d}"
        members |= {f"{base}/original.png": plain(n), f"{base}/result.png": plain(100 + n)}
        row = {"input_images": [f"{base}/original.png"], "output_images": [f"{base}/result.png"]}
        rows.append(row | {"prompt": f"add {n}"})
        pairs[f"add {n}"] = (n, 100 + n)
    write_parquet(folder / "Parquet" / "add_part0.parquet", rows)
    file = write_tar(folder / "Singleturn" / "add_part0.tar", members)
    split(file, [f".split.{k:03d}" for k in range(3)])
    turns, members = [], {}
    for turn in range(2):
        base = "results_content_memory_part2/00031"
        members[f"{base}/origin_{turn}.png"] = plain(50 + turn)
        members[f"{base}/result_{turn}.png"] = plain(51 + turn)
        row = {"input_images": [f"{base}/origin_{turn}.png"]}
        turns.append(
            row | {"output_images": [f"{base}/result_{turn}.png"], "prompt": f"turn {turn}"}
        )
        pairs[f"turn {turn}"] = (50 + turn, 51 + turn)
    write_parquet(folder / "Parquet" / "content_memory_part2.parquet", [{"data": turns}])
    file = write_tar(folder / "Multiturn" / "results_content_memory_part2.tar", members)
    split(file, [".split.000", ".split.001"])
    return pairs


def x2edit(folder, count):
    """X2Edit: WebDataset; an archive is two archives with the same names, one after the other."""
    pairs, archives = {}, []
    for part in range(2):
        members = {}
        for n in range(count // 2):
            number, key = part * (count // 2) + n, f"{n:09d}"
            texts = {"caption": "a photo", "instruction": f"do {number}", "task": "style_change"}
            members |= {f"{key}.1.0.jpg": plain(number), f"{key}.2.jpg": plain(100 + number)}
            if part:
                members[f"{key}.1.1.jpg"] = plain(200)
            members |= {f"{key}.json": json.dumps(texts).encode(), f"{key}.txt": b"do it"}
            pairs[f"do {number}"] = (number, 100 + number)
        archives.append(write_tar(folder / f"{part}.tar", members).read_bytes())
        (folder / f"{part}.tar").unlink()
    file = folder / "X2Edit_data" / "textflux" / "000" / "00000.tar"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"".join(archives))
    return pairs


def pico_banana(folder, count):
    """Pico-Banana: sources in a tar.gz, results in a directory, also several turns."""
    rows, pairs, sources = [], {}, {}
    for n in range(count):
        name, source = f"images/positive-edit/{n}.png", f"train_0/{n:016x}.jpg"
        sources[source] = plain(n)
        write_image(folder / name, 100 + n)
        row = {"open_image_input_url": f"https://farm6.staticflickr.com/{n}/{n}_o.jpg"}
        row |= {"text": f"Change the long {n}", "output_image": name, "edit_type": "Change"}
        row |= {"local_input_image": f"openimage_source_images/{source}"}
        rows.append(row | {"summarized_text": f"short {n}"})
        pairs[f"Change the long {n}"] = (n, 100 + n)
    write_lines(
        folder / "sft.jsonl", [{"open_image_input_url": "u", "text": "t", "output_image": ""}]
    )
    write_lines(folder / "sft_with_local_source_image_path.jsonl", rows)
    files, prompts = [], ["first", "second", "third"]
    for turn in range(1, 4):
        name = f"images/multi-turn/1_turn{turn}.png"
        write_image(folder / name, 60 + turn)
        files.append({"id": "final_image" if turn == 3 else f"edit_turn{turn}", "url": name})
        pairs[prompts[turn - 1]] = (59 + turn, 60 + turn)
    sources["train_0/aa_o.jpg"] = plain(60)
    url = "https://farm8.staticflickr.com/2915/aa_o.jpg"
    files.append({"id": "original_input_image", "url": url})
    row = {"files": files, "metadata_edit_turn_prompts": prompts}
    write_lines(folder / "multi-turn.jsonl", [row])
    write_lines(folder / "preference.jsonl", rows)
    write_tar(folder / "train_0.tar.gz", sources, "w:gz")
    return pairs


def seed_data_edit(folder, count):
    """SEED-Data-Edit, parts 2 and 3: JSON lines, tar.gz in .part-aa, several turns."""
    pairs, rows, members = {}, [], {}
    for n in range(count):
        members |= {f"images/{n}_s.jpg": plain(n), f"images/{n}_t.jpg": plain(100 + n)}
        row = {"source_image": f"{n}_s.jpg", "target_image": f"{n}_t.jpg"}
        rows.append(row | {"instruction": f"real {n}"})
        pairs[f"real {n}"] = (n, 100 + n)
    base = folder / "real_editing"
    write_lines(base / "annotations" / "split_0001.jsonl", rows)
    write_tar(base / "images" / "images.tar.gz", members, "w:gz")
    base, members = folder / "multi_turn_editing", {}
    row, name = {"source_image": "20240330/Data/1/a.jpg"}, "20240330/Data/1/a"
    members[f"data/{name}.jpg"] = plain(60)
    for turn in range(1, 4):
        row[f"instruction_{turn}"] = f"turn {turn}"
        row[f"inverse_instruction_{turn}"] = f"undo {turn}"
        row[f"edit_image_{turn}"] = f"{name}_edit{turn}.jpg"
        members[f"data/{name}_edit{turn}.jpg"] = plain(60 + turn)
        pairs[f"turn {turn}"] = (59 + turn, 60 + turn)
    write_lines(base / "annotations" / "split_0001.jsonl", [row])
    file = write_tar(base / "images" / "multi_turn.tar.gz", members, "w:gz")
    split(file, [".part-aa", ".part-ab"])
    return pairs


def nhr_edit(folder, count):
    """NHR-Edit: JPEG files in folders and metadata.jsonl, with several instructions."""
    rows, pairs = [], {}
    for n in range(count):
        names = [f"images/{n % 2:02d}/image_{n}_{kind}.jpg" for kind in ("original", "edited_0")]
        for name, grey in zip(names, (n, 100 + n)):
            write_image(folder / "train" / name, grey)
        row = {"sample_id": str(n), "source_file_name": names[0], "edited_file_name": names[1]}
        row |= {"edit_instruction": f"do {n}", "augmented_instructions": [f"please do {n}"]}
        rows.append(row)
        pairs[f"do {n}"] = (n, 100 + n)
    write_lines(folder / "train" / "metadata.jsonl", rows)
    return pairs


def inter_edit(folder, count):
    """Inter-Edit-Train: gzipped JSON lines that name archive and member, with masks."""
    rows, sources, assets, pairs = [], {}, {}, {}
    for n in range(count):
        source, target = f"sources/source_{n:07d}.png", f"targets/target_{n:07d}.png"
        mask = f"masks/mask_{n:07d}.png"
        sources[source] = plain(n)
        assets |= {target: plain(100 + n), mask: half_mask("white")}
        row = {"sample_id": n, "source_id": n, "edit_type": "Add", "instruction": f"do {n}"}
        row |= {"source_archive": "source_shards/source-00000-of-00001.tar"}
        row |= {"asset_archive": "asset_shards/asset-00000-of-00001.tar"}
        rows.append(row | {"source_file": source, "target_file": target, "mask_file": mask})
        pairs[f"do {n}"] = (n, 100 + n)
    write_lines(folder / "metadata" / "train-00000-of-00001.jsonl.gz", rows)
    write_tar(folder / "source_shards" / "source-00000-of-00001.tar", sources)
    write_tar(folder / "asset_shards" / "asset-00000-of-00001.tar", assets)
    (folder / "manifest.json").write_text('{\n "num_samples": 8\n}\n')
    return pairs


def sharegpt_4o_image(folder, count):
    """ShareGPT-4o-Image: a JSON array and tar parts; the last pair has a second input."""
    rows, pairs, parts = [], {}, [{}, {}]
    for n in range(count):
        part = parts[n % 2]
        part |= {f"image/v2v_{n}_in.png": plain(n), f"image/v2v_{n}_out.png": plain(100 + n)}
        inputs = [f"image/v2v_{n}_in.png"]
        if n == count - 1:
            part["image/second.png"] = plain(7)
            inputs.append("image/second.png")
        row = {"input_prompt": f"do {n}", "input_image": inputs}
        rows.append(row | {"output_image": f"image/v2v_{n}_out.png"})
        pairs[f"do {n}"] = (n, 100 + n)
    (folder / "text_and_image_to_image.json").write_text(json.dumps(rows, indent=2))
    (folder / "text_to_image.json").write_text('[{"input_prompt": "a cat", "output_image": "c"}]')
    for number, members in enumerate(parts):
        write_tar(folder / f"text_and_image_to_image_part_{number}.tar", members)
    return pairs


def gpt_image_edit(folder, count):
    """GPT-Image-Edit-1.5M: the same names in folders and archives of several sources."""
    rows, pairs = [], {}
    for k, (stem, base) in enumerate(
        (("hqedit_gpt_edit", "hqedit/edit"), ("omniedit_gpt", "omniedit"))
    ):
        rows, greys = [], {}
        for n in range(count // 2):
            grey = k * count // 2 + n
            greys |= {f"input/{n}.png": grey, f"output/{n}.png": 100 + grey}
            asked = [
                {"from": "human", "value": f"<image>\ndo {grey}"},
                {"from": "gpt", "value": ""},
            ]
            rows.append({"image": [f"input/{n}.png", f"output/{n}.png"], "conversations": asked})
            pairs[f"do {grey}"] = (grey, 100 + grey)
        file = folder / "training_json" / f"{stem}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(rows))
        if k:
            for name, grey in greys.items():
                write_image(folder / "gpt-edit" / base / name, grey)
        else:
            members = {name: plain(grey) for name, grey in greys.items()}
            write_tar(folder / "gpt-edit" / base / "data.tar", members)
    return pairs


def gpt_image_edit_metadata(folder, count):
    """The same set with the metadata of its card."""
    rows, pairs = [], {}
    for n in range(count):
        write_image(folder / "hqedit" / "edit" / "input" / f"{n}.png", n)
        write_image(folder / "hqedit" / "edit" / "output" / f"{n}.png", 100 + n)
        row = {"id": str(n), "dataset_source": "hqedit", "task": "edit", "input": f"input/{n}.png"}
        row |= {"output": f"output/{n}.png", "instruction": f"do {n}", "input_description": "a cat"}
        rows.append(row | {"instruction_type": "original"})
        pairs[f"do {n}"] = (n, 100 + n)
    write_lines(folder / "hqedit" / "edit" / "metadata.jsonl", rows)
    return pairs


SETS = {  # name: how its copy is written
    "a1557811266/Inter-Edit-Train": inter_edit,
    "OPPOer/X2Edit-Dataset": x2edit,
    "sysuyy/ImgEdit": imgedit,
    "apple/pico-banana-400k": pico_banana,
    "AILab-CVC/SEED-Data-Edit": seed_data_edit,
    "iitolstykh/NHR-Edit": nhr_edit,
    "FreedomIntelligence/ShareGPT-4o-Image": sharegpt_4o_image,
    "UCSC-VLAA/gpt-image-edit-training": gpt_image_edit,
    "UCSC-VLAA/GPT-Image-Edit-1.5M": gpt_image_edit_metadata,
}


def make_set(name, folder, count=8):
    """Write a set; see the docstring of this file."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return SETS[name](Path(folder), count)


def read_shards(folder):
    """The rows of all shards of a directory, in the order of the shards' names."""
    files = sorted(folder.glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def grey_of(cell):
    """The grey of an image made by known_sets.plain."""
    from diffusers_flax.data.images import decode_image

    return int(np.asarray(decode_image(cell["bytes"]))[0, 0, 0])


def pairs_of(rows):
    """{first instruction: (original grey, edited grey)} of rows of shards."""
    texts = [
        x["edit_prompt"] if isinstance(x["edit_prompt"], str) else x["edit_prompt"][0] for x in rows
    ]
    greys = [(grey_of(row["original_image"]), grey_of(row["edited_image"])) for row in rows]
    assert len(set(texts)) == len(texts)
    return dict(zip(texts, greys))


def run(pairs, output_dir, *args):
    """The program's output."""
    flags = ["--pairs", str(pairs), "--output_dir", str(output_dir), "--preview", "", *args]
    parquet_processing.main(flags)


def refuse(pairs, output_dir, capsys, *args):
    """The one line with which a conversion is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run(pairs, output_dir, *args)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    assert not list(Path(output_dir).glob("*.parquet"))
    return error


def manifest_of(folder):
    """The manifest of a conversion."""
    return json.loads((folder / "manifest.json").read_text())


def num_left_out(folder):
    """{reason: number of rows and pairs that are left out}."""
    return {reason: found["count"] for reason, found in manifest_of(folder)["left_out"].items()}
