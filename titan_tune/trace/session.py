"""Everything that happens once per child process, and one trace per depth. Child process only."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_tune.domain.candidate import Value
from titan_tune.trace import environment, jobconfig
from titan_tune.trace.events import Event
from titan_tune.trace.recorder import Recorder


class Session:
    """One job on one rank of ``world_size``."""

    def __init__(
        self, values: Mapping[str, Value], model_args: Mapping[str, Any], *, world_size: int, rank: int
    ) -> None:
        self.recorder = Recorder()
        environment.start(self.recorder, world_size=world_size, rank=rank)
        logging.disable(logging.WARNING)
        from titan_tune.trace import compiled, experts, kernels, pipeline, trainer

        inner = kernels.InnerAllocations(self.recorder)
        kernels.install()
        experts.install()
        compiled.install(inner)
        self._trainer = trainer
        self._inner = inner
        self._model_args = model_args
        self.values = values
        self.config = jobconfig.job_config(values)
        if self.config.training.enable_cpu_offload:
            raise NotImplementedError(
                "training.enable_cpu_offload is not traced: every fake tensor is on one device"
            )
        self.dims = trainer.parallel_dims(self.config)
        args = jobconfig.train_spec(self.config, model_args, None)[1]
        self.num_layers: int = args.n_layers
        if self.dims.pp_enabled:
            pipeline.install(self.config, self.dims, args)
        self.stages: tuple[int, ...] = (0,)
        self.torch_version: str = torch.__version__

    @property
    def layer_period(self) -> int:
        """Layers after which the model repeats itself; 0 where depth cannot be extrapolated."""
        if self.dims.pp_enabled:
            return 0
        ac, period = self.config.activation_checkpoint, 1
        if ac.mode == "selective" and ac.selective_ac_option != "op":
            period = max(1, int(ac.selective_ac_option))
        args = jobconfig.train_spec(self.config, self._model_args, None)[1]
        return math.lcm(period, getattr(args, "interleave_moe_layer_step", 1))

    @property
    def special_layers(self) -> int:
        """Leading layers that differ from the others (dense ones of a MoE model)."""
        args = jobconfig.train_spec(self.config, self._model_args, None)[1]
        return int(getattr(args, "n_dense_layers", 0))

    def events(self, layers: int) -> list[Event]:
        """Trace two steps of the model with so many layers."""
        from torchtitan.distributed import activation_checkpoint

        from titan_tune.trace.components import classifier

        gc.collect()
        self.recorder.reset()
        self._inner.reset()
        self.recorder.on_operator = self._inner
        activation_checkpoint._layer_sac_count = 0
        spec, args = jobconfig.train_spec(self.config, self._model_args, layers)
        trainer = self._trainer.TracedTrainer(self.config, spec, args, self.dims, self.recorder)
        trainer.build()
        # the model's meta tensors are no fakes; they only lend their shapes
        with FakeTensorMode(allow_non_fake_inputs=True):
            trainer.materialize()
            trainer.run()
        self.stages = trainer.stages
        return self.recorder.events(classifier(trainer, self.recorder))

    def assumptions(self) -> tuple[str, ...]:
        """What the trace takes for granted, one sentence each."""
        from titan_tune.trace.assumptions import assumptions

        args = jobconfig.train_spec(self.config, self._model_args, None)[1]
        return assumptions(self.config, args, self.dims, self.torch_version, self.values)
