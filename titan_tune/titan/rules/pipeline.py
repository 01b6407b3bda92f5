"""Validity of pipeline parallelism: schedules, virtual stages, microbatches.

The conditions are those of torchtitan's ``pipeline_llm`` and ``generate_llm_fqn_per_model_part``
(torchtitan/distributed/pipeline_parallel.py) and of torch's schedules (torch 2.13,
torch/distributed/pipelining/schedules.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.titan.rules.facts import (
    FAMILIES_WITHOUT_PIPELINE,
    SCHEDULES,
    checkpoints_per_op,
    effective_layers,
    microbatches,
    schedule_of,
    virtual_stages,
)
from titan_tune.titan.rules.registry import Facts, invalid

Values = Mapping[str, Value]

_SPLIT = "parallelism.module_fqns_per_model_part"
_CSV = "parallelism.pipeline_parallel_schedule_csv"


@invalid(
    "pp-family",
    "pipeline_parallel_degree={pp}: torchtitan's {model} does not support pipelining",
    fix="set parallelism.pipeline_parallel_degree = 1",
    layout=True,
)
def pp_family(settings: Settings, values: Values) -> Facts | None:
    """RuntimeError "Pipeline Parallel is enabled but … does not support pipelining" (torchtitan/train.py): the
    train specs of qwen3 and gpt_oss have no ``pipelining_fn``."""
    if settings.dims.pp == 1 or settings.model.name not in FAMILIES_WITHOUT_PIPELINE:
        return None
    return {"pp": settings.dims.pp, "model": settings.model.name}


@invalid(
    "pp-schedule",
    'pipeline_parallel_schedule="{schedule}" is unknown',
    fix="use one of {known}",
    layout=True,
)
def pp_schedule(settings: Settings, values: Values) -> Facts | None:
    """ValueError "Unknown schedule name" (``get_schedule_class`` in torch/distributed/pipelining/schedules.py;
    case does not matter)."""
    if settings.dims.pp == 1 or schedule_of(settings) is not None:
        return None
    known = ", ".join(schedule.name for schedule in SCHEDULES.values())
    return {"schedule": settings.pipeline.schedule, "known": known}


@invalid(
    "pp-schedule-csv",
    'pipeline_parallel_schedule="{schedule}" is abstract: it runs only with a schedule CSV',
    fix="set parallelism.pipeline_parallel_schedule_csv, or use a named schedule such as 1F1B",
    layout=True,
)
def pp_schedule_csv(settings: Settings, values: Values) -> Facts | None:
    """``build_pipeline_schedule`` instantiates the class that the name stands for unless a CSV is given
    (torchtitan/distributed/pipeline_parallel.py)."""
    if settings.dims.pp == 1:
        return None
    schedule = schedule_of(settings)
    if schedule is None or not schedule.needs_csv or values[_CSV]:
        return None
    return {"schedule": schedule.name}


@invalid(
    "pp-stages-divide",
    "pipeline_parallel_layers_per_stage={layers_per_stage} makes {stages} stages, not a multiple of "
    "pipeline_parallel_degree={pp}",
    fix="choose pipeline_parallel_layers_per_stage so that ceil({layers} / layers_per_stage) is a multiple of {pp}, "
    "or leave it unset",
    layout=True,
)
def pp_stages_divide(settings: Settings, values: Values) -> Facts | None:
    """ValueError "Number of virtual stages (..) must be divisible by pipeline parallel size (..)"
    (torchtitan/distributed/pipeline_parallel.py)."""
    if settings.dims.pp == 1 or settings.pipeline.layers_per_stage is None:
        return None
    schedule = schedule_of(settings)
    if schedule is None or (stages := virtual_stages(settings, schedule)) % settings.dims.pp == 0:
        return None
    return {
        "layers_per_stage": settings.pipeline.layers_per_stage,
        "stages": stages,
        "pp": settings.dims.pp,
        "layers": effective_layers(settings),
    }


@invalid(
    "pp-stages-per-rank",
    "pipeline_parallel_layers_per_stage={layers_per_stage} gives {per_rank} stage(s) a rank; "
    "pipeline_parallel_schedule={schedule} needs {needed}",
    fix="leave pipeline_parallel_layers_per_stage unset, or change the schedule",
    layout=True,
)
def pp_stages_per_rank(settings: Settings, values: Values) -> Facts | None:
    """ValueErrors "Single stage schedule requires exactly 1 stage per rank", "Multi-stage schedule requires at
    least 2 stages per rank"; assertion "v schedules assume 2 stages per rank" for ZBVZeroBubble and DualPipeV
    (torchtitan/distributed/pipeline_parallel.py)."""
    pp = settings.dims.pp
    if pp == 1 or settings.pipeline.layers_per_stage is None:
        return None
    schedule = schedule_of(settings)
    if schedule is None:
        return None
    per_rank = virtual_stages(settings, schedule) // pp
    if schedule.single_stage:
        needed = "" if per_rank == 1 else "exactly 1"
    elif schedule.v_shaped and not settings.pipeline.explicit_split:
        needed = "" if per_rank == 2 else "exactly 2"
    else:
        needed = "" if per_rank >= 2 else "at least 2"
    if not needed:
        return None
    return {
        "layers_per_stage": settings.pipeline.layers_per_stage,
        "per_rank": per_rank,
        "schedule": schedule.name,
        "needed": needed,
    }


@invalid(
    "pp-stages-layers",
    "{stages} pipeline stages for {n_layers} layers (+{first} first, +{last} last): {problem}",
    fix="use a smaller pipeline_parallel_degree or a schedule with one stage a rank (1F1B, GPipe), or smaller "
    "pipeline_parallel_first_stage_less_layers and pipeline_parallel_last_stage_less_layers",
    layout=True,
)
def pp_stages_layers(settings: Settings, values: Values) -> Facts | None:
    """ValueErrors "Number of stages (..) cannot be greater than effective layers (..)" and "input_weight (..)
    exceeds minimum layers per stage (..)" (``generate_llm_fqn_per_model_part``,
    torchtitan/distributed/pipeline_parallel.py)."""
    pipeline = settings.pipeline
    if settings.dims.pp == 1 or values[_SPLIT] is not None:
        return None
    schedule = schedule_of(settings)
    if schedule is None:
        return None
    stages = virtual_stages(settings, schedule)
    if stages == 1:
        return None
    per_stage = effective_layers(settings) // stages if stages > 0 else 0
    first, last = pipeline.first_stage_less_layers, pipeline.last_stage_less_layers
    if per_stage >= 1 and first <= per_stage and last <= per_stage:
        return None
    if per_stage < 1:
        problem = "more stages than layers"
    else:
        problem = f"a stage holds {per_stage} layer(s), less than the first or last is to be relieved of"
    return {
        "stages": stages,
        "n_layers": settings.model.n_layers,
        "first": first,
        "last": last,
        "problem": problem,
    }


@invalid(
    "pp-explicit-split",
    "module_fqns_per_model_part has {parts} parts for pipeline_parallel_degree={pp}; {schedule} needs {needed}",
    fix="list {needed} in parallelism.module_fqns_per_model_part",
    layout=True,
)
def pp_explicit_split(settings: Settings, values: Values) -> Facts | None:
    """Assertions "num_stages .. must be evenly divisible by pp_degree" and "v schedules assume 2 stages per rank"
    (``pipeline_module_split``); a single-stage schedule runs only the first of a rank's stages
    (``build_pipeline_schedule`` passes ``stages[0]``; torchtitan/distributed/pipeline_parallel.py)."""
    split, pp = values[_SPLIT], settings.dims.pp
    if split is None or pp == 1:
        return None
    schedule = schedule_of(settings)
    if schedule is None:
        return None
    parts = len(split)
    if schedule.v_shaped:
        needed = "" if parts == 2 * pp else f"{2 * pp} parts"
    elif schedule.single_stage and not values[_CSV]:
        needed = "" if parts == pp else f"{pp} parts"
    else:
        needed = "" if parts and parts % pp == 0 else f"a multiple of {pp} parts"
    if not needed:
        return None
    return {"parts": parts, "pp": pp, "schedule": schedule.name, "needed": needed}


@invalid(
    "pp-microbatch-divides",
    "training.local_batch_size={local_batch} is not a multiple of pipeline_parallel_microbatch_size={microbatch}",
    fix="choose a pipeline_parallel_microbatch_size that divides {local_batch}",
    layout=True,
)
def pp_microbatch_divides(settings: Settings, values: Values) -> Facts | None:
    """ValueError "Batch size .. must be divisible by microbatch_size .."
    (torchtitan/distributed/pipeline_parallel.py)."""
    microbatch = settings.pipeline.microbatch_size
    if settings.dims.pp == 1 or settings.local_batch_size % microbatch == 0:
        return None
    return {"local_batch": settings.local_batch_size, "microbatch": microbatch}


@invalid(
    "pp-microbatches",
    "{count} pipeline microbatch(es) (local_batch_size={local_batch} / "
    "pipeline_parallel_microbatch_size={microbatch}); {schedule} at pipeline_parallel_degree={pp} needs {needed}",
    fix="raise training.local_batch_size or lower pipeline_parallel_microbatch_size, or use another schedule "
    "(GPipe and ZBVZeroBubble take any number)",
    layout=True,
)
def pp_microbatches(settings: Settings, values: Values) -> Facts | None:
    """1F1B: "Number of microbatches must be greater than or equal to the number of stages" (older torch hung,
    torchtitan issue #775); DualPipeV: at least as many microbatches as stages; Interleaved1F1B and
    InterleavedZeroBubble: a multiple of the number of rounds, max(1, microbatches // pp)."""
    pp = settings.dims.pp
    if pp == 1 or values[_CSV]:
        return None
    schedule = schedule_of(settings)
    if schedule is None:
        return None
    count = microbatches(settings)
    needed = _microbatches_needed(schedule.name, count, pp)
    if not needed:
        return None
    return {
        "count": count,
        "local_batch": settings.local_batch_size,
        "microbatch": settings.pipeline.microbatch_size,
        "schedule": schedule.name,
        "pp": pp,
        "needed": needed,
    }


def _microbatches_needed(schedule: str, count: int, pp: int) -> str:
    """What ``schedule`` asks for where ``count`` microbatches do not do, else ``''``."""
    if count < 1:
        return "at least 1"
    if schedule == "1F1B":
        return "" if count >= pp else f"at least {pp}"
    if schedule == "DualPipeV":
        return "" if count >= 2 * pp else f"at least {2 * pp}"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, count // pp)
        return "" if count % rounds == 0 else f"a multiple of its {rounds} rounds"
    return ""


@invalid(
    "dualpipev-cpu-overlap",
    "pipeline_parallel_schedule=DualPipeV with pipeline_parallel_expert_parallel_overlap on CPU: its callback asks for "
    "an accelerator stream",
    fix="set parallelism.pipeline_parallel_expert_parallel_overlap = false",
    layout=True,
)
def dualpipev_cpu_overlap(settings: Settings, values: Values) -> Facts | None:
    """``overlap_callback`` is registered with or without expert parallelism and calls
    ``torch.accelerator.current_stream`` (torchtitan/distributed/dual_pipe_v.py), which raises on CPU."""
    if settings.dims.pp == 1 or not settings.cluster.gpu.is_cpu or not settings.pipeline.ep_overlap:
        return None
    schedule = schedule_of(settings)
    return {} if schedule is not None and schedule.name == "DualPipeV" else None


@invalid(
    "zero-bubble-compile",
    "pipeline_parallel_schedule={schedule} does not run compiled models (compile.components has model)",
    fix='set compile.enable = false or compile.components = ["loss"], or use 1F1B or Interleaved1F1B',
)
def zero_bubble_compile(settings: Settings, values: Values) -> Facts | None:
    """RuntimeError "The .. schedule is not supported with stage modules that have used torch.compile"
    for InterleavedZeroBubble, ZBVZeroBubble and DualPipeV (``_check_torch_compile_compatibility`` in
    torch/distributed/pipelining/schedules.py)."""
    if settings.dims.pp == 1 or not settings.compile.model or values[_CSV]:
        return None
    schedule = schedule_of(settings)
    if schedule is None or not schedule.splits_backward:
        return None
    return {"schedule": schedule.name}


@invalid(
    "zero-bubble-op-ac",
    'pipeline_parallel_schedule={schedule} with activation_checkpoint.selective_ac_option="op" fails at step 1',
    fix='use activation_checkpoint.mode = "full" or "none", or selective_ac_option = "2", or 1F1B or Interleaved1F1B',
)
def zero_bubble_op_ac(settings: Settings, values: Values) -> Facts | None:
    """RuntimeError "Trying to backward an extra time" at step 1 on InterleavedZeroBubble, ZBVZeroBubble and
    DualPipeV: seen on CPU, torch 2.13, torchtitan 0.2.2. torchtitan's own zero-bubble tests force full
    checkpointing since pull request #2357."""
    if settings.dims.pp == 1 or not checkpoints_per_op(settings) or values[_CSV]:
        return None
    schedule = schedule_of(settings)
    if schedule is None or not schedule.splits_backward:
        return None
    return {"schedule": schedule.name}


@invalid(
    "dualpipev-ep-ac",
    "pipeline_parallel_schedule=DualPipeV with expert_parallel_degree={ep} and activation_checkpoint.mode={mode}",
    fix='set activation_checkpoint.mode = "none" or parallelism.pipeline_parallel_expert_parallel_overlap = false',
)
def dualpipev_ep_ac(settings: Settings, values: Values) -> Facts | None:
    """NotImplementedError "Expert Parallel with DualPipeV and Activation Checkpointing cannot be used together"
    (torchtitan/distributed/dual_pipe_v.py)."""
    dims = settings.dims
    if dims.pp == 1 or dims.ep == 1 or settings.ac.mode is AcMode.NONE or not settings.pipeline.ep_overlap:
        return None
    if settings.model.moe is None or settings.pipeline.schedule.lower() != "dualpipev":
        return None
    return {"ep": dims.ep, "mode": settings.ac.mode.value}
