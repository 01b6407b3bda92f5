"""The body of a torchtitan 0.3.0 config function that does what a torchtitan 0.2.2 job does."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from titan_tune.catalog.typed import show
from titan_tune.domain.candidate import Value
from titan_tune.errors import InputError
from titan_tune.titan.job import Job
from titan_tune.titan.keys import defaults
from titan_tune.titan.recipe_keys import (
    VERSION,
    WEIGHTY,
    field_of,
    fields,
    flavor_of,
    gone,
    is_special,
    linear_names,
    renamed_filters,
)
from titan_tune.titan.recipe_model import model_lines, quantization_lines
from titan_tune.titan.recipe_text import Recipe, literal, remark

AC = "activation_checkpoint"
OPTIMIZER = ("optimizer.name", "optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps",
             "optimizer.weight_decay")  # fmt: skip
LOSS_CHUNKS = 8
"""0.3.0's default ``loss.num_chunks``, which has to divide the tokens of a sequence on each rank."""


def build(job: Job, *, chosen: Collection[str] = (), world_size: int) -> Recipe:
    """The recipe of a job on ``world_size`` ranks; ``chosen`` are the keys that a search set.

    Raises:
        InputError: the model, or its combination with the layout, does not exist in torchtitan 0.3.0.
    """
    return _Builder(job, frozenset(chosen), world_size).build()


class _Builder:
    """Collects statements: what the search chose, and what the job says."""

    def __init__(self, job: Job, chosen: frozenset[str], world_size: int) -> None:
        self.job = job
        self.chosen = chosen
        self.values = job.resolved()
        self.flavor = flavor_of(job)
        slug = re.sub("[^a-z0-9]+", "_", job.model.flavor.lower()).strip("_") or "model"
        shown = slug if self.flavor.custom else self.flavor.name
        self.recipe = Recipe(f"{job.model.name}_{slug}_tuned", f"{job.model.name} {shown}")
        self.names = linear_names(self.flavor, job.model.n_layers)
        self.tp = self.values["parallelism.tensor_parallel_degree"]
        self.pp = self.values["parallelism.pipeline_parallel_degree"]
        self.cp = self.values["parallelism.context_parallel_degree"]
        self.ep = self.values["parallelism.expert_parallel_degree"] if job.model.moe else 1
        self.replicate = self.values["parallelism.data_parallel_replicate_degree"]
        shard = self.values["parallelism.data_parallel_shard_degree"]
        self.shard = (
            shard if shard > 0 else max(1, world_size // (self.replicate * self.tp * self.pp * self.cp))
        )
        self.compiled = self.values["compile.enable"] and "model" in self.values["compile.components"]
        self.changed = [
            key for key, value in self.values.items() if key in chosen or value != defaults()[key]
        ]
        """Keys that are not at 0.2.2's default, or that the search set."""
        self.said: set[str] = set()
        """Keys that a statement stands for."""
        self.picked: list[str] = []
        self.own: list[str] = []

    def build(self) -> Recipe:
        """All of it."""
        if self.pp > 1 and self.flavor.entry["tied"]:
            raise InputError(
                f"{self.job.name}: parallelism.pipeline_parallel_degree = {self.pp}: torchtitan {VERSION} has no "
                f"pipelines for tied embeddings ({self.job.model.name} {self.job.model.flavor}); it takes: 1"
            )
        recipe = self.recipe
        recipe.use("torchtitan.trainer", "Trainer")
        recipe.body += model_lines(recipe, self.job, self.flavor)
        self.expert_backend()
        recipe.body += quantization_lines(recipe, self.job, self.flavor, self.names, compiled=self.compiled)
        self.said.update(("model.name", "model.flavor", "model.converters"))
        self.said.update(key for key in self.values if key.startswith("quantize."))
        self.activation_checkpoint()
        self.plain_fields()
        self.cuda_graphs()
        self.loss()
        self.optimizer()
        absent = [f"# {self.absent(key)}" for key in self.changed if key not in self.said]
        for title, lines in (
            ("chosen by the search", self.picked),
            ("the job's own; what it leaves out has torchtitan 0.2.2's default", self.own),
            (f"no field in torchtitan {VERSION}", absent),
        ):
            if lines:
                recipe.body += ["", f"# {title}", *lines]
        recipe.body += ["", "return c"]
        recipe.differences += self.differences()
        return recipe

    def add(self, code: str, *, keys: Collection[str], note: str = "") -> None:
        """A statement for some of the job's keys; those that the code does not show are named beside it."""
        named = ", ".join(key for key in keys if key in self.changed and f"c.{key} " not in code)
        self.said.update(keys)
        self.section(keys).append(remark(code, "; ".join(filter(None, (named, note)))))

    def section(self, keys: Collection[str]) -> list[str]:
        """Where the statement for some keys goes."""
        return self.picked if self.chosen.intersection(keys) else self.own

    def absent(self, key: str) -> str:
        """What to say of a key that no statement stands for."""
        value = show(self.values[key])
        if is_special(key):
            return f"no effect here: {key} = {value}"
        if key == "parallelism.enable_async_tensor_parallel":
            return f"no effect without a compiled model: {key} = {value}"
        if key.startswith(WEIGHTY):
            self.recipe.lost.append(f"{key} = {value}: {gone(key)}")
        return f"gone in 0.3: {key} = {value}: {gone(key)}"

    def expert_backend(self) -> None:
        """``parallelism.expert_parallel_comm_backend``, which the model's registry takes."""
        key = "parallelism.expert_parallel_comm_backend"
        if key in self.changed:
            self.said.add(key)
            effect = "" if self.ep > 1 else "; no effect without expert parallelism"
            self.recipe.body.append(f"# {key} = {show(self.values[key])}{effect}")

    def plain_fields(self) -> None:
        """Keys that are one field."""
        for key, value in self.values.items():
            name = field_of(key)
            if name is None or key == "optimizer.implementation":
                continue
            if key == "parallelism.enable_async_tensor_parallel" and not self.compiled:
                continue
            fresh = fields()["defaults"][name]
            start = self.flavor.entry["base"].get(name, fresh)
            own_default = value == defaults()[key] and start == fresh
            if key in self.changed or (value != start and not own_default):
                self.add(f"c.{name} = {literal(self.carried(key, value))}", keys=[key], note=self.note(key))

    def carried(self, key: str, value: Value) -> Value:
        """A value with 0.3.0's names in it."""
        if key == "parallelism.module_fqns_per_model_part" and value:
            return [["lm_head" if name == "output" else name for name in part] for part in value]
        return value

    def note(self, key: str) -> str:
        """What to know about one field."""
        value = self.values[key]
        if key == "training.global_batch_size":
            ranks, local = self.replicate * self.shard, self.values["training.local_batch_size"]
            if value > 0 and value % (ranks * local) == 0:
                steps = value // (ranks * local)
                return f"{local} x {ranks} data-parallel rank(s) x {steps} accumulation step(s)"
        if key in ("training.dataset", "validation.dataset") and value not in fields()["datasets"]:
            return f"{VERSION} itself has {', '.join(fields()['datasets'])}; give c.dataloader a class of your own"
        return ""

    def activation_checkpoint(self) -> None:
        """The class of ``activation_checkpoint.mode`` with its options."""
        mode, option = self.values[f"{AC}.mode"], self.values[f"{AC}.selective_ac_option"]
        every = 0 if option == "op" else int(option)
        keys = [f"{AC}.mode"]
        note = ""
        if mode == "none":
            self.add("c.activation_checkpoint = None", keys=keys)
            return
        options = ["preserve_rng_state", "determinism_check", "debug"]
        if mode == "full":
            name = "FullAC"
        elif mode == "memory_budget":
            name = "MemoryBudgetAC"
            options += ["memory_budget", "visualize_memory_budget_pareto"]
        elif option != "op" and every < 2:
            name, note = "FullAC", "every layer"
            keys.append(f"{AC}.selective_ac_option")
        else:
            name = "SelectiveAC"
            keys.append(f"{AC}.selective_ac_option")
            if option == "op":
                options.append("per_op_sac_force_recompute_mm_shapes_by_fqns")
                self.recipe.differences.append(
                    "selective activation checkpointing keeps wqkv, w1 and w2 of a dense layer; 0.2.2 kept wq, wv, w1"
                    " and w2"
                )
            else:
                note = f"not every layer {option}: that is gone in 0.3"
                self.recipe.lost.append(
                    f"{AC}.selective_ac_option = {show(option)} (whole layers, one in {every}): {VERSION} has"
                    " selective checkpointing by operation only, with other memory and speed"
                )
        arguments = []
        for option_name in options:
            key = f"{AC}.{option_name}"
            value = self.values[key]
            if value == defaults()[key] and key not in self.chosen and option_name != "memory_budget":
                continue
            keys.append(key)
            if option_name.startswith("per_op_sac_"):
                value = renamed_filters(value, self.names)
            arguments.append(f"{option_name.removeprefix('per_op_sac_')}={literal(value)}")
        self.recipe.use("torchtitan.distributed.activation_checkpoint", name)
        code = f"c.activation_checkpoint = {name}.Config({', '.join(arguments)})"
        self.add(code, keys=keys, note=note)

    def cuda_graphs(self) -> None:
        """Off where 0.3.0 takes none."""
        name = "training.disable_cuda_graphs"
        attention = self.flavor.attention or self.flavor.default_attention
        reasons = {
            "pipeline parallelism": self.pp > 1,
            "expert parallelism": self.ep > 1,
            "varlen attention": attention == "varlen",
        }
        why = [reason for reason, holds in reasons.items() if holds]
        if why:
            self.own.append(f"c.{name} = True  # {VERSION} captures none with {' and '.join(why)}")
        elif not self.flavor.entry["base"].get(name, False):
            self.recipe.differences.append(
                f"CUDA graphs are on: gradients stay allocated between steps; c.{name} = True turns them off"
            )

    def loss(self) -> None:
        """Fewer chunks where 0.3.0's eight do not divide a sequence."""
        local = self.values["training.seq_len"] // self.cp
        chunks = math.gcd(local, LOSS_CHUNKS)
        if chunks != LOSS_CHUNKS:
            self.own.append(
                f"c.loss.num_chunks = {chunks}  # {LOSS_CHUNKS} chunks do not divide the {local} tokens of a rank"
            )
        self.recipe.differences.append(
            f"the loss is computed in {chunks} chunk(s): less memory for logits, an fp32 gradient of the hidden state"
        )

    def optimizer(self) -> None:
        """One group of all parameters, as in 0.2.2."""
        module = "torchtitan.components.optimizer"
        name, lr, beta1, beta2, eps, decay = (literal(self.values[key]) for key in OPTIMIZER)
        keys = [key for key in (*OPTIMIZER, "optimizer.implementation") if key in self.changed]
        if self.values["optimizer.name"] == "AdamW":
            self.recipe.use(module, "default_adamw")
            code = f"default_adamw(lr={lr}, betas=({beta1}, {beta2}), eps={eps}, weight_decay={decay})"
        else:
            self.recipe.use(module, "OptimizersContainer", "ParamGroupConfig")
            settings = f'{{"lr": {lr}, "betas": ({beta1}, {beta2}), "eps": {eps}, "weight_decay": {decay}}}'
            group = f'ParamGroupConfig(pattern=r".*", optimizer_name={name}, optimizer_kwargs={settings})'
            code = f"OptimizersContainer.Config(param_groups=[{group}])"
        lines = self.section(keys)
        lines.append(remark(f"c.optimizer = {code}", ", ".join(keys)))
        implementation = self.values["optimizer.implementation"]
        if implementation != fields()["defaults"]["optimizer.implementation"]:
            lines.append(f"c.optimizer.implementation = {literal(implementation)}")
        self.said.update(keys)

    def differences(self) -> list[str]:
        """What 0.3.0 does otherwise with this layout and model."""
        found = ["every model is fully sharded: no DDP and no autocast"]
        halves = self.values["training.mixed_precision_param"] == "bfloat16"
        if self.shard * self.cp == 1:
            if self.replicate > 1:
                found.append("data_parallel_replicate_degree was DDP; here it is HSDP with one rank a shard")
            elif (self.tp > 1 or self.pp > 1) and self.values["training.dtype"] == "float32" and halves:
                found.append("tensor and pipeline parallelism alone computed in float32; here in bfloat16")
        if self.job.model.attention == "sdpa":
            found.append(
                "attention is FlexAttention, always compiled, with a mask by document; scaled-dot-product attention, as"
                " measured, is no choice there"
            )
        if self.pp > 1:
            found.append("the first step of a pipeline runs one more forward and backward")
        return found
