"""Stage splits and schedules against torchtitan and torch themselves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.domain.settings import Pipeline
from titan_tune.errors import InputError
from titan_tune.estimate.parameters import NotCoveredError
from titan_tune.estimate.pipeline import split_model, stage_layers
from titan_tune.estimate.schedule import (
    FORWARD,
    INPUT,
    V_SCHEDULES,
    moments,
    rank_operations,
    stages_of_rank,
)

CLASS_NAMES = {
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


@given(st.integers(1, 130), st.integers(1, 32), st.integers(0, 3), st.integers(0, 3))
def test_every_block_is_in_one_stage(layers: int, stages: int, first: int, last: int) -> None:
    try:
        split = stage_layers(layers, stages, first, last)
    except InputError:
        return
    assert len(split) == stages
    assert sum(split) == layers
    assert min(split) >= 0


@pytest.mark.torchtitan
@given(st.integers(1, 130), st.integers(1, 32), st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_split_is_torchtitans(layers: int, stages: int, first: int, last: int) -> None:
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    try:
        theirs = generate_llm_fqn_per_model_part(stages, layers, first, last)
    except ValueError:
        with pytest.raises(InputError):
            stage_layers(layers, stages, first, last)
        return
    counted = tuple(sum(name.startswith("layers.") for name in part) for part in theirs)
    assert stage_layers(layers, stages, first, last) == counted


@pytest.mark.torchtitan
@pytest.mark.parametrize("name", CLASS_NAMES)
@pytest.mark.parametrize("pp", [2, 4])
def test_operations_are_torchs(name: str, pp: int) -> None:
    from torch.distributed.pipelining import schedules

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for rounds in (2, 3):
        microbatches = rounds * pp
        rounds_run = max(1, microbatches // pp)
        fake = SimpleNamespace(
            pp_group_size=pp,
            n_local_stages=2,
            num_stages=2 * pp,
            _num_stages=2 * pp,
            _stages=[None, None],
            _n_microbatches=microbatches,
            microbatches_per_round=microbatches // rounds_run,
            number_of_rounds=rounds_run,
        )
        for rank in range(pp):
            real = getattr(schedules, CLASS_NAMES[name])._calculate_single_rank_operations(fake, rank)
            flat = []
            for action in real:
                if action is not None:
                    flat += list(action.sub_actions) if action.sub_actions else [action]
            theirs = [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat]
            assert list(rank_operations(name, rank, pp, 2, microbatches)) == theirs


@given(
    st.sampled_from(("1F1B", "GPipe", *CLASS_NAMES)),
    st.sampled_from((2, 4, 8)),
    st.integers(1, 4),
)
def test_every_microbatch_goes_forward_and_back(name: str, pp: int, rounds: int) -> None:
    microbatches = 2 * pp * rounds
    per_rank = 1 if name in ("1F1B", "GPipe") else 2
    for rank in range(pp):
        stages = stages_of_rank(name, rank, pp, per_rank)
        run = list(rank_operations(name, rank, pp, per_rank, microbatches))
        everything = sorted((s, m) for s in stages for m in range(microbatches))
        forwards = [(s, m) for kind, s, m in run if kind == FORWARD]
        ends = [(s, m) for kind, s, m in run if kind not in (FORWARD, INPUT)]
        assert sorted(forwards) == everything
        assert sorted(ends) == everything
        assert all(
            run.index((FORWARD, s, m))
            < next(i for i, (k, *at) in enumerate(run) if k in "BW" and at == [s, m])
            for s, m in everything
        )


def test_stages_cover_a_v_and_a_loop() -> None:
    for name in ("Interleaved1F1B", *V_SCHEDULES):
        owned = [stage for rank in range(4) for stage in stages_of_rank(name, rank, 4, 2)]
        assert sorted(owned) == list(range(8))
    assert stages_of_rank("ZBVZeroBubble", 0, 4, 2) == (0, 7)


def test_1f1b_keeps_as_many_as_ranks_follow() -> None:
    for rank in range(4):
        assert max(sum(m.in_flight) for m in moments("1F1B", rank, 4, 1, 16)) == 4 - rank
    assert max(sum(m.in_flight) for m in moments("GPipe", 0, 4, 1, 16)) == 16


@given(st.integers(8, 100), st.sampled_from((2, 4)), st.integers(1, 12))
def test_layers_per_stage(layers: int, pp: int, per_stage: int) -> None:
    pipeline = Pipeline(schedule="Interleaved1F1B", layers_per_stage=per_stage)
    try:
        split = split_model(pipeline, pp=pp, num_layers=layers)
    except InputError:
        return
    assert len(split.layers) == math.ceil((layers + 2) / per_stage) == pp * split.stages_per_rank


def test_a_spelled_out_split_is_not_covered() -> None:
    with pytest.raises(NotCoveredError, match="module_fqns_per_model_part"):
        split_model(Pipeline(explicit_split=True), pp=2, num_layers=16)
