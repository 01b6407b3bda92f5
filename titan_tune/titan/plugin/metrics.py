"""``metrics.rank*.jsonl``: one line a step and rank, flushed, with peaks over the whole process.

Lines are objects with a ``kind``: ``header`` once at the start of training, ``step`` after every step,
``compile`` after the first step and ``end`` after the last (both with the compiler's counters).
A number that does not exist is ``null``; one that is not finite is the string ``nan``, ``inf`` or
``-inf``, so that every line is valid JSON.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titan_tune.titan.plugin import compiler
from titan_tune.titan.plugin.failure import FailureRecorder


@dataclass(slots=True)
class MemoryPeaks:
    """Running maxima in bytes: torchtitan resets the allocator's own peaks every time it logs."""

    active_bytes: int = 0
    reserved_bytes: int = 0
    device_bytes: int = 0
    alloc_retries: int = 0
    ooms: int = 0

    def update(self, device_module: Any) -> None:
        """Read the device now."""
        stats = device_module.memory_stats()
        free, total = device_module.mem_get_info()
        self.active_bytes = max(self.active_bytes, stats.get("active_bytes.all.peak", 0))
        self.reserved_bytes = max(self.reserved_bytes, stats.get("reserved_bytes.all.peak", 0))
        self.device_bytes = max(self.device_bytes, total - free)
        self.alloc_retries = stats.get("num_alloc_retries", 0)
        self.ooms = stats.get("num_ooms", 0)


class StepRecorder:
    """Times the steps of one trainer and writes its rank's file."""

    def __init__(self, trainer: Any, directory: Path, rank: int) -> None:
        from torchtitan.tools import utils

        self.trainer = trainer
        self.device_module = utils.device_module
        self.has_loss = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
        self.file = (directory / f"metrics.rank{rank}.jsonl").open("w")
        self.peaks = MemoryPeaks()
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.tokens_seen = trainer.ntokens_seen
        self.end_of_last_step = time.perf_counter()
        self.has_ended = False

    def watch_logging(self) -> None:
        """See what torchtitan logs, and the memory peaks before it resets them."""
        processor = self.trainer.metrics_processor
        original = processor.log

        def log(
            step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any
        ) -> None:
            self.loss = global_avg_loss if self.has_loss else None
            self.grad_norm = grad_norm
            self.peaks.update(self.device_module)
            original(step, global_avg_loss, global_max_loss, grad_norm, **more)

        processor.log = log

    def write_header(self, time_at_import: float, rank: int) -> None:
        """Who this rank is and what it is about to train."""
        import psutil

        modules = [module for part in self.trainer.model_parts for module in part.modules()]
        self.write(
            kind="header",
            rank=rank,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            process_start=psutil.Process().create_time(),
            plugin_import=time_at_import,
            training_start=time.time(),
            device_name=self.device_module.get_device_name(),
            torch=torch.__version__,
            has_loss=self.has_loss,
            float8_linear_modules=sum(is_float8_linear(module) for module in modules),
            linear_modules=sum(
                isinstance(module, torch.nn.Linear) and not is_float8_linear(module) for module in modules
            ),
            num_parameters=sum(p.numel() for part in self.trainer.model_parts for p in part.parameters()),
        )

    def end_step(self) -> None:
        """Write the line of the step that just ran."""
        self.device_module.synchronize()
        now = time.perf_counter()
        seconds, self.end_of_last_step = now - self.end_of_last_step, now
        self.peaks.update(self.device_module)
        tokens, self.tokens_seen = self.trainer.ntokens_seen - self.tokens_seen, self.trainer.ntokens_seen
        non_data_parallel = self.trainer.parallel_dims.non_data_parallel_size
        self.write(
            kind="step",
            step=self.trainer.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            step_seconds=seconds,
            tokens_per_second=tokens / non_data_parallel / seconds,
            active_bytes=self.peaks.active_bytes,
            reserved_bytes=self.peaks.reserved_bytes,
            device_bytes=self.peaks.device_bytes,
            alloc_retries=self.peaks.alloc_retries,
            ooms=self.peaks.ooms,
            time=time.time(),
        )
        self.loss = self.grad_norm = None
        if self.trainer.step == 1:
            self.write(kind="compile", **compiler.counters())
        if self.trainer.step >= self.trainer.job_config.training.steps:
            self.write_end()

    def write_end(self) -> None:
        """The last line, once: whoever reads it need not wait for the process to end."""
        if not self.has_ended:
            self.has_ended = True
            self.write(kind="end", **compiler.counters())

    def write(self, **fields: Any) -> None:
        """One line, flushed."""
        self.file.write(json.dumps({key: json_number(value) for key, value in fields.items()}) + "\n")
        self.file.flush()


def record_training(
    trainer_class: Any, directory: Path, rank: int, failures: FailureRecorder, time_at_import: float
) -> None:
    """Wrap ``Trainer.train`` and ``train_step`` so that every step and the first exception are recorded."""
    train, train_step = trainer_class.train, trainer_class.train_step
    recorders: list[StepRecorder] = []

    @functools.wraps(train)
    def recorded_train(trainer: Any) -> None:
        try:
            recorder = StepRecorder(trainer, directory, rank)
            recorders.append(recorder)
            recorder.watch_logging()
            recorder.write_header(time_at_import, rank)
            train(trainer)
            recorder.write_end()
        except Exception as error:
            # at once: closing the trainer can block on ranks that wait for this one
            failures.write(error)
            raise

    @functools.wraps(train_step)
    def recorded_train_step(trainer: Any, *args: Any, **kwargs: Any) -> None:
        failures.step = trainer.step
        train_step(trainer, *args, **kwargs)
        recorders[-1].end_step()

    trainer_class.train = recorded_train
    trainer_class.train_step = recorded_train_step


def is_float8_linear(module: torch.nn.Module) -> bool:
    """Whether it is torchao's ``Float8Linear``, also where ``fully_shard`` has put a class over it."""
    return any(cls.__name__ == "Float8Linear" for cls in type(module).__mro__)


def json_number(value: Any) -> Any:
    """``value`` as JSON has it: floats that are not finite become their names."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
