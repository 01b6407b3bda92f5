from __future__ import annotations

import pytest

from titan_tune.catalog import loader
from titan_tune.catalog.loader import gpu_names, gpu_spec
from titan_tune.errors import InputError


@pytest.mark.parametrize("name", gpu_names())
def test_every_entry_loads_and_is_plausible(name: str) -> None:
    gpu = gpu_spec(name)
    assert gpu.name == name
    assert gpu.source
    assert 10 < gpu.memory_gib < 300
    assert gpu.link_gb_per_s < gpu.memory_gb_per_s
    # float8 doubles bf16 where it exists; it needs compute capability 8.9
    if gpu.float8_tflops:
        assert gpu.float8_tflops / gpu.bf16_tflops == pytest.approx(2, rel=0.02)
    if gpu.compute_capability is not None:
        assert (gpu.float8_tflops > 0) == (gpu.compute_capability >= (8, 9))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("H100", "h100-80gb"),
        ("h100", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("nvidia h200", "h200"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    assert gpu_spec(alias).name == name


def test_no_alias_names_two_gpus() -> None:
    given = [
        loader._normalised(alias)
        for name, entry in loader._gpus().items()
        for alias in {loader._normalised(a): a for a in (name, *entry["aliases"])}
    ]
    assert len(given) == len(set(given))


@pytest.mark.parametrize("name", ["h100-40gb", "", "tpu", "H2000"])
def test_unknown_gpu(name: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu_spec(name)
    message = str(caught.value)
    assert repr(name) in message
    assert "a100-80gb" in message
    assert "\n" not in message


def test_nearest_gpus_are_named() -> None:
    with pytest.raises(InputError, match=r"did you mean .*h100-64gb"):
        gpu_spec("h100-60gb")
