"""Jobs and specs that the tests of dry runs share."""

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve

MODEL = """
[job]
custom_config_module = "titan_tune.titan.plugin.config"
[experimental]
custom_import = "titan_tune.titan.plugin"
[metrics]
log_freq = 1
disable_color_printing = true
[model]
name = "llama3"
flavor = "tiny"
[optimizer]
implementation = "foreach"
[lr_scheduler]
total_steps = 100
[activation_checkpoint]
mode = "none"
[debug]
seed = 1
[titan_tune]
data = "synthetic"
[titan_tune.model_args]
dim = 64
n_layers = {layers}
n_heads = 4
vocab_size = 512
"""
BATCH = "[training]\nlocal_batch_size = {batch}\nseq_len = 64\nsteps = 25\n"


def job_text(*, batch=4, layers=6, more="", **parallelism):
    keys = "".join(f"{key} = {value!r}\n" for key, value in parallelism.items())
    return MODEL.format(layers=layers) + BATCH.format(batch=batch) + f"[parallelism]\n{keys}{more}"


def cluster_of(world_size, gpu="h100-80gb", per_node=8):
    per_node = min(world_size, per_node)
    return ClusterSpec(gpu=gpu_spec(gpu), num_nodes=world_size // per_node, gpus_per_node=per_node)


def settings_of(world_size, *, gpu="h100-80gb", **job):
    return resolve(job_from_text(job_text(**job), name="job"), cluster_of(world_size, gpu))


def spec_of(directory, world_size, **job):
    cluster = cluster_of(world_size)
    return ProbeSpec(
        config_id="abc",
        directory=directory / "trial",
        toml=job_text(**job),
        nproc_per_node=cluster.gpus_per_node,
        num_nodes=cluster.num_nodes,
        device="cpu",
        settings=ProbeSettings(retries=0),
        cache_directory=directory / "cache",
        tokens_per_step_per_rank=1000.0,
    )
