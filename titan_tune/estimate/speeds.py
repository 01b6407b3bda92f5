"""What the step-time model was fitted to say of a GPU: constants, and the speeds that they give.

``CONSTANTS`` were fitted on one- and two-GPU H200 runs (torch 2.11, torchtitan 0.2.2) by
benchmarks/step_time_accuracy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.estimate.collectives import Exposure
from titan_tune.estimate.interconnect import exposure_by_links

FP32_SHARE_OF_BF16 = 1 / 15
"""H100/H200 data sheet: 67 TFLOP/s fp32 without tensor cores against 989 bf16 (torchtitan leaves TF32 off)."""
FITTED_GPU = "h200"
"""The constants are shares of its data sheet that training reached: a calibration, whose kernels run alone and cooler,
adds nothing to them but the links."""


class Constants(NamedTuple):
    """What the roofline cannot know."""

    matmul_efficiency: float = 0.660
    """Of the bf16 peak, for many tokens."""
    tile_elements: float = 3.36e5
    """Outputs for which a matmul takes as long again: tiles that fill the GPU in part."""
    reduction: float = 112.0
    """Reduced width for which it takes as long again: a tile's prologue and epilogue."""
    fp32_efficiency: float = 0.773
    float8_tensorwise: float = 0.629
    """Share of the float8 peak (dense), casts apart."""
    float8_rowwise: float = 0.575
    float8_reduction: float = 502.0
    """As ``reduction``: a tile's products take half the time."""
    float8_cast_bytes: float = 11.6
    """Traffic of the casts per token and element of a linear's input or output gradient: read for the scale, read
    and written, and turned for the weight gradient."""
    float8_weight_casts: float = 1.73
    """Times a weight is read for its scale, read again and written as float8: forward and backward."""
    rowwise_casts: float = 2.05
    """Times the traffic of tensorwise casts: a tensor is scaled by its rows for one product, by its columns for
    another."""
    eager_float8_casts: float = 10.3
    """Times the traffic of compiled casts: every operator of a cast by itself."""
    attention_efficiency: float = 0.497
    memory_efficiency: float = 0.9
    """Copy rate against the data sheet's: 4.3 of 4.8 TB/s."""
    compiled_residuals: float = 13.0
    """Times a block moves the residual stream, forward and backward, fused as inductor does; likewise below, in
    the matmuls' type: other tensors of the model's width and those of the feed-forward's."""
    compiled_dims: float = 8.0
    compiled_ffns: float = 9.0
    eager_residuals: float = 27.1
    """Likewise of eager blocks, an operator at a time."""
    eager_dims: float = 29.2
    eager_ffns: float = 21.0
    compiled_loss_bytes: float = 23.2
    """Per token and vocabulary entry."""
    eager_loss_bytes: float = 62.8
    optimizer_bytes: float = 40.0
    """Per local fp32 parameter: fused AdamW reads four tensors and writes three, clipping reads the gradient twice
    and writes it."""
    compiled_launch: float = 1.48e-4
    """Seconds a block that small kernels and launches add, forward and backward."""
    eager_launch: float = 2.99e-4
    compiled_host: float = 2.00e-3
    """Seconds of Python and launches that a block costs the host, forward and backward; likewise below."""
    eager_host: float = 3.79e-3
    eager_tp_host: float = 0.0130
    """Added by tensor parallelism: every operator of a DTensor is dispatched in Python."""
    eager_cp_host: float = 6.32e-3
    """Added by context parallelism, likewise: attention goes round its ring in Python."""
    eager_op_host: float = 1.41
    """Times that under selective op AC, whose policy looks at every operator."""
    expert_host: float = 0.0213
    """Added by a block of routed experts, compiled or not: their tokens are counted, sorted and sent in Python."""
    recomputed_host: float = 0.449
    """Of an eager block's host time, when backward runs the whole forward again."""
    compiled_float8_host: float = 1.73e-3
    """Added by float8 linears."""
    eager_float8_host: float = 0.0118
    fsdp_host: float = 2.39e-3
    """Added by FSDP's hooks and copies."""
    float8_gather_host: float = 7.34e-3
    """Added by float8 gathers, each weight a tensor subclass with hooks of its own."""
    step_seconds: float = 2.48e-3
    """Of an optimizer step, whatever its size: clipping, the optimizer's launches, the first kernels of the next."""
    math_attention_passes: float = 11.6
    """Times an S x S fp32 matrix crosses memory a block, forward, recomputation and backward."""
    overlapped_exposed: float = 1.00
    """Of FSDP's and DDP's communication: what overlap does not hide, contention included."""
    tensor_parallel_exposed: float = 1.51
    """TP's collectives against a ring at link speed: none is hidden, compute waits for the slower rank."""
    calibrated_overlapped: float = 0.653
    """The shares against collectives as a calibration times them: two H200s moved 240 GB/s where the catalogue has the
    360 of larger rings, and a small one costs the host's launch too."""
    calibrated_waited: float = 0.903
    """CP, PP, EP."""
    calibrated_tensor_parallel: float = 0.824


CONSTANTS = Constants()


class Speeds(NamedTuple):
    """What one GPU reaches in training, FLOP/s and bytes/s."""

    matmul: float
    float32: float
    float8_tensorwise: float
    float8_rowwise: float
    attention: float
    traffic: float


def speeds_of(cluster: ClusterSpec, k: Constants) -> Speeds:
    """The data sheet at the efficiencies of the fit, or what a calibration of another GPU measured."""
    gpu, measured = cluster.gpu, cluster.rates
    peak, float8 = gpu.bf16_tflops * 1e12, gpu.float8_tflops * 1e12
    known = Speeds(
        matmul=peak * k.matmul_efficiency,
        float32=peak * (k.matmul_efficiency if gpu.is_cpu else FP32_SHARE_OF_BF16 * k.fp32_efficiency),
        float8_tensorwise=float8 * k.float8_tensorwise,
        float8_rowwise=float8 * k.float8_rowwise,
        attention=peak * k.attention_efficiency,
        traffic=gpu.memory_gb_per_s * 1e9 * k.memory_efficiency,
    )
    if measured is None or gpu.name == FITTED_GPU:
        return known
    return Speeds(
        matmul=measured.matmul_tflops * 1e12 or known.matmul,
        float32=measured.float32_tflops * 1e12 or known.float32,
        float8_tensorwise=measured.float8_tensorwise_tflops * 1e12 or known.float8_tensorwise,
        float8_rowwise=measured.float8_rowwise_tflops * 1e12 or known.float8_rowwise,
        attention=measured.attention_tflops * 1e12 or known.attention,
        traffic=measured.copy_gb_per_s * 1e9 or known.traffic,
    )


def exposure_of(cluster: ClusterSpec, k: Constants) -> Exposure:
    """What communication adds to a step, against the rates that the cluster's links are taken to have."""
    return exposure_by_links(
        cluster,
        Exposure(k.overlapped_exposed, tensor_parallel=k.tensor_parallel_exposed),
        Exposure(k.calibrated_overlapped, k.calibrated_waited, k.calibrated_tensor_parallel),
    )
