"""The ``[titan_tune]`` section of a job file, for ``job.custom_config_module``.

torchtitan's ``ConfigManager`` merges ``JobConfig`` below into its own. Standard library only: this is
imported before any configuration is parsed. No ``from __future__ import annotations``: the types must
be objects, because ``ConfigManager`` copies them into a class of another module.
"""

import dataclasses
from typing import Any

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DATA_SOURCES = ("job", "synthetic")


@dataclasses.dataclass
class TitanTune:
    """What the plug-in does in a torchtitan process. The defaults change nothing."""

    compile_mode: str = "default"
    """``torch.compile``'s mode for everything that torchtitan compiles."""

    data: str = "job"
    """``job``: the dataset of ``[training]``. ``synthetic``: generated tokens, no tokenizer."""

    custom_import: str = ""
    """The job's own ``experimental.custom_import``, which the plug-in's name displaced."""

    model_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the model family's ``TransformerModelArgs``: they define the flavor named in ``[model]``."""

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("compile_mode", self.compile_mode, COMPILE_MODES),
            ("data", self.data, DATA_SOURCES),
        ):
            if value not in choices:
                raise ValueError(f"titan_tune.{key}={value!r} is not one of {', '.join(choices)}")


@dataclasses.dataclass
class JobConfig:
    """What is added to torchtitan's ``JobConfig``."""

    titan_tune: TitanTune = dataclasses.field(default_factory=TitanTune)
