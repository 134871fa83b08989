"""Draw docs/images/data_flow.svg, README's image of how data flows through programs and folders.

    python docs/images/draw_data_flow.py

Every letter stands on a box of its own color, so that the image reads on light and on dark pages.
Its letters are 20 and 26 units high in a width of 440, which a phone shows at about four fifths.
"""

from html import escape
from pathlib import Path

FILE = Path(__file__).with_name("data_flow.svg")
STAGES = (  # name, what it does, what it gives to the next stage
    ("script.py, script.sh", "plan and download a dataset", "data/*.parquet"),
    ("diffusers_flax/data/", "decode, crop, shuffle, resume", "uint8 images, instructions"),
    (
        "diffusers_flax/training/, train_step",
        "VAE, CLIP, noise, UNet, AdamW",
        "model directory, safetensors",
    ),
    ("diffusers_flax/pipelines/", "text, denoising loop, VAE", "image"),
)
WIDTH, BOX, FLOW, ARROW = 440, 100, 44, 26  # and heights: of a stage, of data, of an arrow
STAGE_COLORS = "#1f4e79", "#ffffff"
DATA_COLORS = "#ffe08a", "#222222"
ARROW_COLOR = "#8c8c8c"


def box(y, height, radius, color):
    size = f'width="{WIDTH - 8}" height="{height}" rx="{radius}"'
    return f'<rect x="4" y="{y}" {size} fill="{color}"/>'


def text(y, size, color, words, weight="normal"):
    return (
        f'<text x="{WIDTH // 2}" y="{y}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="middle" fill="{color}">{escape(words)}</text>'
    )


def arrow(y):
    x = WIDTH // 2
    return (
        f'<path d="M{x} {y + 2} V{y + ARROW - 12}" stroke="{ARROW_COLOR}" stroke-width="6"/>'
        f'<path d="M{x - 12} {y + ARROW - 14} h24 l-12 12 z" fill="{ARROW_COLOR}"/>'
    )


def draw():
    """The image as SVG."""
    lines, y = [], 0
    for name, work, result in STAGES:
        if y:
            lines.append(arrow(y))
            y += ARROW
        lines += [
            box(y, BOX, 12, STAGE_COLORS[0]),
            text(y + 42, 26, STAGE_COLORS[1], name, "bold"),
            text(y + 76, 20, STAGE_COLORS[1], work),
        ]
        y += BOX
        lines += [
            arrow(y),
            box(y + ARROW, FLOW, FLOW // 2, DATA_COLORS[0]),
            text(y + ARROW + 29, 20, DATA_COLORS[1], result),
        ]
        y += ARROW + FLOW
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([start, *lines, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
