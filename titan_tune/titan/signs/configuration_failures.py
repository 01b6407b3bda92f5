"""Exceptions by which torchtitan 0.2.2 and PyTorch refuse a configuration. The texts are theirs.

Rule ids are those of ``titan_tune.titan.rules`` where a rule refuses the same before the run.
"""

from __future__ import annotations

from typing import Final

from titan_tune.titan.signs.failure import failure

_SPLIT: Final = "choose pipeline_parallel_layers_per_stage, or the first and last stage's less_layers, to fit"

LAYOUT: Final = (
    failure(
        "world-size",
        r"Invalid parallel dims: (?P<dims>.+)",
        "the parallel degrees do not multiply to the number of ranks: {dims}",
        "choose degrees whose product is WORLD_SIZE, or leave parallelism.data_parallel_shard_degree at -1",
    ),
    failure(
        "world-size",
        r"AssertionError: *(?:dp_shard must.*|Parallelism degree should.*)?$",
        "the parallel degrees leave no rank for data_parallel_shard_degree: their product is above WORLD_SIZE",
        "choose degrees whose product is WORLD_SIZE",
        frame="parallel_dims.py:",
    ),
    failure(
        "expert-tensor-parallel",
        r"Currently we only support ETP=TP or ETP=1",
        "expert_tensor_parallel_degree is neither 1 nor tensor_parallel_degree",
        "set parallelism.expert_tensor_parallel_degree to one of them",
    ),
    failure(
        "expert-mesh",
        r"The product of mesh_sizes",
        "expert_parallel_degree does not fit the mesh: dp_shard x cp x tp / (etp x ep) must be a whole number",
        "choose an expert_parallel_degree that divides dp_shard x cp x tp (dp_replicate does not count)",
    ),
    failure(
        "ep-needs-fsdp",
        r"Mesh '(?P<mesh>.+?)' is not available",
        "the job needs the mesh {mesh}, which its degrees do not make",
        "set parallelism.data_parallel_shard_degree > 1",
    ),
    failure(
        "sequence-divides",
        r"Sequence length (?P<seq_len>\d+) must be divisible by the product of TP degree",
        "training.seq_len = {seq_len} is not divisible by tensor_parallel_degree x 2 x context_parallel_degree",
        "choose a training.seq_len that is (an odd one never is)",
    ),
    failure(
        "tp-divides-heads",
        r"shape '(?P<shape>\[[-\d, ]+\])' is invalid for input of size",
        "attention cannot split its heads (view {shape}): tensor_parallel_degree does not divide n_heads or "
        "n_kv_heads",
        "choose a tensor_parallel_degree that divides both",
        frame="model.py:forward",
    ),
    failure(
        "batch-divides",
        r"global batch size must be multiple of .*?\((?P<sizes>.+?) != 0\)",
        "training.global_batch_size is no multiple of local_batch_size x data-parallel degree: {sizes}",
        "choose a multiple, or leave training.global_batch_size at -1",
    ),
    failure(
        "ddp-more-dimensions",
        r"DDP has not supported > 1D parallelism",
        "data_parallel_replicate_degree without sharding cannot go with tensor or pipeline parallelism",
        "shard: parallelism.data_parallel_shard_degree > 1",
    ),
    failure(
        "cp-attention",
        r"Context Parallel only supports|attention CP is not yet supported|PTRRLoadBalancer requires|"
        r"[Cc]ontext [Pp]arallel.*not (?:yet )?support",
        "context parallelism does not go with this attention",
        "use a flavor with sdpa attention, or context_parallel_degree = 1",
    ),
    failure(
        "tokens-divide",
        r"Uneven split of tokens",
        "the tokens of a rank do not divide by tensor_parallel_degree in an expert-parallel layer",
        "change training.local_batch_size or training.seq_len",
    ),
)

PIPELINE: Final = (
    failure(
        "pp-family",
        r"Pipeline Parallel is enabled but (?P<model>\S+)",
        "{model} has no pipeline parallelism in torchtitan 0.2.2",
        "set parallelism.pipeline_parallel_degree = 1",
    ),
    failure(
        "pp-stages-divide",
        r"Number of virtual stages \((?P<stages>\d+)\) must be divisible|num_stages (?:\d+) must be evenly",
        "the pipeline stages do not divide among the pipeline ranks",
        _SPLIT,
    ),
    failure(
        "pp-stages-per-rank",
        r"(?P<what>(?:Single stage|Multi-stage) schedule requires .*? per rank|v schedules assume \d+ stages per "
        r"rank|ZBV requires exactly \d+ stages per rank)",
        "{what}",
        _SPLIT,
    ),
    failure(
        "pp-stages-layers",
        r"Number of stages \(\d+\) cannot be greater|empty stages|exceeds minimum layers per stage",
        "the model has too few layers for so many pipeline stages",
        "use fewer stages, or pipeline_parallel_{{first,last}}_stage_less_layers = 0",
    ),
    failure(
        "pp-microbatch-divides",
        r"Batch size (?P<batch>\d+) must be divisible by microbatch_size (?P<microbatch>\d+)",
        "training.local_batch_size = {batch} is no multiple of pipeline_parallel_microbatch_size = {microbatch}",
        "change one of them",
    ),
    failure(
        "pp-microbatches",
        r"(?P<what>Number of microbatches \(\d+\) must be greater than or equal to the number of stages \(\d+\)|"
        r"(?:Interleaved 1F1B|Zero bubble) requires the number of microbatches[^\n]*|"
        r"DualPipeV requires at least as many microbatches[^\n]*)",
        "{what}",
        "raise training.local_batch_size (microbatches = local_batch_size / pipeline_parallel_microbatch_size)",
    ),
    failure(
        "zero-bubble-compile",
        r"The (?P<schedule>\w+) schedule is not supported with stage modules that have used torch\.compile",
        "{schedule} does not go with a compiled model",
        "take model out of compile.components, or use 1F1B or Interleaved1F1B",
    ),
    failure(
        "zero-bubble-op-ac",
        r"Trying to backward an extra time",
        "zero-bubble schedules run backward in two parts, which selective_ac_option = op does not survive",
        'set activation_checkpoint.selective_ac_option = "2" or mode = "full", or use 1F1B or Interleaved1F1B',
    ),
    failure(
        "ep-op-ac-gather",
        r"encountered during backward but not found in storage",
        "selective activation checkpointing met an operation that its forward had not run: torch 2.13 refuses experts "
        "that FSDP shards beside expert_parallel_degree with selective_ac_option = op",
        'set activation_checkpoint.mode = "full" or "none", shard by expert_parallel_degree alone, or use torch 2.11',
    ),
    failure(
        "dualpipev-ep-ac",
        r"Expert Parallel with DualPipeV and Activation Checkpointing",
        "DualPipeV with expert parallelism does not go with activation checkpointing",
        'set activation_checkpoint.mode = "none", or use another schedule',
    ),
)

TRAINING: Final = (
    failure(
        "converter-name",
        r"KeyError: 'float8'",
        "model.converters names 'float8', which torchtitan 0.2.2 does not know (comments in its own files do)",
        'write model.converters = ["quantize.linear.float8"]',
        frame="model_converter.py:",
    ),
    failure(
        "converter-name",
        r"KeyError: '(?P<name>[^']*)'",
        "model.converters names {name!r}, which is not a converter",
        "use quantize.linear.float8, quantize.linear.mx, quantize.grouped_mm.float8 or quantize.grouped_mm.mx",
        frame="model_converter.py:",
    ),
    failure(
        "converter-mix",
        r"Cannot combine model converters with different quantization types",
        "model.converters mixes float8 and mxfp8",
        "keep one kind",
    ),
    failure(
        "float8-recipe-all-gather",
        r"enable_fsdp_float8_all_gather` together with `float8_config\.recipe_name`",
        "quantize.linear.float8.recipe_name excludes enable_fsdp_float8_all_gather",
        "leave recipe_name out for tensorwise scaling with float8 all-gather, or switch the all-gather off",
    ),
    failure(
        "float8-hardware",
        r"float8 is only supported on SM89|Float8 MoE training only supported on SM89",
        "float8 needs a GPU of compute capability 8.9 or later",
        "remove the converter; to try it elsewhere set quantize.linear.float8.emulate = true without compile",
    ),
    failure(
        "grouped-float8",
        r"Float8 MoE training prototype does not yet support (?P<what>\w+ parallelism)",
        "float8 experts do not go with {what}",
        "remove quantize.grouped_mm.float8, or set that degree to 1",
    ),
    failure(
        "mxfp8-hardware",
        r"MXFP8 is only supported on",
        "mxfp8 needs compute capability 10.0 or later, or ROCm gfx950",
        "remove the converter; quantize.linear.float8 works from 8.9 on",
    ),
    failure(
        "mxfp8-tensor-parallel-compile",
        r"TP not yet supported with torch\.compile for mxfp8",
        "mxfp8 with tensor parallelism cannot be compiled",
        "set tensor_parallel_degree = 1, or take model out of compile.components",
    ),
    failure(
        "memory-budget-compile",
        r"Memory budget mode requires model to be compiled",
        'activation_checkpoint.mode = "memory_budget" needs a compiled model',
        'set compile.enable = true with "model" among compile.components',
    ),
    failure(
        "ac-option",
        r"Invalid (?:AC mode|selective AC option): (?P<value>[^\n.]*)",
        "[activation_checkpoint] has an unknown value: {value}",
        "mode is none, selective, full or memory_budget; selective_ac_option is op or a number",
    ),
    failure(
        "async-tp-compile",
        r"Async TP requires 'model'",
        "enable_async_tensor_parallel needs a compiled model",
        'set compile.enable = true with "model" among compile.components',
    ),
    failure(
        "early-step",
        r"Optimizers in backward is not supported with (?P<what>[\w ]+)",
        "optimizer.early_step_in_backward does not go with {what}",
        "set optimizer.early_step_in_backward = false",
    ),
    failure(
        "torchao-missing",
        r"torchao is not installed|torchao installation does not have",
        "torchao is missing or too old",
        "pip install 'titan-tune[probe]'",
    ),
)

CONFIGURATION: Final = (*LAYOUT, *PIPELINE, *TRAINING)
