"""What has no effect in a configuration: one function a section, each changing the dict in place.

Every no-op is justified by torchtitan 0.2.2's source, named beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import AcMode, CompileMode, Settings
from titan_tune.titan.keys import defaults, keys
from titan_tune.titan.rules.facts import (
    DEEPEP_FAMILIES,
    MOE_FAMILIES_WITH_EP_FSDP,
    PLUGIN,
    SM89,
    applies_fsdp,
    default_stages,
    has_capability,
    runs_plain,
    schedule_of,
    virtual_stages,
)
from titan_tune.titan.rules.precision import CONVERTERS

Normaliser = Callable[[dict[str, Value], Settings], None]
_P = "parallelism."
_F8 = "quantize.linear.float8."


def _reset(result: dict[str, Value], names: tuple[str, ...]) -> None:
    result.update(_defaults_of(names))


@cache
def _defaults_of(names: tuple[str, ...]) -> dict[str, Value]:
    default = defaults()
    return {name: default[name] for name in names}


def _batch(result: dict[str, Value], settings: Settings) -> None:
    result["training.global_batch_size"] = settings.global_batch_size
    if runs_plain(settings):
        # neither fully_shard nor autocast: torchtitan/distributed/utils.py, maybe_enable_amp
        result["training.mixed_precision_param"] = "bfloat16"


_PIPELINE = tuple(
    _P + name
    for name in (
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_expert_parallel_overlap",
    )
)


def _parallelism(result: dict[str, Value], settings: Settings) -> None:
    dims = settings.dims
    result[_P + "data_parallel_shard_degree"] = dims.dp_shard
    # only torchtitan/components/validate.py reads it
    result[_P + "context_parallel_rotate_method"] = "allgather"
    if dims.cp == 1:
        result[_P + "context_parallel_load_balancer"] = "headtail"
    if dims.tp == 1:
        # train.py, tensor_parallel.py: both are read under tp_enabled only
        result[_P + "disable_loss_parallel"] = False
    ignores_async_tp = settings.model.name == "gpt_oss" and settings.compile.model
    if dims.tp == 1 or ignores_async_tp:
        result[_P + "enable_async_tensor_parallel"] = False
    _experts(result, settings)
    if not applies_fsdp(settings):
        result[_P + "fsdp_reshard_after_forward"] = "default"
    elif dims.pp > 1 and settings.reshard_after_forward == "never":
        # apply_fsdp: the default is not to reshard under PP; norm and output reshard under "always" only
        result[_P + "fsdp_reshard_after_forward"] = "default"
    if dims.pp == 1:
        _reset(result, _PIPELINE)
    else:
        _pipeline(result, settings)


def _experts(result: dict[str, Value], settings: Settings) -> None:
    dims, model = settings.dims, settings.model
    if model.name not in DEEPEP_FAMILIES:
        result[_P + "expert_parallel_comm_backend"] = "standard"
    if (dims.ep == 1 and dims.etp == 1) or not _expert_mesh_exists(settings):
        return
    if dims.ep == 1:
        # apply_moe_ep_tp shards the experts over tp while there is no ep mesh
        result[_P + "expert_tensor_parallel_degree"] = 1
    elif model.moe is None and not settings.early_step_in_backward:
        # a dense model has nothing to shard (seen on CPU); early optimizer steps refuse ep > 1 all the same
        result[_P + "expert_parallel_degree"] = 1
        result[_P + "expert_tensor_parallel_degree"] = 1


def _expert_mesh_exists(settings: Settings) -> bool:
    """Whether the rules on expert degrees hold, without which they are not ignored but refused."""
    dims = settings.dims
    if (dims.dp_shard * dims.cp * dims.tp) % (dims.ep * dims.etp) != 0:
        return False
    if dims.ep == 1:
        return True
    needs_fsdp = settings.model.name in MOE_FAMILIES_WITH_EP_FSDP
    return dims.etp in (1, dims.tp) and (applies_fsdp(settings) or not needs_fsdp)


def _pipeline(result: dict[str, Value], settings: Settings) -> None:
    schedule = schedule_of(settings)
    if schedule is None:
        return
    result[_P + "pipeline_parallel_schedule"] = schedule.name
    result[_P + "pipeline_parallel_schedule_csv"] = result[_P + "pipeline_parallel_schedule_csv"] or ""
    if schedule.name != "DualPipeV":
        # dual_pipe_v.py and build_pipeline_schedule read it for DualPipeV only
        result[_P + "pipeline_parallel_expert_parallel_overlap"] = True
    pipeline = settings.pipeline
    stages = virtual_stages(settings, schedule)
    if pipeline.layers_per_stage is not None and stages == default_stages(schedule, settings.dims):
        # pipeline_llm uses it for nothing but the number of stages
        result[_P + "pipeline_parallel_layers_per_stage"] = None
    if (
        result[_P + "module_fqns_per_model_part"] is not None
        and result[_P + "pipeline_parallel_layers_per_stage"] is None
    ):
        # an explicit split leaves nothing to compute
        result[_P + "pipeline_parallel_first_stage_less_layers"] = 1
        result[_P + "pipeline_parallel_last_stage_less_layers"] = 1


_AC = "activation_checkpoint."
_AC_OPTIONS = tuple(
    _AC + name
    for name in (
        "selective_ac_option",
        "per_op_sac_force_recompute_mm_shapes_by_fqns",
        "early_stop",
        "preserve_rng_state",
        "determinism_check",
        "debug",
    )
)


def _checkpoint_mode(settings: Settings) -> AcMode:
    """The mode that does the same by the plainest means (torchtitan/distributed/activation_checkpoint.py)."""
    ac = settings.ac
    if ac.mode is AcMode.SELECTIVE and ac.every == 1:
        return AcMode.FULL  # every layer gets the same wrapper as under "full"
    if ac.mode is AcMode.SELECTIVE and ac.every > settings.model.n_layers:
        return AcMode.NONE  # the counter never gets there
    if ac.mode is AcMode.MEMORY_BUDGET and ac.memory_budget == 1.0 and settings.compile.model:
        return AcMode.NONE  # 1.0 is functorch's own default
    return ac.mode


def _activation_checkpoint(result: dict[str, Value], settings: Settings) -> None:
    ac, mode = settings.ac, _checkpoint_mode(settings)
    result[_AC + "mode"] = mode.value
    if mode is not AcMode.MEMORY_BUDGET:
        result[_AC + "memory_budget"] = 0.5
    if mode in (AcMode.NONE, AcMode.MEMORY_BUDGET):
        _reset(result, _AC_OPTIONS)
        return
    if mode is AcMode.FULL:
        result[_AC + "selective_ac_option"] = "2"
    elif ac.every:
        result[_AC + "selective_ac_option"] = str(ac.every)
    if mode is AcMode.FULL or ac.every:
        _reset(result, (_AC + "per_op_sac_force_recompute_mm_shapes_by_fqns",))


def _compile(result: dict[str, Value], settings: Settings) -> None:
    compiled = settings.compile
    # gpt_oss never compiles its blocks (models/gpt_oss/infra/parallelize.py)
    ignored = settings.model.name == "gpt_oss" and not _reads_model_compile(settings)
    components = [
        name for name, on in (("model", compiled.model and not ignored), ("loss", compiled.loss)) if on
    ]
    if not components:
        result["compile.enable"] = False
        _reset(result, ("compile.components", "compile.backend", "titan_tune.compile_mode"))
        return
    result["compile.components"] = components
    if settings.cluster.gpu.is_cpu:
        result["titan_tune.compile_mode"] = _WITHOUT_CUDA_GRAPHS.get(compiled.mode, compiled.mode).value


def _reads_model_compile(settings: Settings) -> bool:
    """Whether torchtitan asks for, or refuses, a compiled model beside compiling it."""
    emulates = settings.float8 is not None and settings.float8.emulate
    return _checkpoint_mode(settings) is AcMode.MEMORY_BUDGET or emulates or settings.mxfp8


_WITHOUT_CUDA_GRAPHS = {
    CompileMode.REDUCE_OVERHEAD: CompileMode.DEFAULT,
    CompileMode.MAX_AUTOTUNE: CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS,
}
"""``torch._inductor.list_mode_options``: the modes differ by ``triton.cudagraphs``, which CPUs do not have."""


@cache
def _keys_below(prefix: str) -> tuple[str, ...]:
    return tuple(key for key in keys() if key.startswith(prefix))


def _quantization(result: dict[str, Value], settings: Settings) -> None:
    converters = result["model.converters"]
    if all(name in CONVERTERS for name in converters):
        # each converts other modules; their order does not matter
        converters = sorted(converters)
    result["model.converters"] = converters
    for converter in CONVERTERS:
        if converter not in converters:
            _reset(result, _keys_below(f"{converter}."))
    if "quantize.linear.mx" in converters:
        result["quantize.linear.mx.filter_fqns"] = sorted(set(result["quantize.linear.mx.filter_fqns"]))
    if settings.float8 is not None:
        _float8(result, settings)


def _float8(result: dict[str, Value], settings: Settings) -> None:
    """torchtitan/components/quantization/float8.py."""
    float8 = settings.float8
    assert float8 is not None
    result[_F8 + "filter_fqns"] = sorted(set(float8.filter_fqns))
    if not float8.recipe_named:
        if settings.dims.dp_shard == 1:
            result[_F8 + "enable_fsdp_float8_all_gather"] = False
        if not result[_F8 + "enable_fsdp_float8_all_gather"]:
            result[_F8 + "precompute_float8_dynamic_scale_for_fsdp"] = False
        return
    if float8.fsdp_all_gather:
        return  # refused: stays as it is
    result[_F8 + "precompute_float8_dynamic_scale_for_fsdp"] = False
    if not float8.emulate:
        # from_recipe_name("tensorwise") is the configuration of an unset name (torchao/float8/config.py)
        if float8.recipe == "tensorwise":
            result[_F8 + "recipe_name"] = None
    elif has_capability(settings.cluster.gpu, SM89):
        # ignored with a recipe; on older hardware it is what lets the job past the check
        result[_F8 + "emulate"] = False
        if float8.recipe == "tensorwise":
            result[_F8 + "recipe_name"] = None


def _rest(result: dict[str, Value], settings: Settings) -> None:
    if not result["fault_tolerance.enable"]:
        _reset(result, _keys_below("fault_tolerance."))
    if result["lr_scheduler.total_steps"] is None:
        result["lr_scheduler.total_steps"] = result["training.steps"]
    own = result["titan_tune.custom_import"] or result["experimental.custom_import"]
    result["titan_tune.custom_import"] = "" if own == PLUGIN else own
    result["experimental.custom_import"] = ""


NORMALISERS: Mapping[Normaliser, tuple[str, ...]] = {
    _batch: ("training.",),
    _parallelism: ("parallelism.",),
    _activation_checkpoint: ("activation_checkpoint.",),
    _compile: ("compile.", "titan_tune."),
    _quantization: ("model.", "quantize."),
    _rest: ("fault_tolerance.", "lr_scheduler.", "titan_tune.", "experimental."),
}
"""In the order they are applied → the tables they write. None reads what another has written."""
