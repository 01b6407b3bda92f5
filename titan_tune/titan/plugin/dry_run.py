"""One rank of a job of many, alone: ``TITAN_TUNE_DRY_RUN_RANK=r``, ``NGPU=N``, ``comm.mode=fake_backend``.

torchtitan's fake backend simulates rank 0 only, its pipelines stop at the stages' exchange of metadata, and
its outputs are memory that nobody wrote. Here the process is rank r in all that reads a rank, pipelines run
(``dry_run_stages``), collectives leave something sensible (``dry_run_answers``), and one step is counted
(``dry_run_collectives``). Kernels, allocations and the order of work are those of the real rank.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from titan_tune.titan.plugin.dry_run_answers import Answers
from titan_tune.titan.plugin.dry_run_collectives import CollectiveCounter, chunk_records, process_groups
from titan_tune.titan.plugin.dry_run_stages import hidden_state, stage_class
from titan_tune.titan.plugin.dry_run_timer import Timer
from titan_tune.titan.plugin.environment import DRY_RUN_RANK, PluginEnvironment

COUNTED_STEP: Final = 2
"""Optimizer state, receive buffers and compiled code are there by then."""
FAKE_BACKEND: Final = "fake_backend"


def install(trainer_class: Any, environment: PluginEnvironment) -> None:
    """Hook ``trainer_class``: the rank before distributed init, the count around one step."""
    rank = environment.dry_run_rank
    assert rank is not None
    world_size = simulated_world_size(os.environ, rank)
    # torchrun's own, for one process; LOCAL_RANK stays: it is the device
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    init_distributed = trainer_class.init_distributed
    forward_backward, train_step = trainer_class.forward_backward_step, trainer_class.train_step
    runs: list[DryRun] = []

    @functools.wraps(init_distributed)
    def init_as_rank(trainer: Any) -> Any:
        mode = trainer.job_config.comm.mode
        if mode != FAKE_BACKEND:
            raise ValueError(f"{DRY_RUN_RANK}={rank} needs comm.mode={FAKE_BACKEND!r}, not {mode!r}")
        _give_rank_to_fake_group(rank)
        dims = init_distributed(trainer)
        runs.append(DryRun(trainer, dims))
        return dims

    @functools.wraps(forward_backward)
    def in_model(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        counter = runs[-1].counter
        counter.in_model = True
        try:
            return forward_backward(trainer, *args, **kwargs)
        finally:
            counter.in_model = False

    @functools.wraps(train_step)
    def counted_train_step(trainer: Any, *args: Any, **kwargs: Any) -> None:
        is_counted = trainer.step == runs[-1].counted_step
        with runs[-1].counting(environment.metrics_directory) if is_counted else nullcontext():
            train_step(trainer, *args, **kwargs)

    trainer_class.init_distributed = init_as_rank
    trainer_class.forward_backward_step = in_model
    trainer_class.train_step = counted_train_step


def simulated_world_size(environ: Mapping[str, str], rank: int) -> int:
    """``NGPU``, with ``rank`` one of its ranks. Raises ValueError."""
    text = environ.get("NGPU", "")
    if not text.isdecimal() or not 0 <= rank < int(text):
        raise ValueError(f"{DRY_RUN_RANK}={rank} is not a rank of NGPU={text!r}")
    return int(text)


def _give_rank_to_fake_group(rank: int) -> None:
    from torchtitan.distributed import utils

    def init_fake_mode(world_size: int, comm_mode: str = FAKE_BACKEND) -> None:
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size)

    utils.init_fake_mode = init_fake_mode


class DryRun:
    """What one trainer needs to run alone, and what is counted of it."""

    def __init__(self, trainer: Any, dims: Any) -> None:
        from torchtitan.distributed import pipeline_parallel
        from torchtitan.tools import utils

        self.trainer = trainer
        self.dims = dims
        self.device_module = utils.device_module
        self.timer = Timer(utils.device_type)
        self.counter = CollectiveCounter(utils.device_type)
        self.answers = Answers(
            utils.device_type,
            partial_sums=[
                mesh.get_group().group_name for name, mesh in self.meshes().items() if name in ("tp", "etp")
            ],
            futures=dims.dp_replicate_enabled and not dims.fsdp_enabled,
        )
        pipeline_parallel.PipelineStage = stage_class(
            lambda: hidden_state(trainer.job_config, dims, trainer.model_args.dim), self.timer
        )

    def meshes(self) -> dict[str, Any]:
        """torchtitan's one-dimensional meshes of more than one rank."""
        found: dict[str, Any] = self.dims.get_all_one_dimensional_meshes()
        return found

    @property
    def counted_step(self) -> int:
        """A CUDA graph is recorded in its second run and replayed, uncounted, from then on."""
        from titan_tune.titan.plugin.compile_mode import CUDA_GRAPH_MODES

        section = getattr(self.trainer.job_config, "titan_tune", None)
        if getattr(section, "compile_mode", None) in CUDA_GRAPH_MODES:
            return 1
        return min(COUNTED_STEP, int(self.trainer.job_config.training.steps))

    @contextmanager
    def counting(self, directory: Path | None) -> Iterator[None]:
        """Around the step that is counted."""
        self.counter.start()
        self.timer.active = True
        yield
        self.timer.active = False
        self.counter.stop()
        self.device_module.synchronize()
        if directory is not None:
            self.write(directory)

    def write(self, directory: Path) -> None:
        """``collectives.rank{r}.json``, whole or not at all."""
        rank = torch.distributed.get_rank()
        groups = process_groups(self.meshes())
        record = {
            "rank": rank,
            "world_size": torch.distributed.get_world_size(),
            "step": self.trainer.step,
            "collectives": self.counter.records(groups),
            "answer_seconds": self.counter.answer_seconds(),
            "chunks": chunk_records(self.timer.seconds()),
        }
        path = directory / f"collectives.rank{rank}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.replace(path)
