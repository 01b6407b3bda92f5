"""The code that runs inside a torchtitan process (``experimental.custom_import = "titan_tune.titan.plugin"``).

A job that also names ``titan_tune.titan.plugin.config`` in ``job.custom_config_module`` makes torchtitan
import this package while it parses the configuration; the later import by ``Trainer.__init__`` then runs
nothing. So the package arms itself at its first import, in a torchtitan training process only: importing
it anywhere else has no effect and needs no torch.
"""

from __future__ import annotations

import sys


def _arm_in_training_process() -> None:
    trainer_class = getattr(sys.modules.get("__main__"), "Trainer", None)
    if "torchtitan.config" not in sys.modules or not hasattr(trainer_class, "init_distributed"):
        return
    from titan_tune.titan.plugin.install import arm

    arm(trainer_class)


_arm_in_training_process()
