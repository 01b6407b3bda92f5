"""What several rules ask about a configuration: the path it takes, its schedule, its hardware."""

from __future__ import annotations

from typing import Final, NamedTuple

from titan_tune.domain.cluster import GpuSpec
from titan_tune.domain.settings import AcMode, ParallelDims, Settings

MOE_FAMILIES_WITH_EP_FSDP: Final = frozenset({"llama4", "deepseek_v3", "gpt_oss"})
"""Families whose parallelize function asks for the fsdp mesh as soon as ep > 1."""

DEEPEP_FAMILIES: Final = frozenset({"llama4", "deepseek_v3"})
"""Families whose parallelize function reads ``expert_parallel_comm_backend``."""

FAMILIES_WITHOUT_PIPELINE: Final = frozenset({"qwen3", "gpt_oss"})
"""Train specs with ``pipelining_fn=None``."""

PLUGIN: Final = "titan_tune.titan.plugin"
"""What ``experimental.custom_import`` names when titan-tune runs the job: no import of the user's."""

SM89: Final = (8, 9)
SM90: Final = (9, 0)
SM100: Final = (10, 0)


class Schedule(NamedTuple):
    """One entry of torch's ``get_schedule_class``."""

    name: str
    single_stage: bool = False
    v_shaped: bool = False
    splits_backward: bool = False
    """Separate input and weight backward: no torch.compile, no per-op selective checkpointing."""
    needs_csv: bool = False


SCHEDULES: Final = {
    schedule.name.lower(): schedule
    for schedule in (
        Schedule("1F1B", single_stage=True),
        Schedule("Interleaved1F1B"),
        Schedule("GPipe", single_stage=True),
        Schedule("LoopedBFS"),
        Schedule("InterleavedZeroBubble", splits_backward=True),
        Schedule("PipelineScheduleSingle", single_stage=True, needs_csv=True),
        Schedule("PipelineScheduleMulti", needs_csv=True),
        Schedule("ZBVZeroBubble", v_shaped=True, splits_backward=True),
        Schedule("DualPipeV", v_shaped=True, splits_backward=True),
    )
}
"""By lower-case name: torch looks schedules up without regard to case."""


def schedule_of(settings: Settings) -> Schedule | None:
    """The pipeline schedule, or ``None`` where the name is unknown."""
    return SCHEDULES.get(settings.pipeline.schedule.lower())


def default_stages(schedule: Schedule, dims: ParallelDims) -> int:
    """Virtual stages where ``pipeline_parallel_layers_per_stage`` is unset."""
    return dims.pp if schedule.single_stage else 2 * dims.pp


def virtual_stages(settings: Settings, schedule: Schedule) -> int:
    """Pipeline stages over all ranks, as torchtitan's ``pipeline_llm`` counts them."""
    pipeline = settings.pipeline
    if pipeline.layers_per_stage is None:
        return default_stages(schedule, settings.dims)
    return -(-effective_layers(settings) // pipeline.layers_per_stage)


def effective_layers(settings: Settings) -> int:
    """Layers plus what the embedding and the output count for in the pipeline split."""
    pipeline = settings.pipeline
    return settings.model.n_layers + pipeline.first_stage_less_layers + pipeline.last_stage_less_layers


def microbatches(settings: Settings) -> int:
    """Pipeline microbatches of one forward."""
    return settings.local_batch_size // settings.pipeline.microbatch_size


def applies_fsdp(settings: Settings) -> bool:
    """Whether torchtitan wraps the model in ``fully_shard`` (FSDP, HSDP or context parallel)."""
    return settings.dims.dp_shard > 1 or settings.dims.cp > 1


def runs_plain(settings: Settings) -> bool:
    """Whether neither ``fully_shard`` nor autocast applies: no mixed precision at all."""
    return not applies_fsdp(settings) and (settings.dims.tp > 1 or settings.dims.pp > 1)


def has_capability(gpu: GpuSpec, minimum: tuple[int, int]) -> bool:
    """torchtitan's ``has_cuda_capability``."""
    if gpu.compute_capability is not None:
        return gpu.compute_capability >= minimum
    # ROCm reports gfx942 (MI300) as (9, 4) and gfx950 (MI350) as (9, 5), and has no number in the catalogue
    return not gpu.is_cpu and gpu.float8_tflops > 0 and minimum <= (9, 4)


def has_mxfp8(gpu: GpuSpec) -> bool:
    """SM 10.0, or ROCm gfx950."""
    return has_capability(gpu, SM100) or is_gfx950(gpu)


def is_gfx950(gpu: GpuSpec) -> bool:
    """AMD's MI350 series, by name: the catalogue has no number for it."""
    return gpu.compute_capability is None and "mi35" in gpu.name.lower()


def capability_text(gpu: GpuSpec) -> str:
    """``'SM 8.0'``, ``'CPU'`` or the GPU's name."""
    if gpu.compute_capability is not None:
        return "SM {}.{}".format(*gpu.compute_capability)
    return "CPU" if gpu.is_cpu else gpu.name


def checkpoints_per_op(settings: Settings) -> bool:
    """Whether activation checkpointing is selective by operation (``selective_ac_option = "op"``)."""
    return settings.ac.mode is AcMode.SELECTIVE and settings.ac.every == 0
