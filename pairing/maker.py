"""From captions to pairs of images with scores: devices make images, threads score them.

maker = PairMaker(pipeline, params, scorer, captions, config)
for place, line in maker.make(output, bar, clock):
    output.finish(place, line)
"""

import io
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from diffusers_flax.images import to_pil
from diffusers_flax.prompts import prepare_prompts
from generating.batches import check_finite_images, run_ahead
from pairing.results import Choice, Line, Pair
from pairing.samples import batches_of, chunks_of, draw_sample, interleaved
from pairing.scores import thresholds_of

JPEG_QUALITY = 95
IN_FLIGHT = 2  # batches on the devices
SCORING = 3  # batches whose images are being scored


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
        self.pool = ThreadPoolExecutor(len(params))  # programs of all devices compile side by side

    def prepare(self, batch):
        """[(samples, arrays of a call)] of the chunks of a batch."""
        return list(map(self.prepare_chunk, batch))

    def prepare_chunk(self, chunk):
        """(samples, arrays of a call) of a chunk."""
        config = self.config
        ranges = config.guidance_scale, config.attention_sharing
        samples = [draw_sample(config.seed, *numbers, *ranges) for numbers in chunk]
        captions = [self.captions[sample.place] for sample in samples]
        texts = [text for caption in captions for text in (caption.input, caption.output)]
        negative = [config.negative_prompt] * len(texts)
        arrays = prepare_prompts(self.pipeline, texts, negative)._asdict()
        arrays["prng_seed"] = np.repeat([sample.key for sample in samples], 2, axis=0)
        for name in ("guidance_scale", "attention_sharing"):
            values = np.float32([getattr(sample, name) for sample in samples])
            arrays[name] = np.repeat(values, 2)
        # A UNet that takes the scale has one branch anyway.
        takes_scale = self.pipeline.unet.time_cond_proj_dim is not None
        if config.guidance_scale[1] <= 1 and not takes_scale:
            arrays["guidance_scale"] = config.guidance_scale[1]  # a number up to 1: one branch
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
        """The images of each chunk, originals and edited images in turn, as PIL images."""
        first = self.captions[prepared[0][0][0].place]
        images = [np.asarray(x) for x in images]
        which = f'images of "{first.input}" and others'
        check_finite_images(np.stack(images), which, self.config.lora)
        return list(map(to_pil, images))

    def score(self, samples, images, device):
        """The Pairs of a chunk; device: its number."""
        config, places = self.config, [sample.place for sample in samples]
        scores = self.scorer(images, places, device)

        def files_of(i):
            if self.thresholds.missed(scores[i]) and not (config.keep_all or config.preview):
                return None
            return tuple(map(encode_jpeg, images[2 * i : 2 * i + 2]))

        files = self.scorer.pool.map(files_of, range(len(samples)))
        return [Pair(*fields) for fields in zip(samples, scores, files)]

    def batches(self, output, is_wanted):
        """The batches of all unfinished lines.

        Args:
            output: Output, started.
            is_wanted: of batches_of.
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
            scoring = deque()
            for prepared, images, _ in running:
                bar.set_description("making pairs")
                samples = [samples for samples, _ in prepared]
                devices = range(len(samples))
                scoring.append([pool.submit(self.score, *x) for x in zip(samples, images, devices)])
                while len(scoring) > SCORING or (scoring and all(x.done() for x in scoring[0])):
                    yield from finished_by(pairs_of(scoring.popleft()))
            while scoring:
                yield from finished_by(pairs_of(scoring.popleft()))


def pairs_of(futures):
    """The Pairs of the chunks of a batch, in order."""
    return [pair for future in futures for pair in future.result()]
