"""Minimum GPUs and suggestions: each is what ``estimate`` says of the job that they describe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from titan_tune.cli.target import cluster_from
from titan_tune.domain.estimate import Verdict
from titan_tune.errors import InputError
from titan_tune.estimate.advice import MAX_HOST_BYTES, Suggestion, host_bytes
from titan_tune.estimate.answer import Answer, answer, answer_json
from titan_tune.estimate.changes import MAX_GPUS, compute_dtype
from titan_tune.estimate.minimum import is_sure_to_run
from titan_tune.machine import local_cluster
from titan_tune.report.estimate import described, needs
from titan_tune.titan.job import Job, job_from_text
from titan_tune.titan.settings import settings_from
from titan_tune.units import GIB

MACHINE = local_cluster()
FILE = """
[model]
name = "{model}"
flavor = "{flavor}"
[training]
local_batch_size = {batch}
seq_len = 8192
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""
AC, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
TP, PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
CP, EP = "parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"
REPLICATE, SHARD = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
)
LOCAL, GLOBAL = "training.local_batch_size", "training.global_batch_size"
OFFLOAD, DTYPE = "training.enable_cpu_offload", "training.dtype"


def file(flavor: str = "8B", batch: int = 2, model: str = "llama3", **keys: Any) -> Job:
    text = FILE.format(model=model, flavor=flavor, batch=batch)
    return job_from_text(text, name="job.toml").with_values(keys)


def ask(
    job: Job, gpus: int, *, gpu: str = "h100-80gb", gpus_per_node: int | None = None, advise: bool = True
) -> Answer:
    """As the command does."""
    if gpus_per_node is not None and gpus < gpus_per_node:
        gpus_per_node = None
    cluster = cluster_from(MACHINE, gpus=gpus, nodes=None, gpus_per_node=gpus_per_node, gpu=gpu)
    values = job.resolved()
    settings = settings_from(values, job.model, cluster)
    return answer(settings, values, advise=advise, gpus_per_node=gpus_per_node)


def again(job: Job, suggestion: Suggestion, **hardware: Any) -> Answer:
    return ask(job.with_values(dict(suggestion.values)), suggestion.gpus, advise=False, **hardware)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Job, int, dict[str, Any]]:
    """A job of some kind, its GPUs and the other flags."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    name, flavor = one(
        ("llama3", "8B"), ("llama3", "70B"), ("llama3", "405B"), ("qwen3", "8B"), ("qwen3", "30B-A3B"),
        ("qwen3", "235B-A22B"), ("deepseek_v3", "16B"), ("deepseek_v3", "671B"), ("llama4", "17bx16e"),
    )  # fmt: skip
    gpus, tp, pp = one(1, 2, 3, 4, 8, 16, 64, 256), one(1, 1, 2, 8), one(1, 1, 2, 4)
    keys = {
        "model.name": name, "model.flavor": flavor, TP: tp, PP: pp, CP: one(1, 1, 2), EP: one(1, 1, 2, 8),
        REPLICATE: one(1, 1, 2), LOCAL: one(1, 2, 3, 4, 16), "training.seq_len": one(2048, 8192, 32768),
        AC: one("none", "selective", "full"), OPTION: one("op", "2"), "compile.enable": one(True, False),
        GLOBAL: one(-1, -1, 8, 64, 512), OFFLOAD: one(False, False, True), DTYPE: one("float32", "bfloat16"),
    }  # fmt: skip
    others = tp * pp * keys[CP] * keys[REPLICATE]
    if gpus % others == 0 and draw(st.booleans()):
        keys[SHARD] = gpus // others
    gpus_per_node = one(None, None, 4) if gpus % 4 == 0 else None
    gpu = one("a100-40gb", "h100-80gb", "h200")
    return file().with_values(keys), gpus, {"gpu": gpu, "gpus_per_node": gpus_per_node}


@given(questions())
@settings(max_examples=60)
def test_a_suggestion_is_what_estimate_says_of_the_changed_job(
    question: tuple[Job, int, dict[str, Any]],
) -> None:
    job, gpus, hardware = question
    try:
        before = ask(job, gpus, **hardware)
    except InputError:
        assume(False)
        return
    assume(before.memory is not None and before.memory.verdict is not Verdict.FITS)
    assert before.memory is not None
    for suggestion in before.suggestions:
        after = again(job, suggestion, **hardware)
        assert after.invalid == ()
        assert after.settings == suggestion.settings
        assert after.memory is not None and after.step_time is not None
        assert after.memory == suggestion.memory
        assert after.step_time.tokens_per_second_per_gpu == suggestion.tokens_per_second_per_gpu
        assert after.settings.global_batch_size >= before.settings.global_batch_size
        assert is_sure_to_run(after.memory)
        assert after.memory.verdict is Verdict.FITS or before.memory.verdict is Verdict.DOES_NOT_FIT


@given(questions())
@settings(max_examples=60)
def test_the_minimum_is_the_fewest_gpus_that_estimate_answers_fits_for(
    question: tuple[Job, int, dict[str, Any]],
) -> None:
    job, gpus, hardware = question
    try:
        before = ask(job, gpus, advise=False, **hardware)
    except InputError:
        assume(False)
        return
    assume(before.minimum is not None)
    assert before.minimum is not None
    others = gpus // before.settings.dims.dp_shard
    names_shards = job.resolved()[SHARD] > 0
    precisions = (compute_dtype(before.settings), before.settings.mixed_precision_param)
    fits, pressure = None, None
    for size in sorted({others << power for power in range(17)} | {gpus}):
        try:
            after = ask(
                job.with_values({SHARD: size // others} if names_shards else {}),
                size,
                advise=False,
                **hardware,
            )
        except InputError:
            continue  # not whole nodes
        if after.memory is None or compute_dtype(after.settings) not in precisions or size > MAX_GPUS:
            continue
        if after.memory.verdict is Verdict.FITS:
            fits = size
            break
        if pressure is None and is_sure_to_run(after.memory):
            pressure = size
    assert (before.minimum.fits, before.minimum.pressure) == (fits, pressure)


def test_the_minimum_counts_the_accumulation_that_a_fixed_global_batch_implies() -> None:
    job = file("8B", 1, "qwen3", **{"training.seq_len": 4096, GLOBAL: 512})
    found = ask(job, 512, gpu="a100-40gb").minimum
    assert found is not None and found.fits == 8
    four = ask(job, 4, gpu="a100-40gb")
    assert four.settings.gradient_accumulation_steps == 128
    assert four.memory is not None and four.memory.verdict is Verdict.DOES_NOT_FIT


def test_a_global_batch_that_more_gpus_do_not_divide_is_named() -> None:
    found = ask(file("70B", batch=8, **{TP: 8, AC: "full", "compile.enable": False, GLOBAL: 8}), 8)
    assert found.minimum is not None and found.minimum.fits is None
    alone = dict(needs(found))["as it is"]
    assert "16 GPUs are refused: training.global_batch_size=8 is not a multiple" in alone


def test_sizes_without_mixed_precision_are_no_minimum() -> None:
    keys = {TP: 8, PP: 8, AC: "full", "compile.enable": False}
    found = ask(file("70B", batch=16, **keys), 256).minimum
    assert found is not None and found.fits == 128  # of 64, every rank would compute in fp32
    accident = ask(file("70B", batch=8, **{TP: 8, AC: "full", "compile.enable": False}), 8)
    assert compute_dtype(accident.settings) == "float32"
    assert dict(needs(accident))["as it is"].startswith("32 GPUs, where it computes in bfloat16")


def test_a_minimum_under_pressure_is_told_as_such() -> None:
    job = file(batch=1, **{"compile.enable": False})
    found = ask(job, 1)
    assert found.minimum is not None
    assert (found.minimum.fits, found.minimum.pressure) == (4, 2)
    two = ask(job, 2)
    assert two.memory is not None and two.memory.verdict is Verdict.PRESSURE
    assert dict(needs(found))["as it is"] == "4 GPUs, or 2 under pressure"
    assert answer_json(found)["minimum_gpus_under_pressure"] == 2


def test_what_no_number_of_gpus_shrinks_is_named() -> None:
    dense = ask(file(batch=64), 8)
    assert dense.minimum is not None and dense.minimum.fits is None
    assert "on 65536 GPUs, each still needs" in dict(needs(dense))["as it is"]
    assert "activations" in dict(needs(dense))["as it is"]
    keys = {"training.seq_len": 4096, PP: 4, EP: 8, AC: "full", "compile.enable": False}
    experts = ask(file("671B", 8, "deepseek_v3", **keys), 256)
    alone = dict(needs(experts))["as it is"]
    assert alone.index("gradients 97.9 GiB") < alone.index("gathered parameters 50.3 GiB")
    assert any(dict(s.values).get(EP) == 64 for s in experts.suggestions)


def test_experts_spread_over_more_ranks_are_suggested_under_pressure() -> None:
    found = ask(file("235B-A22B", 1, "qwen3", **{AC: "full", "compile.enable": False}), 64)
    assert found.memory is not None and found.memory.verdict is Verdict.PRESSURE
    assert found.suggestions
    assert all(s.memory.verdict is Verdict.FITS for s in found.suggestions)


def test_suggestions_keep_the_numerics_first() -> None:
    found = ask(file(batch=4), 8).suggestions
    numerics = [suggestion.changes_numerics for suggestion in found]
    assert numerics == sorted(numerics)
    assert any('activation_checkpoint.mode = "full"' in suggestion.text for suggestion in found)
    changed = [s for s in ask(file(batch=1), 1).suggestions if s.settings.dtype == "bfloat16"]
    assert changed and all(s.changes_numerics for s in changed)


def test_a_change_that_would_shrink_the_global_batch_says_that_it_keeps_it() -> None:
    job = file(batch=4, **{OPTION: "2"})
    found = ask(job, 8)
    same = [s for s in found.suggestions if s.gpus == 8]
    smaller = [s for s in same if s.settings.dims.tp > 1 or s.settings.local_batch_size < 4]
    assert smaller
    for suggestion in smaller:
        assert dict(suggestion.values)[GLOBAL] == 32 == suggestion.settings.global_batch_size


def test_more_gpus_fill_nodes_of_eight_unless_the_user_said_otherwise() -> None:
    job = file(batch=1, **{"compile.enable": False})
    two = next(s for s in ask(job, 1).suggestions if s.gpus == 2)
    assert two.values == () and two.gpus_per_node == 2
    assert described(two).startswith("no other change (")
    nodes = ask(file("70B"), 4, gpus_per_node=4).suggestions
    assert {s.gpus_per_node for s in nodes if s.gpus > 4} == {4}


@pytest.mark.parametrize(("flavor", "gpus"), [("70B", 8), ("405B", 4), ("405B", 32)])
def test_offloading_says_its_host_memory_and_is_not_offered_beyond_a_bound(flavor: str, gpus: int) -> None:
    found = ask(file(flavor, batch=4), gpus)
    offloading = [s for s in found.suggestions if s.settings.cpu_offload]
    for suggestion in offloading:
        held = suggestion.host_bytes
        assert held is not None and held == host_bytes(suggestion.settings) <= MAX_HOST_BYTES
        assert "of host memory a node" in described(suggestion)
    if flavor == "70B":
        assert offloading
        # 16 bytes a parameter, all on one node
        assert offloading[0].host_bytes == pytest.approx(16 * 70.55e9, rel=0.01)
    if gpus == 4:
        assert not any(s.gpus == 4 for s in offloading)
        assert "of a node's memory, too much to offer" in dict(needs(found))["on 4 GPUs"]


def test_suggestions_say_which_warnings_they_bring() -> None:
    found = ask(file(batch=4, **{REPLICATE: 2}), 8).suggestions
    accumulating = [s for s in found if s.settings.gradient_accumulation_steps > 1]
    assert any(s.settings.dims.dp_replicate > 1 for s in accumulating)
    for suggestion in accumulating:
        assert ("hsdp-accumulation" in suggestion.warnings) == (suggestion.settings.dims.dp_replicate > 1)


def test_a_job_that_fits_gets_no_suggestions() -> None:
    found = ask(file(batch=1), 8)
    assert found.memory is not None and found.memory.verdict is Verdict.FITS
    assert found.suggestions == ()
    assert found.memory.capacity_bytes < 80 * GIB
