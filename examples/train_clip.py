"""Train a small CLIP model of your own on pairs of images with captions, in PyTorch.

    python examples/train_clip.py --data data --tokenizer demo/base_model/tokenizer \\
        --output_dir clip

make_pairs.py --clip_model CLIP uses the model. Train one if no published CLIP fits: for tiny
images, or for subjects that published models have never seen. Needs PyTorch, transformers, pyarrow
and Pillow. --data is a directory of parquet shards with the columns original_image,
original_prompt, edited_image, edited_prompt. Every tenth pair is held out. The program writes the
model, in the format of transformers, and scores.json to OUTPUT_DIR:

direction, direction_of_other_edits: mean cosine of the change of images with the change of their
    captions, and with the changes of other edits of the same image.
quantiles: scores that 90, 75 and 50% of the held-out pairs reach, by the names of make_pairs.py's
    thresholds; a choice of thresholds for this model.

Paper: CLIP (arXiv 2103.00020). With few captions the same one is in a batch many times; here an
image is compared with all captions, and a caption with all images of the batch that are its own.
"""

import io
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import trange
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

SIZE, WIDTH, NUM_LAYERS = 64, 64, 3  # pixels of an image's side; of both towers
BATCH_SIZE, LEARNING_RATE = 32, 2e-3
COLUMNS = ("original_prompt", "original_image", "edited_prompt", "edited_image")


def read_captioned_images(folder):
    """The PIL images and the captions of a directory's shards; original and edited alternate."""
    rows = pq.read_table(sorted(folder.glob("*.parquet")), columns=list(COLUMNS)).to_pylist()
    names = [(row, name) for row in rows for name in ("original", "edited")]
    images = [Image.open(io.BytesIO(row[f"{name}_image"]["bytes"])) for row, name in names]
    return images, [row[f"{name}_prompt"] for row, name in names]


def make_clip_model(tokenizer):
    """A CLIPModel with random weights."""
    tower = dict(hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=WIDTH // 32)
    tower |= dict(num_hidden_layers=NUM_LAYERS)
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    text = tower | {name: getattr(tokenizer, name) for name in tokens}
    text["vocab_size"] = len(tokenizer)
    vision = tower | dict(image_size=SIZE, patch_size=SIZE // 4)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH)
    return CLIPModel(config)


def contrastive_loss(image_features, text_features, own, scale):
    """CLIP's loss, for captions that several images of a batch share.

    Args:
        image_features, text_features: each of length 1, (B, D) and (C, D), of all captions.
        own: number of each image's caption, int64 (B,).
        scale: inverse temperature.
    """
    logits = scale * image_features @ text_features.T  # (B, C)
    present, own_present = own.unique(return_inverse=True)
    positives = F.one_hot(own_present, len(present)).T.float()  # (captions of the batch, B)
    targets = positives / positives.sum(dim=1, keepdim=True)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T[present], targets)) / 2


def features_of(model, pixels=None, **tokens):
    """Features of images or texts, each of length 1."""
    encode = model.get_text_features if pixels is None else model.get_image_features
    inputs = tokens if pixels is None else {"pixel_values": pixels}
    return F.normalize(encode(**inputs).pooler_output, dim=-1)


def train_clip(model, pixels, own, tokens, num_steps):
    """Train in place.

    Args:
        model: CLIPModel.
        pixels: float32 (n, 2, 3, S, S), as the processor makes them.
        own: numbers of the captions of the images, int64 (n, 2).
        tokens: of all captions.
        num_steps: number of steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, num_steps, pct_start=0.1
    )
    for step in trange(num_steps):
        rows = torch.randint(len(pixels), (BATCH_SIZE,))
        batch = pixels[rows].flatten(0, 1)
        if step % 2:
            batch = batch.flip(-1)  # mirrored
        scale = model.logit_scale.exp().clamp(max=100)
        images, texts = features_of(model, batch), features_of(model, **tokens)
        loss = contrastive_loss(images, texts, own[rows].flatten(), scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def measure_clip(model, pixels, own, tokens):
    """What scores.json has, a dict; arguments of train_clip, for held-out pairs."""
    batches = pixels.flatten(0, 1).split(128)
    images = torch.cat([features_of(model, batch) for batch in batches])
    texts = features_of(model, **tokens)
    images, own_texts = images.unflatten(0, (-1, 2)), texts[own]
    change = F.normalize(images[:, 1] - images[:, 0], dim=-1)
    true, wrong = [], []
    for row, (first, second) in enumerate(own.tolist()):
        # Changes from the caption of the original to all captions of its edited images
        edits = own[own[:, 0] == first, 1].unique()
        cosines = F.normalize(texts[edits] - texts[first], dim=-1) @ change[row]
        true.append(cosines[edits == second].item())
        wrong += cosines[edits != second].tolist()
    scores = {
        "min_clip_text": (images * own_texts).sum(-1).min(dim=1).values.numpy(),
        "min_clip_image": (images[:, 0] * images[:, 1]).sum(-1).numpy(),
        "min_clip_direction": np.array(true),
    }
    return {
        "direction": float(np.mean(true)),
        "direction_of_other_edits": float(np.mean(wrong)) if wrong else None,
        "num_held_out": len(own),
        "quantiles": {
            f"{share}": {
                name: round(float(np.quantile(values, 1 - share / 100)), 3)
                for name, values in scores.items()
            }
            for share in (90, 75, 50)
        },
    }


def main():
    """Command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    for name in ("data", "tokenizer", "output_dir"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, default=1000, help="default: 1000")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    side = {"height": SIZE, "width": SIZE}
    processor = CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=side)
    images, captions = read_captioned_images(args.data)
    texts, own = np.unique(captions, return_inverse=True)
    own = torch.tensor(own).unflatten(0, (-1, 2))
    pixels = processor(images, return_tensors="pt").pixel_values.unflatten(0, (-1, 2))
    tokens = tokenizer(texts.tolist(), padding=True, return_tensors="pt")
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    held_out = torch.arange(len(own)) % 10 == 9
    model = make_clip_model(tokenizer)
    train_clip(model, pixels[~held_out], own[~held_out], tokens, args.num_steps)
    scores = measure_clip(model.eval(), pixels[held_out], own[held_out], tokens)
    model.save_pretrained(args.output_dir)
    CLIPProcessor(processor, tokenizer).save_pretrained(args.output_dir)
    (args.output_dir / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    print(json.dumps(scores, indent=2))


if __name__ == "__main__":
    main()
