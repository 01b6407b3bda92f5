"""Validity of the layout: degrees, meshes, sequence, heads and batch.

These read only the model, the cluster, ``parallelism.*``, ``training.seq_len`` and the batch sizes.
That every degree is at least 1 is checked where values come in (``titan.keys``).
"""

from __future__ import annotations

from collections.abc import Mapping

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import Settings
from titan_tune.titan.experts import expert_shards_of, uneven_experts
from titan_tune.titan.rules.facts import DEEPEP_FAMILIES, MOE_FAMILIES_WITH_EP_FSDP
from titan_tune.titan.rules.registry import Facts, invalid

Values = Mapping[str, Value]


@invalid(
    "world-size",
    "data_parallel_replicate_degree={dp_replicate} x data_parallel_shard_degree={dp_shard} x "
    "context_parallel_degree={cp} x tensor_parallel_degree={tp} x pipeline_parallel_degree={pp} = {product}, "
    "not the {world_size} ranks of the job",
    fix="choose degrees whose product is {world_size}, or leave parallelism.data_parallel_shard_degree at -1",
    layout=True,
)
def world_size(settings: Settings, values: Values) -> Facts | None:
    """The degrees multiply to WORLD_SIZE: "Invalid parallel dims: dp_replicate(..) * … != WORLD_SIZE(..)"
    (torchtitan/distributed/parallel_dims.py). Seen on CPU with torchtitan 0.2.2."""
    dims, ranks = settings.dims, settings.cluster.world_size
    if dims.world_size == ranks:
        return None
    return {
        "dp_replicate": dims.dp_replicate,
        "dp_shard": dims.dp_shard,
        "cp": dims.cp,
        "tp": dims.tp,
        "pp": dims.pp,
        "product": dims.world_size,
        "world_size": ranks,
    }


@invalid(
    "expert-tensor-parallel",
    "expert_tensor_parallel_degree={etp} is neither 1 nor tensor_parallel_degree={tp}",
    fix="set parallelism.expert_tensor_parallel_degree to 1 or {tp}",
    layout=True,
)
def expert_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """ "Currently we only support ETP=TP or ETP=1", asserted while expert_parallel_degree > 1
    (torchtitan/distributed/parallel_dims.py)."""
    dims = settings.dims
    if dims.ep == 1 or dims.etp == 1 or dims.etp == dims.tp:
        return None
    return {"etp": dims.etp, "tp": dims.tp}


@invalid(
    "expert-mesh",
    "expert_parallel_degree={ep} x expert_tensor_parallel_degree={etp} does not divide "
    "data_parallel_shard_degree x context_parallel_degree x tensor_parallel_degree = {ranks}",
    fix="choose an expert_parallel_degree that divides {ranks} (data_parallel_replicate_degree={dp_replicate} "
    "and pipeline_parallel_degree={pp} do not count)",
    layout=True,
)
def expert_mesh(settings: Settings, values: Values) -> Facts | None:
    """``build_mesh`` unflattens the world into [pp, dp_replicate, efsdp, ep, etp], so
    efsdp = dp_shard x cp x tp / (etp x ep) must be whole, on dense models too: torch's ValueError "The product of
    mesh_sizes=…" (torchtitan/distributed/parallel_dims.py). Seen on CPU with torchtitan 0.2.2."""
    dims = settings.dims
    if dims.ep == 1 and dims.etp == 1:
        return None
    ranks = dims.dp_shard * dims.cp * dims.tp
    if ranks % (dims.ep * dims.etp) == 0:
        return None
    return {
        "ep": dims.ep,
        "etp": dims.etp,
        "ranks": ranks,
        "dp_replicate": dims.dp_replicate,
        "pp": dims.pp,
    }


@invalid(
    "ep-divides-experts",
    "expert_parallel_degree={ep} does not divide the {num_experts} experts",
    fix="choose an expert_parallel_degree that divides {num_experts}",
    layout=True,
)
def ep_divides_experts(settings: Settings, values: Values) -> Facts | None:
    """The token exchange views the tokens per expert as (ep, -1)
    (torchtitan/distributed/expert_parallel.py)."""
    ep, moe = settings.dims.ep, settings.model.moe
    if ep == 1 or moe is None or moe.num_experts % ep == 0:
        return None
    return {"ep": ep, "num_experts": moe.num_experts}


@invalid(
    "uneven-expert-shards",
    "expert_parallel_degree={ep}: FSDP shards each rank's {experts} experts over {shards} ranks, in dimension 1, whose "
    "size {size} that does not divide",
    fix="use a larger expert_parallel_degree, or data_parallel_replicate_degree > 1",
    layout=True,
)
def uneven_expert_shards(settings: Settings, values: Values) -> Facts | None:
    """``apply_fsdp`` shards dimension 1 of the experts where efsdp x ep > num_experts, and FSDP raises
    NotImplementedError "FSDP does not support uneven sharding on dim 1"
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Seen on CPU with torchtitan 0.2.2."""
    dims, model, moe = settings.dims, settings.model, settings.model.moe
    if moe is None or (size := uneven_experts(model, moe, dims)) is None:
        return None
    return {
        "ep": dims.ep,
        "experts": moe.num_experts // dims.ep,
        "shards": expert_shards_of(dims),
        "size": size,
    }


@invalid(
    "ep-needs-fsdp",
    "expert_parallel_degree={ep} with data_parallel_shard_degree x context_parallel_degree = 1: {model} asks for "
    "the fsdp mesh, which does not exist",
    fix="give expert parallelism sharded ranks: data_parallel_shard_degree > 1",
    layout=True,
)
def ep_needs_fsdp(settings: Settings, values: Values) -> Facts | None:
    """``get_mesh(["fsdp"])`` while ``ep_enabled``: ValueError "Mesh '['fsdp']' is not available" for llama4,
    deepseek_v3 and gpt_oss (their infra/parallelize.py). Seen on CPU with torchtitan 0.2.2."""
    dims = settings.dims
    if dims.ep == 1 or dims.dp_shard * dims.cp > 1 or settings.model.name not in MOE_FAMILIES_WITH_EP_FSDP:
        return None
    return {"ep": dims.ep, "model": settings.model.name}


@invalid(
    "deepep-expert-parallel",
    'expert_parallel_comm_backend="deepep" with expert_parallel_degree={ep} and expert_tensor_parallel_degree={etp}',
    fix="deepep needs expert_parallel_degree > 1 and expert_tensor_parallel_degree = 1; "
    'otherwise use expert_parallel_comm_backend = "standard"',
    layout=True,
)
def deepep_expert_parallel(settings: Settings, values: Values) -> Facts | None:
    """ValueError "DeepEP requires expert parallelism" and NotImplementedError "DeepEP with Expert Tensor
    Parallelism (ETP) is not supported yet" (models/{llama4,deepseek_v3}/infra/parallelize.py)."""
    if settings.ep_comm_backend != "deepep" or settings.model.name not in DEEPEP_FAMILIES:
        return None
    dims = settings.dims
    if dims.ep > 1 and dims.etp == 1:
        return None
    return {"ep": dims.ep, "etp": dims.etp}


@invalid(
    "sequence-divides",
    "training.seq_len={seq_len} is not a multiple of {divisor} "
    "(tensor_parallel_degree={tp} x 2 x context_parallel_degree={cp})",
    fix="use seq_len={nearest} or another multiple of {divisor}, or smaller degrees",
    layout=True,
)
def sequence_divides(settings: Settings, values: Values) -> Facts | None:
    """Every parallelize function asserts ``seq_len % (tp * 2 * cp) == 0``, also at tp = cp = 1
    (``ParallelDims.seq_len_divisor``; torchtitan issue #1306). Nothing is said where tp does not divide the heads:
    another length would not help."""
    dims, model = settings.dims, settings.model
    divisor = dims.tp * 2 * dims.cp
    if settings.seq_len % divisor == 0 or model.n_heads % dims.tp or model.n_kv_heads % dims.tp:
        return None
    nearest = max(divisor, settings.seq_len // divisor * divisor)
    return {
        "seq_len": settings.seq_len,
        "divisor": divisor,
        "tp": dims.tp,
        "cp": dims.cp,
        "nearest": nearest,
    }


@invalid(
    "tp-divides-heads",
    "tensor_parallel_degree={tp} does not divide {heads} attention heads",
    fix="choose a tensor_parallel_degree that divides {heads}",
    layout=True,
)
def tp_divides_heads(settings: Settings, values: Values) -> Facts | None:
    """torchtitan 0.2.2 does not check it: the forward crashes with "shape '[2, 256, -1, 16]' is invalid" where
    the projections are viewed as heads (models/llama3/model/model.py). Seen on CPU."""
    if settings.model.n_heads % settings.dims.tp == 0:
        return None
    return {"tp": settings.dims.tp, "heads": settings.model.n_heads}


@invalid(
    "tp-divides-kv-heads",
    "tensor_parallel_degree={tp} does not divide {heads} KV heads",
    fix="choose a tensor_parallel_degree that divides {heads}",
    layout=True,
)
def tp_divides_kv_heads(settings: Settings, values: Values) -> Facts | None:
    """As for the query heads: nothing checks it and the forward crashes (torchtitan issue #932)."""
    if settings.model.n_kv_heads % settings.dims.tp == 0:
        return None
    return {"tp": settings.dims.tp, "heads": settings.model.n_kv_heads}


_CP_ATTENTION = {
    "llama3": ("sdpa", "flex"),
    "qwen3": ("sdpa",),
    "llama4": ("sdpa",),
    "deepseek_v3": ("sdpa",),
    "gpt_oss": (),
}
_CP_ATTENTION_OF_OTHERS = ("sdpa", "flex")
"""``apply_cp_to_attention_module`` accepts these two."""


@invalid(
    "cp-attention",
    "context_parallel_degree={cp} does not support {attention} attention on {model}",
    fix="set parallelism.context_parallel_degree = 1{alternative}",
    layout=True,
)
def cp_attention(settings: Settings, values: Values) -> Facts | None:
    """NotImplementedError "Context Parallel only supports SDPA …" or "CP support for gpt-oss model is still in
    progress." (models/*/model/args.py, models/{qwen3,deepseek_v3}/infra/parallelize.py)."""
    if settings.dims.cp == 1:
        return None
    model = settings.model
    supported = _CP_ATTENTION.get(model.name, _CP_ATTENTION_OF_OTHERS)
    if model.attention in supported:
        return None
    alternative = f", or use a flavor with {' or '.join(supported)} attention" if supported else ""
    return {
        "cp": settings.dims.cp,
        "attention": model.attention,
        "model": model.name,
        "alternative": alternative,
    }


@invalid(
    "cp-load-balancer",
    'context_parallel_load_balancer="ptrr" needs flex attention; the model uses {attention}',
    fix='use parallelism.context_parallel_load_balancer = "headtail"',
    layout=True,
)
def cp_load_balancer(settings: Settings, values: Values) -> Facts | None:
    """ValueError "PTRRLoadBalancer requires attention_masks to be a BlockMask"
    (torchtitan/distributed/context_parallel.py). Seen on CPU with torchtitan 0.2.2."""
    if settings.dims.cp == 1 or settings.cp_load_balancer != "ptrr" or settings.model.attention == "flex":
        return None
    return {"attention": settings.model.attention}


@invalid(
    "ddp-more-dimensions",
    "data_parallel_replicate_degree={dp_replicate} without sharding, together with tensor_parallel_degree={tp} and "
    "pipeline_parallel_degree={pp}: DDP does not combine with other dimensions",
    fix="shard instead of replicating: data_parallel_shard_degree = {dp_replicate}, "
    "data_parallel_replicate_degree = 1",
    layout=True,
)
def ddp_more_dimensions(settings: Settings, values: Values) -> Facts | None:
    """RuntimeError "DDP has not supported > 1D parallelism" in llama3 and llama4 (models/llama3/infra/parallelize.py;
    the other families miss the check, see ddp-over-tensor-parallel)."""
    dims = settings.dims
    if dims.dp_replicate == 1 or dims.dp_shard > 1 or dims.cp > 1 or (dims.tp == 1 and dims.pp == 1):
        return None
    if settings.model.name not in ("llama3", "llama4"):
        return None
    return {"dp_replicate": dims.dp_replicate, "tp": dims.tp, "pp": dims.pp}


@invalid(
    "batch-divides",
    "training.global_batch_size={global_batch} is not a multiple of training.local_batch_size={local_batch} x "
    "{dp_degree} data-parallel ranks",
    fix="change the local batch size or the data-parallel degree so that their product divides {global_batch}",
    layout=True,
)
def batch_divides(settings: Settings, values: Values) -> Facts | None:
    """ "global batch size must be multiple of local batch size times data-parallel degree"
    (torchtitan/train.py). The quotient is the number of gradient accumulation steps."""
    per_forward = settings.local_batch_size * settings.dims.dp_degree
    if settings.global_batch_size % per_forward == 0:
        return None
    return {
        "global_batch": settings.global_batch_size,
        "local_batch": settings.local_batch_size,
        "dp_degree": settings.dims.dp_degree,
    }


@invalid(
    "cpu-context-parallel",
    "context_parallel_degree={cp} on CPU: the CPU attention operator has no sharding strategy",
    fix="set parallelism.context_parallel_degree = 1",
    layout=True,
)
def cpu_context_parallel(settings: Settings, values: Values) -> Facts | None:
    """``apply_cp_to_attention_module`` (torchtitan/distributed/context_parallel.py) shards the CUDA operators only.
    Seen on CPU processes through gloo, torch 2.13, torchtitan 0.2.2."""
    if settings.dims.cp == 1 or not settings.cluster.gpu.is_cpu:
        return None
    return {"cp": settings.dims.cp}


@invalid(
    "cpu-attention",
    "{attention} attention does not train on CPU",
    fix="use a flavor with sdpa attention",
    layout=True,
)
def cpu_attention(settings: Settings, values: Values) -> Facts | None:
    """NotImplementedError "FlexAttention does not support backward on CPU" (torch 2.13); varlen attention is a
    CUDA kernel (torchtitan/models/attention.py)."""
    if settings.model.attention == "sdpa" or not settings.cluster.gpu.is_cpu:
        return None
    return {"attention": settings.model.attention}


@invalid(
    "cpu-expert-parallel",
    "expert_parallel_degree={ep} on CPU: the tokens are permuted by a Triton kernel",
    fix="set parallelism.expert_parallel_degree = 1",
    layout=True,
)
def cpu_expert_parallel(settings: Settings, values: Values) -> Facts | None:
    """``ExpertParallel._token_dispatch`` calls ``generate_permute_indices``, a Triton kernel
    (torchtitan/models/moe/kernels.py)."""
    if settings.dims.ep == 1 or settings.model.moe is None or not settings.cluster.gpu.is_cpu:
        return None
    return {"ep": settings.dims.ep}
