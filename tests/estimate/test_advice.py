"""Minimum GPUs and suggestions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import AcMode, ActivationCheckpointing, Compilation, ParallelDims, Settings
from titan_tune.estimate import estimate_memory, minimum_gpus, suggestions
from titan_tune.estimate.advice import is_sure_to_run, with_shards


def job(
    flavor: str = "8B", *, gpus: int = 8, gpu: str = "h100-80gb", batch: int = 2, tp: int = 1
) -> Settings:
    dims = ParallelDims(dp_shard=gpus // tp, tp=tp)
    return Settings(
        model=model_spec("llama3", flavor),
        cluster=ClusterSpec(gpu=gpu_spec(gpu), num_nodes=max(1, gpus // 8), gpus_per_node=min(gpus, 8)),
        dims=dims,
        local_batch_size=batch,
        global_batch_size=batch * dims.dp_degree,
        seq_len=8192,
        ac=ActivationCheckpointing(mode=AcMode.SELECTIVE, every=0),
        compile=Compilation(model=True, loss=True),
    )


@given(st.sampled_from(("h100-80gb", "a100-40gb", "h200")), st.integers(1, 4), st.sampled_from((1, 2)))
def test_minimum_fits_and_half_of_it_does_not(gpu: str, batch: int, tp: int) -> None:
    settings = job(gpu=gpu, batch=batch, tp=tp)
    fewest = minimum_gpus(settings)
    if fewest is None:
        return
    shards = fewest // tp
    assert is_sure_to_run(estimate_memory(with_shards(settings, shards)))
    if shards > 1:
        assert not is_sure_to_run(estimate_memory(with_shards(settings, shards // 2)))


def test_no_number_of_gpus_helps_where_activations_alone_are_too_much() -> None:
    assert minimum_gpus(job(batch=64)) is None


def test_minimum_is_of_sizes_that_are_valid() -> None:
    settings = job(batch=1)
    free = minimum_gpus(settings)
    assert free is not None
    assert minimum_gpus(settings, is_valid=lambda s, _: s.dims.dp_shard >= 4 * free) == 4 * free


def test_suggestions_fit_and_are_what_they_say() -> None:
    settings = job(batch=4)
    assert estimate_memory(settings).verdict is Verdict.DOES_NOT_FIT
    found = suggestions(settings)
    assert found
    for suggestion in found:
        assert suggestion.memory == estimate_memory(suggestion.settings)
        assert is_sure_to_run(suggestion.memory)
        assert suggestion.gpus == suggestion.settings.dims.world_size
    numerics = [suggestion.changes_numerics for suggestion in found]
    assert numerics == sorted(numerics)
    assert any('activation_checkpoint.mode = "full"' in suggestion.text for suggestion in found)


def test_a_smaller_local_batch_keeps_the_global_batch() -> None:
    settings = job(batch=4)
    (smaller,) = [s for s in suggestions(settings, limit=99) if s.settings.local_batch_size < 4]
    assert smaller.settings.local_batch_size == 2  # the largest that fits
    assert smaller.settings.global_batch_size == settings.global_batch_size


def test_bf16_states_are_marked() -> None:
    settings = job("8B", gpus=1, gpu="h200", batch=1)
    found = suggestions(settings, limit=99)
    changed = [s for s in found if s.settings.dtype == "bfloat16"]
    assert changed
    assert all(s.changes_numerics for s in changed)


@pytest.mark.parametrize(("batch", "changes"), [(2, 2), (8, 3)])
def test_more_changes_at_once_come_when_fewer_do_not_help(batch: int, changes: int) -> None:
    found = suggestions(job("70B", gpus=8, batch=batch), limit=99)
    kept = [s for s in found if not s.changes_numerics]
    assert kept
    assert all(len(s.values) >= changes for s in kept)
    assert len({s.text for s in found}) == len(found)


def test_refused_changes_are_not_offered() -> None:
    settings = job(batch=4)
    assert suggestions(settings, is_valid=lambda *_: False) == ()


@pytest.mark.parametrize("dp_shard", [1, 2, 16, 24])
def test_resized_jobs_are_consistent(dp_shard: int) -> None:
    resized = with_shards(replace(job(), global_batch_size=32), dp_shard)
    assert resized.cluster.world_size >= resized.dims.world_size == dp_shard
    assert resized.gradient_accumulation_steps == 2
