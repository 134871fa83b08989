"""Tiny shards in the schemas of the public datasets whose columns are found without flags."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TEXT, INT, FLOAT, TEXTS = pa.string(), pa.int32(), pa.float64(), pa.list_(pa.string())
# name -> columns in their order, and the roles of the columns that training reads
SCHEMAS = {
    "timbrooks/instructpix2pix-clip-filtered": (
        dict(original_prompt=TEXT, original_image=IMAGE, edit_prompt=TEXT)
        | dict(edited_prompt=TEXT, edited_image=IMAGE),
        ("original_image", "edited_image", "edit_prompt"),
    ),
    "fusing/instructpix2pix-1000-samples": (
        dict(input_image=IMAGE, edit_prompt=TEXT, edited_image=IMAGE),
        ("input_image", "edited_image", "edit_prompt"),
    ),
    "osunlp/MagicBrush": (
        dict(img_id=TEXT, turn_index=INT, source_img=IMAGE, mask_img=IMAGE)
        | dict(instruction=TEXT, target_img=IMAGE),
        ("source_img", "target_img", "instruction"),
    ),
    "BleachNick/UltraEdit": (
        dict(clip_sim_source=FLOAT, source_caption=TEXT, target_caption=TEXT, edit_prompt=TEXT)
        | dict(source_image=IMAGE, edited_image=IMAGE, mask_image=IMAGE),
        ("source_image", "edited_image", "edit_prompt"),
    ),
    "UCSC-VLAA/HQ-Edit": (
        dict(input=TEXT, input_image=IMAGE, edit=TEXT, inverse_edit=TEXT)
        | dict(output=TEXT, output_image=IMAGE),
        ("input_image", "output_image", "edit"),
    ),
    "TIGER-Lab/OmniEdit-Filtered-1.2M": (
        dict(omni_edit_id=TEXT, task=TEXT, src_img=IMAGE, edited_img=IMAGE)
        | dict(edited_prompt_list=TEXTS, width=pa.int64(), height=pa.int64(), sc_score_1=FLOAT),
        ("src_img", "edited_img", "edited_prompt_list"),
    ),
    "Bin1117/AnyEdit": (
        dict(image_id=TEXT, edit_instruction=TEXT, edit_type=TEXT, image_file=IMAGE)
        | dict(edited_file=IMAGE, visual_input=IMAGE, input=TEXT, output=TEXT),
        ("image_file", "edited_file", "edit_instruction"),
    ),
    "BryanW/HumanEdit": (
        dict(IMAGE_ID=TEXT, EDITING_TYPE=TEXT, CORE=INT, MASK=INT, EDITING_INSTRUCTION=TEXT)
        | dict(OUTPUT_DESCRIPTION=TEXT, INPUT_CAPTION_BY_LLAMA=TEXT)
        | dict(INPUT_IMG=IMAGE, MASK_IMG=IMAGE, OUTPUT_IMG=IMAGE),
        ("INPUT_IMG", "OUTPUT_IMG", "EDITING_INSTRUCTION"),
    ),
    "iitolstykh/NHR-Edit": (
        dict(source_image=IMAGE, edited_image=IMAGE, edit_instruction=TEXT, category=TEXT),
        ("source_image", "edited_image", "edit_instruction"),
    ),
}


def png(image):
    """An image, PIL or array, as PNG."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, "PNG")
    return file.getvalue()


def plain(value, size=(16, 16)):
    """A PNG of one grey value that identifies its row; size: height, width."""
    return png(np.full((*size, 3), value, np.uint8))


def half_mask(convention, size=(16, 16)):
    """A mask whose left half may change: white, or transparent in an image as in MagicBrush."""
    left = np.zeros(size, np.uint8)
    left[:, : size[1] // 2] = 255
    if convention == "white":
        return png(left)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    image = Image.fromarray(pixels)
    image.putalpha(Image.fromarray(255 - left))
    return png(image)


def known_rows(name, num_rows):
    """Rows of a known set: row n has images n and 255 - n, instruction "n" or "n.0" to "n.2"."""
    columns, (_, edited, prompt) = SCHEMAS[name]
    rows = []
    for n in range(num_rows):
        row = {}
        for column, kind in columns.items():
            if kind == IMAGE:
                row[column] = {"bytes": plain(n), "path": f"{n}.png"}
            else:
                row[column] = {TEXT: f"{column} {n}", TEXTS: [f"{n}.{k}" for k in range(3)]}.get(
                    kind, n
                )
        row[edited] = row[edited] | {"bytes": plain(255 - n)}
        if columns[prompt] == TEXT:
            row[prompt] = str(n)
        for mask in {"mask_img", "MASK_IMG"} & columns.keys():
            row[mask] = {"bytes": half_mask("transparent"), "path": None}
        if "mask_image" in row:  # the free-form rows have none
            row["mask_image"] = {"bytes": half_mask("white"), "path": None} if n % 2 else None
        rows.append(row)
    return rows


def write_known(folder, name, num_rows=8, **options):
    """Write a shard of a known set."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(known_rows(name, num_rows), pa.schema(SCHEMAS[name][0]))
    pq.write_table(table, folder / "train-00000-of-00001.parquet", **options)
    return folder
