"""From captions to pairs of images with scores.

maker = PairMaker(pipeline, params, scorer, captions, config)
for place, line in maker.make(shards, bar, clock):
    ...
"""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffusers_flax.generating.batches import check_finite_images, run_ahead
from diffusers_flax.images import to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pairing.pair_scores import NO_SCORES, thresholds_of
from diffusers_flax.pairing.pair_shards import MadeLine, MadePair
from diffusers_flax.pairing.samples import batches_of, chunks_of, draw_sample, interleaved
from diffusers_flax.prompts import prepare_prompts

JPEG_QUALITY = 95
# Batches on the devices or being scored: CLIP waits on a device for the batch that runs there.
IN_FLIGHT = 4
MAX_NAN = 32  # the run stops if its first 32 samples are all NaN


def encode_jpeg(image):
    """A PIL image as the bytes of a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return buffer.getvalue()


class PairMaker:
    """Makes pairs of captions.

    Each device runs a program for one device, so that pairs do not depend on the number of devices:
    XLA compiles another one for several devices, which rounds differently.

    Args:
        pipeline: FlaxDiffusionPipeline for text to image.
        params: its parameters on each device, a list.
        scorer: PairScorer.
        captions: list of Caption.
        config: flags of make_pairs.py.
    """

    def __init__(self, pipeline, params, scorer, captions, config):
        self.pipeline, self.params, self.scorer = pipeline, params, scorer
        self.captions, self.config, self.thresholds = captions, config, thresholds_of(config)
        self.num_finite = self.num_nan = 0  # pairs since the start
        # Programs of all devices compile side by side; scores wait for the devices.
        self.pool, self.scoring = (ThreadPoolExecutor(len(params)) for _ in range(2))

    def prepare(self, chunk):
        """(samples, arrays of a call) of a chunk."""
        config = self.config
        scales, fractions = config.guidance_scale, config.attention_sharing
        # A UNet with the guidance scale as an input always computes one branch.
        is_unguided = scales[1] <= 1 and self.pipeline.unet.time_cond_proj_dim is None
        if is_unguided:
            scales = scales[1:] * 2  # without guidance images do not depend on the scale
        samples = [draw_sample(config.seed, *numbers, scales, fractions) for numbers in chunk]
        captions = [self.captions[sample.place] for sample in samples]
        texts = [text for caption in captions for text in (caption.input, caption.output)]
        negative = [config.negative_prompt] * len(texts)
        arrays = prepare_prompts(self.pipeline, texts, negative)._asdict()
        arrays["prng_seed"] = np.repeat([sample.key for sample in samples], 2, axis=0)
        for name in ("guidance_scale", "attention_sharing"):
            values = np.float32([getattr(sample, name) for sample in samples])
            arrays[name] = np.repeat(values, 2)
        if is_unguided:
            arrays["guidance_scale"] = scales[1]  # a number up to 1: one branch
        return samples, arrays

    def dispatch(self, prepared):
        """Start the programs of a batch; returns their images, on their devices."""
        config = self.config
        options = dict(
            num_inference_steps=config.num_inference_steps,
            timesteps=config.timesteps or None,
            eta=config.eta,
            guidance_rescale=config.guidance_rescale,
            height=config.height,
            width=config.width,
        )

        def call(params, chunk):
            return self.pipeline(params=params, **options, **chunk[1]).images

        return list(self.pool.map(call, self.params, prepared))

    def collect(self, prepared, images):
        """The MadePairs of a batch, in order.

        Raises:
            ValueError: no pair since the start is finite.
        """
        chunks = [(samples, np.asarray(x)) for (samples, _), x in zip(prepared, images)]
        finite = [np.isfinite(x).reshape(len(samples), -1).all(1) for samples, x in chunks]
        self.num_finite += np.sum(finite)
        self.num_nan += np.sum(~np.array(finite))
        if not self.num_finite and self.num_nan >= MAX_NAN:
            first = self.captions[chunks[0][0][0].place]
            which = f'images of "{first.input}" and others'
            check_finite_images(chunks[0][1], which, self.config.lora)
        if not np.all(finite):
            warn_once("some images are NaN, and their samples are not kept")
        made = self.scoring.map(self.score, chunks, finite, range(len(chunks)))
        return [pair for pairs in made for pair in pairs]

    def score(self, chunk, is_finite, device):
        """The MadePairs of a chunk (samples, images (2 n, H, W, 3)) of a device."""
        config, (samples, images) = self.config, chunk
        images = to_pil(np.nan_to_num(images, posinf=0, neginf=0))
        scores = self.scorer(images, [sample.place for sample in samples], device)
        scores = [x if finite else NO_SCORES for x, finite in zip(scores, is_finite)]

        def files_of(i):
            is_kept = config.keep_all or config.preview or not self.thresholds.missed(scores[i])
            if is_kept and is_finite[i]:
                return tuple(map(encode_jpeg, images[2 * i : 2 * i + 2]))
            return None

        files = self.scorer.pool.map(files_of, range(len(samples)))
        return [MadePair(*fields) for fields in zip(samples, scores, files)]

    def make(self, shards, bar, clock):
        """Make the pairs of all lines of unfinished shards.

        Args:
            shards: PairShards.
            bar: tqdm progress bar in units of samples.
            clock: DeviceClock.

        Yields:
            (place of a finished line, its MadeLine).
        """
        config, lines, finished = self.config, {}, set()
        # When a line's turn comes again, its scores should be known. Finished lines are skipped, so
        # the last lines of a turn come early: the more lines, the fewer samples in vain.
        in_turn = 3 * (IN_FLIGHT + 2) * len(self.params) if config.early_stop else 1

        def chunks():
            found, num_lines = [], 0
            for shard in shards.unfinished():
                found += chunks_of(shards.places(shard), config.num_samples, config.batch_size)
                num_lines += len(shards.places(shard))
                if num_lines >= in_turn:
                    yield from interleaved(found, in_turn)
                    found, num_lines = [], 0
            yield from interleaved(found, in_turn)

        def is_wanted(place):  # in the thread that prepares
            return place not in finished

        batches = batches_of(chunks(), is_wanted, len(self.params))
        ready = ([self.prepare(chunk) for chunk in batch] for batch in batches)
        for _, pairs, _ in run_ahead(ready, self.dispatch, self.collect, clock, IN_FLIGHT):
            bar.set_description("making pairs")
            for pair in pairs:
                place = pair.sample.place
                if place in finished:
                    continue
                line = lines.setdefault(place, MadeLine(config))
                before = line.num_samples
                line.add(pair)
                bar.update(line.num_samples - before)
                if line.is_finished:
                    bar.update(config.num_samples - line.num_samples)
                    finished.add(place)
                    yield place, lines.pop(place)
