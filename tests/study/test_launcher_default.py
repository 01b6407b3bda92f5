"""The launcher of local probes is a default that may change: no study is tied to it, no other runner reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.errors import InputError
from titan_tune.probe.slurm.batch import torchrun_arguments
from titan_tune.space.axes import Space
from titan_tune.space.file import load_space
from titan_tune.study.info import join, new_info
from titan_tune.study.plan import make_plan

SPACE = """
[base.model]
name = "llama3"
flavor = "debugmodel"
[base.titan_tune]
data = "synthetic"
[cluster]
gpu = "cpu"
gpus_per_node = 1
[axes]
activation_checkpoint = ["none", "full"]
"""


def space_of(folder: Path, probe: str = "") -> Space:
    path = folder / "space.toml"
    path.write_text(f"{SPACE}[probe]\n{probe}\n")
    return load_space(path)


def test_local_probes_are_preloaded_unless_the_file_says_torchrun(tmp_path: Path) -> None:
    assert space_of(tmp_path).probe.launcher == "preloaded"
    assert space_of(tmp_path, 'launcher = "torchrun"').probe.launcher == "torchrun"
    with pytest.raises(InputError, match="launcher"):
        space_of(tmp_path, 'launcher = "fork"')


@pytest.mark.parametrize("stored", ['launcher = "torchrun"', 'launcher = "preloaded"', None])
def test_a_study_that_began_with_another_launcher_goes_on(tmp_path: Path, stored: str | None) -> None:
    began = new_info(make_plan(space_of(tmp_path, stored or "")), device="cpu", environment={})
    if stored is None:  # by a version that had no launchers
        began = began.model_copy(update={"probe": {k: v for k, v in began.probe.items() if k != "launcher"}})
    study = optuna.create_study()
    join(study, began)
    for now in ("", 'launcher = "torchrun"'):
        info = new_info(make_plan(space_of(tmp_path, now)), device="cpu", environment={})
        assert join(study, info) == began
    # and the check is one that can refuse
    other = new_info(make_plan(space_of(tmp_path, "steps = 7")), device="cpu", environment={})
    with pytest.raises(InputError, match="probe data and steps"):
        join(study, other)


def test_a_job_of_slurm_is_the_same_with_every_launcher(tmp_path: Path) -> None:
    spec = ProbeSpec(
        config_id="abc",
        directory=tmp_path,
        toml="",
        nproc_per_node=2,
        device="cuda",
        settings=ProbeSettings(),
        cache_directory=tmp_path,
        tokens_per_step_per_rank=1.0,
    )
    other = replace(spec, settings=ProbeSettings(launcher="torchrun"))
    assert torchrun_arguments(spec) == torchrun_arguments(other)
    assert "torchtitan.train" in torchrun_arguments(spec)
