"""Order of work: what must be done at import, and what waits for the job config."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from typing import Any

from titan_tune.titan.plugin import caches, cpu, safety
from titan_tune.titan.plugin.config import DATA_SOURCES, TitanTune
from titan_tune.titan.plugin.environment import DATA, PluginEnvironment
from titan_tune.titan.plugin.failure import FailureRecorder


def arm(trainer_class: Any) -> None:
    """Prepare the process and hook ``trainer_class``.

    ``Trainer.__init__`` reads the device, then calls ``init_distributed``, then looks up the train spec:
    the CPU device is in place from here on, the rest follows at ``init_distributed``.
    """
    environment = PluginEnvironment.read()
    if environment.warden_pid is not None:
        safety.die_with_parent(environment.warden_pid)
    if environment.dry_run_rank is not None:
        from titan_tune.titan.plugin import dry_run

        dry_run.install(trainer_class, environment)
    if environment.metrics_directory is not None:
        _record(trainer_class, environment)
    if environment.cache_directory is not None:
        caches.use_rank_caches(environment.cache_directory, environment.rank)
    if not cpu.has_accelerator():
        cpu.use_cpu()
    original = trainer_class.init_distributed

    @functools.wraps(original)
    def init_distributed(trainer: Any) -> Any:
        apply_section(trainer_class, trainer.job_config, environment)
        return original(trainer)

    trainer_class.init_distributed = init_distributed


def apply_section(trainer_class: Any, job_config: Any, environment: PluginEnvironment) -> None:
    """Do what ``[titan_tune]`` asks, with ``TITAN_TUNE_DATA`` before ``titan_tune.data``."""
    section = getattr(job_config, "titan_tune", None) or TitanTune()
    data = environment.data or section.data
    if data not in DATA_SOURCES:
        raise ValueError(f"{DATA}={data!r} is not one of {', '.join(DATA_SOURCES)}")
    if section.custom_import:
        importlib.import_module(section.custom_import)
    _apply_compile_mode(trainer_class, section.compile_mode)
    if environment.metrics_directory is not None and job_config.parallelism.enable_async_tensor_parallel:
        from titan_tune.titan.plugin import compiler

        compiler.count_fused_collectives()
    _replace_train_spec(job_config, section, synthetic=data == "synthetic")


def _record(trainer_class: Any, environment: PluginEnvironment) -> None:
    from titan_tune.titan.plugin.metrics import record_training

    assert environment.metrics_directory is not None
    environment.metrics_directory.mkdir(parents=True, exist_ok=True)
    failures = FailureRecorder(environment.metrics_directory, environment.rank)
    failures.install()
    record_training(
        trainer_class, environment.metrics_directory, environment.rank, failures, time_at_import=time.time()
    )


def _apply_compile_mode(trainer_class: Any, mode: str) -> None:
    from titan_tune.titan.plugin import compile_mode

    compile_mode.use_mode(mode)
    if mode in compile_mode.CUDA_GRAPH_MODES and cpu.has_accelerator():
        compile_mode.mark_cuda_graph_steps(trainer_class)


def _replace_train_spec(job_config: Any, section: TitanTune, *, synthetic: bool) -> None:
    """Register the changed train spec under its own name, which torchtitan looks up first."""
    from torchtitan.protocols import train_spec as registry

    from titan_tune.titan.plugin import flavors
    from titan_tune.titan.plugin.synthetic import StubTokenizer, build_loader

    name, flavor = job_config.model.name, job_config.model.flavor
    original = spec = registry.get_train_spec(name)
    if section.model_args:
        spec = flavors.with_flavor(spec, flavor, section.model_args)
    if synthetic:
        if flavor not in spec.model_args:
            known = ", ".join(spec.model_args)
            raise ValueError(f"model.flavor={flavor!r} is not a flavor of {name}; its flavors: {known}")
        vocab_size = spec.model_args[flavor].vocab_size

        def build_dataloader(*, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
            return build_loader(
                vocab_size=vocab_size, dp_world_size=dp_world_size, dp_rank=dp_rank, job_config=job_config
            )

        spec = dataclasses.replace(
            spec,
            build_dataloader_fn=build_dataloader,
            build_tokenizer_fn=lambda job_config: StubTokenizer(vocab_size),
        )
    if not cpu.has_accelerator():
        spec = dataclasses.replace(spec, parallelize_fn=cpu.summing_reductions(spec.parallelize_fn))
    if spec is not original:
        # a user's own module may have registered the name before
        registry._extra_train_specs.pop(name, None)
        registry.register_train_spec(name, spec)
