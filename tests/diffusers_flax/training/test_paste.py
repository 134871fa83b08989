"""README's promise: dropout, loss and step work when they are pasted into another file.

The program below is made of the imports and files that README's section names, the sources of the
three functions, and toy models; it runs in a directory of its own, where nothing else is found.
"""

import inspect
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, free_port, slow

import flax_train_instruct_pix2pix as trainer

NUM_DEVICES = 2
SECTION = re.compile(r"^## Copy the training loop\n(.*?)(?=^## )", re.MULTILINE | re.DOTALL)
TOYS = '''
import sys
from types import SimpleNamespace

import flax.linen as nn
import numpy as np

NUM_DEVICES, B, T, D = 2, 16, 4, 6


class ToyUnet(nn.Module):
    """A convolution instead of a UNet."""

    dtype = jnp.float32

    @nn.compact
    def __call__(self, sample, timesteps, text):
        x = jnp.transpose(sample, (0, 2, 3, 1))
        extra = jnp.concatenate((timesteps[:, None] / 1000, text.mean(axis=1)), axis=1)
        extra = jnp.broadcast_to(extra[:, None, None], (*x.shape[:3], extra.shape[-1]))
        x = nn.tanh(nn.Conv(32, (3, 3))(jnp.concatenate((x, extra), axis=-1)))
        return SimpleNamespace(sample=jnp.transpose(nn.Conv(3, (3, 3))(x), (0, 3, 1, 2)))


class ToyScheduler:
    """A cosine noise schedule."""

    config = SimpleNamespace(prediction_type="epsilon")

    def draw_timesteps(self, keys):
        return jax.vmap(lambda key: jax.random.randint(key, (), 0, 1000))(keys)

    def add_noise(self, state, x_0, noise, timesteps):
        angle = (timesteps / 1000 * jnp.pi / 2)[:, None, None, None]
        return jnp.cos(angle) * x_0 + jnp.sin(angle) * noise

    def model_timesteps(self, state, timesteps):
        return timesteps


def encode_batch(batch, frozen, models):
    """Average pooling instead of a VAE, a table instead of a text encoder."""
    original, edited = (nn.avg_pool(batch[k], (4, 4), (4, 4)) for k in ("original", "edited"))
    text = {"states": frozen["text_encoder"][batch["input_ids"]]}
    return edited, jnp.zeros_like(edited), original, text


numbers = [int(number) for number in sys.argv[1:]]  # port and number of this process
if numbers:
    jax.distributed.initialize(f"localhost:{numbers[0]}", NUM_DEVICES, numbers[1])
rng = np.random.default_rng(0)
original = rng.uniform(-1, 1, (B, 1, 1, 3)) * np.ones((B, 32, 32, 1))
batch = {
    "original": original.astype(np.float32),
    "edited": -original.astype(np.float32),
    "input_ids": rng.integers(0, 9, (B, T)),
}
rows = B // jax.process_count()
batch = {name: x[jax.process_index() * rows :][:rows] for name, x in batch.items()}
first_batch = batch
unet = ToyUnet()
params = jax.device_get(
    unet.init(jax.random.key(0), np.zeros((1, 6, 8, 8)), np.zeros(1), np.zeros((1, T, D)))["params"]
)
vae = SimpleNamespace(config=SimpleNamespace(scaling_factor=1.0))
models = SimpleNamespace(unet=unet, vae=vae, scheduler=ToyScheduler())
frozen = {
    "text_encoder": rng.standard_normal((9, D)).astype(np.float32),
    "null_text": {"states": np.zeros((1, T, D), np.float32)},
    "scheduler": (),
}
tx = optax.adam(1e-2)
losses = []


def repeat(batch, num_steps=300):
    for step in range(num_steps):
        if step:
            losses.append(float(metrics["loss"].addressable_shards[0].data[0]))
        yield batch


batches = repeat(batch)
'''
CHECKS = """
assert all(loss == float(shard.data[0]) for shard in metrics["loss"].addressable_shards)
for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(trained), strict=True):
    assert after.shape == before.shape and after.dtype == np.float32 and (after != before).any()
assert jax.device_count() == NUM_DEVICES
assert first_replica(state.step) == 300
# With several processes an executable returns global arrays, and donates.
assert state.step.is_fully_addressable == metrics["loss"].is_fully_addressable == (not numbers)
print(np.mean(losses[:10]), np.mean(losses[-50:]))
"""


@pytest.mark.parametrize("num_processes", [1, *slow(2)])
def test_the_pasted_functions_train_toy_models(tmp_path, num_processes):
    """On two devices; with two processes also the line for several hosts."""
    (section,) = SECTION.findall((ROOT / "README.md").read_text())
    what, imports, rest = re.match(r"(.*?)```python\n(.*?)```(.*)", section, re.DOTALL).groups()
    (loop,) = re.findall(r"```\n(axes = .*?)```", rest, re.DOTALL)
    files = set(re.findall(r"[\w/]+\.py", what)) - {"flax_train_instruct_pix2pix.py"}
    assert "diffusers_flax/training/sharding.py" in files
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    pasted = (trainer.conditioning_dropout, trainer.diffusion_loss, trainer.train_step)
    program = imports + "\n\n" + "\n\n".join(map(inspect.getsource, pasted))
    page = (ROOT / "docs" / "training.md").read_text()
    (after,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    if num_processes > 1:
        loop, count = re.subn("^# (?=p_train_step)", "", loop, flags=re.MULTILINE)
        assert count == 1
    program += TOYS + loop + after + CHECKS
    (tmp_path / "pasted.py").write_text(program)
    devices = f"device_count={NUM_DEVICES // num_processes}"
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", devices)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "pasted.py", *[port, str(number)] * (num_processes > 1)],
            cwd=tmp_path,
            env=environment | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    for process in processes:
        found, errors = process.communicate()
        assert process.returncode == 0, errors
        first, last = map(float, found.splitlines()[-1].split())  # Gloo prints, too
        assert last < 0.5 * first
