"""From captions to pairs of images with scores: devices make images, threads score them.

maker = PairMaker(pipeline, params, scorer, captions, config)
for place, line in maker.make(output, bar, clock):
    output.finish(place, line)
"""

import io
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffusers_flax.generating.batches import IN_FLIGHT, check_finite_images, run_ahead
from diffusers_flax.images import to_pil
from diffusers_flax.messages import warn_once
from diffusers_flax.pairing.results import Choice, Line, MadePair
from diffusers_flax.pairing.samples import batches_of, chunks_of, draw_sample, interleaved
from diffusers_flax.pairing.scores import NO_SCORES, thresholds_of
from diffusers_flax.prompts import prepare_prompts

JPEG_QUALITY = 95
SCORING = 3  # batches whose images are being scored
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
        scorer: Scorer.
        captions: list of Caption.
        config: flags of make_pairs.py.
    """

    def __init__(self, pipeline, params, scorer, captions, config):
        self.pipeline, self.params, self.scorer = pipeline, params, scorer
        self.captions, self.config, self.thresholds = captions, config, thresholds_of(config)
        self.num_finite = self.num_nan = 0  # pairs since the start
        self.pool = ThreadPoolExecutor(len(params))  # programs of all devices compile side by side

    def prepare(self, batch):
        """[(samples, arrays of a call)] of the chunks of a batch."""
        return list(map(self.prepare_chunk, batch))

    def prepare_chunk(self, chunk):
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
        """The images of each chunk, and which of its pairs are finite.

        Returns:
            List of (PIL images, originals and edited images in turn; list of bool).

        Raises:
            ValueError: no pair since the start is finite.
        """
        images = np.stack([np.asarray(x) for x in images])  # (chunks, 2 pairs, H, W, 3)
        pairs = images.reshape(len(images), -1, 2 * math.prod(images.shape[2:]))
        finite = np.isfinite(pairs).all(axis=-1)
        self.num_finite += finite.sum()
        self.num_nan += (~finite).sum()
        if not self.num_finite and self.num_nan >= MAX_NAN:
            first = self.captions[prepared[0][0][0].place]
            check_finite_images(images, f'images of "{first.input}" and others', self.config.lora)
        if not finite.all():
            warn_once("some images are NaN, and their samples are not kept")
            images = np.nan_to_num(images, posinf=0, neginf=0)
        return list(zip(map(to_pil, images), finite.tolist()))

    def score(self, samples, images, is_finite, device):
        """The MadePairs of a chunk.

        Args:
            samples: list of Sample.
            images, is_finite: of `collect`.
            device: number of the chunk's device.
        """
        config, places = self.config, [sample.place for sample in samples]
        scores = self.scorer(images, places, device)
        scores = [x if finite else NO_SCORES for x, finite in zip(scores, is_finite)]

        def files_of(i):
            is_kept = config.keep_all or config.preview or not self.thresholds.missed(scores[i])
            if not (is_kept and is_finite[i]):
                return None
            return tuple(map(encode_jpeg, images[2 * i : 2 * i + 2]))

        files = self.scorer.pool.map(files_of, range(len(samples)))
        return [MadePair(*fields) for fields in zip(samples, scores, files)]

    def batches(self, output, is_wanted):
        """The batches of all unfinished lines.

        Args:
            output: Output, started.
            is_wanted: place -> whether more samples of its captions are needed.
        """
        config = self.config
        # When a line's turn comes again, its scores should be known. Finished lines are skipped, so
        # the last lines of a turn come early: the more lines, the fewer samples in vain.
        in_turn = 3 * (IN_FLIGHT + SCORING + 1) * len(self.params)

        def chunks():
            found, num_lines = [], 0
            for places in output.unfinished_shards():
                found += chunks_of(places, config.num_samples, config.batch_size)
                num_lines += len(places)
                if not config.early_stop:
                    yield from found
                elif num_lines < in_turn:
                    continue
                else:
                    yield from interleaved(found, in_turn)
                found, num_lines = [], 0
            yield from interleaved(found, in_turn)

        return batches_of(chunks(), is_wanted, len(self.params))

    def make(self, output, bar, clock):
        """Make the pairs of all lines that are not finished.

        Args:
            output: Output, started.
            bar: tqdm progress bar in units of samples.
            clock: DeviceClock.

        Yields:
            (place of a finished line, its Line).
        """
        config, lines = self.config, {}
        num_kept = None if config.keep_all else config.num_kept
        choice = Choice(config.num_samples, num_kept, self.thresholds, config.early_stop)

        def is_wanted(place):  # also in the thread that prepares; changes nothing
            line = lines.get(place)
            return not output.is_finished(place) and (line is None or not line.is_finished)

        def finished_by(pairs):
            for pair in pairs:
                place = pair.sample.place
                if not is_wanted(place):
                    continue
                line = lines.setdefault(place, Line(choice))
                bar.update(line.add(pair))
                if line.is_finished:
                    bar.update(config.num_samples - line.num_seen)
                    yield place, line
                    del lines[place]

        ready = map(self.prepare, self.batches(output, is_wanted))
        running = run_ahead(ready, self.dispatch, self.collect, clock, IN_FLIGHT)
        # A score waits for the device, which has batches to make: more threads than devices.
        with ThreadPoolExecutor(SCORING * len(self.params)) as pool:
            scoring, failed = deque(), None
            try:
                for prepared, chunks, _ in running:
                    bar.set_description("making pairs")
                    scoring.append(
                        [
                            pool.submit(self.score, samples, *chunk, device)
                            for device, ((samples, _), chunk) in enumerate(zip(prepared, chunks))
                        ]
                    )
                    while len(scoring) > SCORING or (scoring and all(x.done() for x in scoring[0])):
                        yield from finished_by(pairs_of(scoring.popleft()))
            except Exception as error:  # batches that have been made still count
                failed = error
            while scoring:
                try:
                    pairs = pairs_of(scoring.popleft())
                except Exception as error:
                    failed = failed or error
                else:
                    yield from finished_by(pairs)
            if failed:
                raise failed


def pairs_of(futures):
    """The MadePairs of the chunks of a batch, in order."""
    return [pair for future in futures for pair in future.result()]
