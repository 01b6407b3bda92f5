"""What a layout does to the mathematics of a training, told from the values of a configuration."""

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.study.numerics import layout_effects, start_values, winner_effects
from titan_tune.titan.job import job_from_text

JOB = job_from_text(
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n', name="job"
)
H200 = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=8)


def values(**degrees):
    return {f"parallelism.{name}_degree": degree for name, degree in degrees.items()}


FSDP = values(data_parallel_shard=8)
TP = values(data_parallel_shard=1, tensor_parallel=8)
DDP = values(data_parallel_replicate=8, data_parallel_shard=1)
PP = values(data_parallel_shard=4, pipeline_parallel=2)
FSDP_TP = values(data_parallel_shard=4, tensor_parallel=2)


@pytest.mark.parametrize(
    ("after", "before", "said"),
    [
        (TP, FSDP, ["trains in fp32: no mixed precision applies"]),
        (PP, FSDP, ["the loss summed over tokens"]),
        (DDP, FSDP, ["an fp32 residual stream", "divides the gradients twice"]),
        (FSDP, TP, ["no longer so: tensor_parallel_degree=8 without FSDP trains in fp32"]),
        (FSDP_TP, FSDP, []),
        (TP, TP, []),
        (TP | {"training.dtype": "bfloat16"}, FSDP, []),  # the key says it, and is marked as one
    ],
    ids=["tp", "pp", "ddp", "from tp", "fsdp and tp", "the same", "bf16"],
)
def test_what_differs_from_the_job_as_it_was(after, before, said):
    found = layout_effects(JOB, H200, after, before)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def test_a_study_without_a_winner_or_baseline():
    assert winner_effects(JOB, H200, ()) == ()
    assert start_values(()) == {}


def test_a_job_that_is_none_here_has_nothing_to_say():
    assert layout_effects(JOB, H200, {"model.flavor": "9B"}, FSDP) == ()
