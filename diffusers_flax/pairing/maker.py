"""From captions to pairs of images with scores.

maker = PairMaker(pipeline, params, PairScorer(clip, captions), captions, config)
for place, pairs in maker.make(shards, bar):
    ...
"""

import io
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffusers_flax.generating.batches import check_finite_images, run_ahead
from diffusers_flax.generating.sizes import NUM_LOADERS
from diffusers_flax.images import to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pairing.pair_scores import NO_SCORES, missed
from diffusers_flax.pairing.pair_shards import MadePair, counted_pairs
from diffusers_flax.pairing.samples import batches_of, draw_sample
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
        self.captions, self.config = captions, config
        self.num_finite = self.num_nan = 0  # pairs since the start
        self.started = None  # time.perf_counter() once the first program is compiled
        # Programs of all devices compile side by side.
        self.pool, self.loaders = ThreadPoolExecutor(len(params)), ThreadPoolExecutor(NUM_LOADERS)

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
        """Start the programs of a batch; returns their images, on their devices.

        prepared: of prepare, for each device.
        """
        names = ("num_inference_steps", "eta", "guidance_rescale", "guidance", "height", "width")
        options = {name: getattr(self.config, name) for name in names}
        options["timesteps"] = self.config.timesteps or None

        def call(params, arrays):
            return self.pipeline(params=params, **options, **arrays).images

        images = list(self.pool.map(call, self.params, [arrays for _, arrays in prepared]))
        self.started = self.started or time.perf_counter()
        return images

    def collect(self, prepared, images):
        """The MadePairs of a batch, in order.

        Raises:
            ValueError: no pair since the start is finite.
        """
        images = [np.asarray(x) for x in images]
        finite = [np.isfinite(x).reshape(len(x) // 2, -1).all(1) for x in images]
        self.num_finite += np.sum(finite)
        self.num_nan += np.sum(~np.array(finite))
        if not self.num_finite and self.num_nan >= MAX_NAN:
            samples, _ = prepared[0]
            first = self.captions[samples[0].place]
            which = f'images of "{first.input}" and others'
            check_finite_images(images[0], which)
        if not np.all(finite):
            warn_once("some images are NaN, and their samples are not kept")
        samples = [samples for samples, _ in prepared]
        made = self.pool.map(self.score, samples, images, finite, range(len(images)))
        return [pair for pairs in made for pair in pairs]

    def score(self, samples, images, is_finite, device):
        """The MadePairs of images (2 n, H, W, 3) of a device."""
        config = self.config
        images = to_pil(np.nan_to_num(images, posinf=0, neginf=0))
        places = [sample.place for sample in samples]
        scores = self.scorer(images, places, device, self.loaders.map)

        def pair_of(i):
            if not is_finite[i]:
                return MadePair(samples[i], NO_SCORES, None)
            is_kept = config.keep_all or config.preview or not missed(scores[i], config)
            files = tuple(map(encode_jpeg, images[2 * i : 2 * i + 2])) if is_kept else None
            return MadePair(samples[i], scores[i], files)

        return self.loaders.map(pair_of, range(len(samples)))

    def make(self, shards, bar):
        """Make the pairs of all lines of unfinished shards.

        Args:
            shards: PairShards.
            bar: tqdm progress bar in units of samples.

        Yields:
            (place of a finished line, its pairs that count, see counted_pairs).
        """
        config, lines, finished = self.config, defaultdict(dict), set()
        todo = [shards.places(shard) for shard in shards.unfinished()]
        batches = batches_of(todo, config, len(self.params), IN_FLIGHT + 2, finished)
        ready = ([self.prepare(chunk) for chunk in batch] for batch in batches)
        for _, pairs, _ in run_ahead(ready, self.dispatch, self.collect, IN_FLIGHT):
            bar.set_description("making pairs")
            for pair in pairs:
                place = pair.sample.place
                if place in finished:
                    continue
                lines[place][pair.sample.number] = pair
                counted, is_finished = counted_pairs(lines[place], config)
                if is_finished:
                    bar.update(config.num_samples)
                    finished.add(place)
                    del lines[place]
                    yield place, counted
