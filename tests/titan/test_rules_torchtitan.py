"""The rules against the real torchtitan 0.2.2: what it accepts is what they accept."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from configurations import configuration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_tune.catalog.loader import flavors, model_names, model_spec
from titan_tune.titan import rules
from titan_tune.titan.rules.facts import FAMILIES_WITHOUT_PIPELINE, SCHEDULES
from titan_tune.titan.rules.precision import CONVERTERS

pytestmark = pytest.mark.torchtitan

degree = st.sampled_from([1, 1, 1, 2, 3, 4, 6, 8])
WORLD_SIZES = (1, 4, 6, 8, 16)
RELAXED = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def found(short: dict[str, Any]) -> set[str]:
    config, values = configuration(**short)
    return {finding.rule for finding in rules.invalid(config, values)}


def dims_of(short: dict[str, int], world_size: int) -> Any:
    from torchtitan.distributed import ParallelDims

    return ParallelDims(
        dp_replicate=short["replicate"],
        dp_shard=short["shard"],
        cp=short["cp"],
        tp=short["tp"],
        pp=short["pp"],
        ep=short["ep"],
        etp=short["etp"],
        world_size=world_size,
    )


degrees = st.fixed_dictionaries(
    {
        "replicate": degree,
        "shard": st.sampled_from([-1, -1, 1, 2, 3, 4, 8]),
        "cp": degree,
        "tp": degree,
        "pp": degree,
        "ep": degree,
        "etp": degree,
    }
)


@RELAXED
@given(degrees, st.sampled_from(WORLD_SIZES))
def test_parallel_dims(short: dict[str, int], world_size: int) -> None:
    accepted = True
    try:
        dims = dims_of(short, world_size)
    except AssertionError:
        accepted = False
    config, _ = configuration(gpus=world_size, **short)
    assert accepted is not bool(
        found({"gpus": world_size, **short}) & {"world-size", "expert-tensor-parallel"}
    )
    if accepted:
        assert dims.dp_shard == config.dims.dp_shard
        assert dims.seq_len_divisor == config.dims.tp * 2 * config.dims.cp


@pytest.fixture(scope="module", params=[4, 8])
def fake_world(request: pytest.FixtureRequest) -> Any:
    """A fake process group of some size, so that meshes can be built without peers."""
    import torch.distributed as dist
    import torchtitan.distributed.parallel_dims as module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    device_type, module.device_type = module.device_type, "cpu"
    yield request.param
    module.device_type = device_type
    dist.destroy_process_group()


def test_expert_mesh(fake_world: int) -> None:
    """Every layout that ParallelDims takes: its meshes can be built exactly where the rule is silent."""
    sizes = [d for d in (1, 2, 3, 4, 8, 16) if d <= 2 * fake_world]
    divisors = [d for d in sizes if fake_world % d == 0]
    checked = 0
    for replicate, tp, ep, etp in itertools.product(divisors, divisors, sizes, (1, 2, 3)):
        if fake_world % (replicate * tp) or (ep > 1 and etp not in (1, tp)):
            continue
        short = {"replicate": replicate, "shard": -1, "cp": 1, "tp": tp, "pp": 1, "ep": ep, "etp": etp}
        try:
            dims_of(short, fake_world).build_mesh()
            built = True
        except ValueError:
            built = False
        assert built is ("expert-mesh" not in found({"gpus": fake_world, **short})), short
        checked += 1
    assert checked > 30


class AcceptedError(Exception):
    """Raised in place of building the stages: the configuration passed every check before."""


def accepts_stages(short: dict[str, Any], layers: int) -> bool:
    """Whether torchtitan's own ``pipeline_llm`` gets as far as splitting the model."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    parallelism = SimpleNamespace(
        pipeline_parallel_schedule=short["schedule"],
        pipeline_parallel_layers_per_stage=short["layers_per_stage"],
        pipeline_parallel_first_stage_less_layers=short["first_less"],
        pipeline_parallel_last_stage_less_layers=short["last_less"],
        module_fqns_per_model_part=None,
    )
    try:
        pipeline_llm(
            None,
            SimpleNamespace(pp=short["pp"], get_mesh=lambda name: None),
            SimpleNamespace(parallelism=parallelism),
            None,
            SimpleNamespace(n_layers=layers),
            None,
            None,
        )
    except AcceptedError:
        return True
    except ValueError:
        return False
    raise AssertionError("pipeline_llm ended without splitting")


@RELAXED
@given(
    st.fixed_dictionaries(
        {
            "pp": st.sampled_from([2, 3, 4, 8]),
            "schedule": st.sampled_from(["1F1B", "GPipe", "interleaved1f1b", "LoopedBFS"]),
            "layers_per_stage": st.none() | st.integers(1, 12),
            "first_less": st.integers(0, 4),
            "last_less": st.integers(0, 4),
        }
    ),
    st.integers(1, 33),
)
def test_pipeline_stages(monkeypatch: pytest.MonkeyPatch, short: dict[str, Any], layers: int) -> None:
    import torchtitan.distributed.pipeline_parallel as module

    def stop(*_: Any) -> None:
        raise AcceptedError

    monkeypatch.setattr(module, "pipeline_module_split", stop)
    refused = found({"gpus": 24, "local": 24, "model_update": {"n_layers": layers}, **short})
    refused &= {"pp-stages-divide", "pp-stages-per-rank", "pp-stages-layers"}
    assert accepts_stages(short, layers) is not bool(refused)


@RELAXED
@given(st.integers(2, 24), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_split_of_the_layers(stages: int, layers: int, first: int, last: int) -> None:
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

    short = {
        "gpus": 2 * stages,
        "pp": stages,
        "local": stages,
        "first_less": first,
        "last_less": last,
        "model_update": {"n_layers": layers},
    }
    try:
        parts = generate_llm_fqn_per_model_part(stages, layers, first, last)
    except ValueError:
        assert "pp-stages-layers" in found(short)
        return
    assert "pp-stages-layers" not in found(short)
    assert sum(name.startswith("layers.") for part in parts for name in part) == layers


def stage(index: int, stages: int, pp: int, rank: int) -> Any:
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=pp,
        group_rank=rank,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=False,
        submod=None,
    )


def accepts_microbatches(schedule: str, pp: int, count: int) -> bool:
    """Whether torch builds the schedule on rank 0 of ``pp``."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    schedule_class = get_schedule_class(schedule)
    if SCHEDULES[schedule.lower()].single_stage:
        stages: Any = stage(0, pp, pp, 0)
    else:
        second = 2 * pp - 1 if SCHEDULES[schedule.lower()].v_shaped else pp
        stages = [stage(0, 2 * pp, pp, 0), stage(second, 2 * pp, pp, 0)]
    try:
        schedule_class(stages, n_microbatches=count, loss_fn=lambda *_: None, scale_grads=False)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", [s.name for s in SCHEDULES.values() if not s.needs_csv])
def test_microbatches(schedule: str) -> None:
    for pp, count in itertools.product((2, 3, 4), range(1, 14)):
        refused = found({"gpus": 2 * pp, "pp": pp, "local": count, "schedule": schedule, "ac": "none"})
        assert accepts_microbatches(schedule, pp, count) is ("pp-microbatches" not in refused), (pp, count)


def test_schedules_are_torchs() -> None:
    from torch.distributed.pipelining import schedules as torch_schedules

    for schedule in SCHEDULES.values():
        schedule_class = torch_schedules.get_schedule_class(schedule.name.upper())
        assert schedule.single_stage is issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
        checks = "_check_torch_compile_compatibility" in inspect.getsource(schedule_class.__init__)
        assert schedule.splits_backward is checks
        assert schedule.needs_csv is schedule.name.startswith("PipelineSchedule")
    with pytest.raises(ValueError, match=r"valid options are \[([^\]]*)\]") as error:
        torch_schedules.get_schedule_class("nothing")
    assert str(error.value).count("'") // 2 - 1 == len(SCHEDULES)


def test_converters_are_torchtitans() -> None:
    import torchtitan.components.quantization  # noqa: F401 - registers them
    from torchtitan.protocols.model_converter import _registry_model_converter_cls

    assert set(CONVERTERS) == set(_registry_model_converter_cls)


@pytest.mark.parametrize("first", CONVERTERS)
@pytest.mark.parametrize("second", CONVERTERS)
def test_converter_mix(first: str, second: str) -> None:
    from torchtitan.components.quantization import QuantizationConverter

    job = SimpleNamespace(model=SimpleNamespace(converters=[first, second]))
    try:
        QuantizationConverter._validate(job)
        accepted = True
    except AssertionError:
        accepted = False
    assert accepted is ("converter-mix" not in found({"gpu": "b200", "converters": [first, second]}))


@pytest.mark.parametrize("name", model_names())
def test_families(name: str) -> None:
    """Pipelining and the attention that context parallelism takes, flavor by flavor."""
    import copy

    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec

    train_spec = get_train_spec(name)
    assert (train_spec.pipelining_fn is None) is (name in FAMILIES_WITHOUT_PIPELINE)
    if name == "qwen3":
        return  # checks in its parallelize function, after the model is built
    for flavor in flavors(name):
        job = JobConfig()
        job.parallelism.context_parallel_degree = 2
        try:
            copy.deepcopy(train_spec.model_args[flavor]).update_from_config(job)
            accepted = True
        except NotImplementedError:
            accepted = False
        refused = "cp-attention" in found({"model": f"{name}/{flavor}", "cp": 2})
        assert accepted is not refused, flavor
        assert model_spec(name, flavor).name == name
