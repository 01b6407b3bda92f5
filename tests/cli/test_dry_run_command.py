"""``estimate --method dry-run``: what is said, refused and left behind; the runs themselves are replaced."""

from __future__ import annotations

import io
import re
import tempfile

import pytest
from rich.console import Console

from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli import dry_run as command
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError, ProbesFailedError
from titan_tune.machine import cpu_spec
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve

JOB = '[model]\nname = "llama3"\nflavor = "{}"\n[training]\nseq_len = {}\nlocal_batch_size = 1\n'
H100S = ClusterSpec(gpu=gpu_spec("h100-80gb"), num_nodes=8, gpus_per_node=8)


def processor(gib: float) -> ClusterSpec:
    return ClusterSpec(gpu=cpu_spec(2).model_copy(update={"memory_gib": gib / 2}), gpus_per_node=2)


def said(flavor: str, seq_len: int, gib: float) -> str:
    return command.on_a_processor(
        resolve(job_from_text(JOB.format(flavor, seq_len), name="job"), H100S), processor(gib)
    )


def test_a_job_that_the_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"needs 2\d\.\d GiB of memory or more, of which 16\.0 GiB is free: use"
    ):
        said("70B", 512, 16.0)
    assert "GiB of memory or more" in said("debugmodel", 512, 16.0)


def test_a_job_that_takes_longer_than_a_dry_run_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes \d h \d\d min or more, and a dry run has 20 min 00 s"):
        said("8B", 8192, 1000.0)
    assert re.match(r"on a processor, \d+ s to \d+ s and 0\.\d GiB", said("debugmodel", 512, 16.0))


def test_what_no_formula_covers_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_covered(settings: object) -> None:
        raise command.NotCoveredError("no")

    monkeypatch.setattr(command, "estimate_memory", not_covered)
    assert said("8B", 8192, 1.0).startswith("on a processor, many minutes or hours")


@pytest.mark.parametrize(("raised", "kept"), [(KeyboardInterrupt, 0), (OSError, 0), (ProbesFailedError, 1)])
def test_the_folder_is_kept_only_for_a_log_that_is_named(tmp_path, monkeypatch, raised, kept) -> None:
    def broken(*arguments: object) -> None:
        raise raised("no launcher")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(command, "_run", broken)
    monkeypatch.setattr(command, "interrupt_on_terminate", lambda: None)
    monkeypatch.setattr(command, "local_cluster", lambda: processor(16.0))
    job = job_from_text(JOB.format("debugmodel", 512), name="job")
    with pytest.raises(raised) as error:
        command.dry_run_answer(job, H100S, Console(file=io.StringIO()))
    folders = list(tmp_path.iterdir())
    assert len(folders) == kept
    assert all(str(folder) in str(error.value) for folder in folders)
