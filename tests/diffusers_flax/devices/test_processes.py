"""Which machines join others."""

import pytest

from diffusers_flax.devices import processes

KAGGLE = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_PROCESS_ADDRESSES": "local"}
TWO_HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b"}


@pytest.mark.parametrize(
    "env, has_others",
    [
        ({}, True),  # a TPU VM: the metadata server knows
        (TWO_HOSTS, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),  # Colab
        (KAGGLE, False),
        (KAGGLE | {"MEGASCALE_NUM_SLICES": "2"}, True),
        ({"JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_a_tpu_that_is_alone_asks_nobody(env, has_others, monkeypatch, tmp_path):
    for name in ("JAX_PLATFORMS", "MEGASCALE_NUM_SLICES", *KAGGLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "0000:00:04.0").mkdir()
    (tmp_path / "0000:00:04.0" / "vendor").write_text(f"{processes.GOOGLE_PCI_VENDOR}\n")
    monkeypatch.setattr(processes, "Path", lambda _: tmp_path)
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda _: "libtpu")
    assert processes.on_tpu_vm() == has_others
