"""``titan-tune estimate``: JSON, text, exit codes, bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from titan_tune.cli.estimate import run_estimate, sweep_values
from titan_tune.errors import InputError

JOB = """\
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 8192

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
"""


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def run(job_path: Path, *, as_json: bool = False, **options: Any) -> tuple[int, str]:
    arguments: dict[str, Any] = {
        "gpus": 8, "nodes": None, "gpus_per_node": None, "gpu": "h100-80gb", "sets": (),
        "hf_config": None, "sweep": None, "method": "formula",
    } | options  # fmt: skip
    out = io.StringIO()
    code = run_estimate(job_path, as_json=as_json, console=Console(file=out, width=120), **arguments)
    return code, out.getvalue()


def test_json_is_schema_1(job_path: Path) -> None:
    code, out = run(job_path, as_json=True)
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == 1
    assert document["torchtitan"] == "0.2.2"
    assert document["gpu"] == {"name": "h100-80gb", "capacity_gib": 79.1}
    assert (document["fits"], document["verdict"], document["method"]) == (True, "fits", "formula")
    # the same job measured on H200, one rank of eight: 47.404 active, 53.205 reserved
    assert document["peak_active_gib"] == pytest.approx(47.404, abs=0.01)
    assert document["peak_reserved_gib"] == pytest.approx(53.205, rel=0.01)
    assert sum(document["components_gib"].values()) == pytest.approx(document["peak_active_gib"], abs=0.01)
    (stage,) = document["stages"]
    assert (stage["stage"], stage["peak_active_gib"], stage["peak_phase"]) == (0, 47.404, "loss_backward")
    assert document["minimum_gpus"] == 4
    assert document["invalid"] == []


def test_a_job_that_does_not_fit_ends_with_0_and_suggestions(job_path: Path) -> None:
    code, out = run(job_path, as_json=True, sets=["training.local_batch_size=8"])
    document = json.loads(out)
    assert code == 0
    assert document["fits"] is False
    assert document["verdict"] == "does_not_fit"
    assert document["suggestions"]


def test_an_invalid_job_ends_with_3_and_says_why(job_path: Path) -> None:
    sets = ["parallelism.tensor_parallel_degree=3"]
    code, out = run(job_path, as_json=True, sets=sets)
    document = json.loads(out)
    assert code == 3
    assert document["fits"] is None
    assert document["peak_active_gib"] is None
    assert document["invalid"]
    code, out = run(job_path, sets=sets)
    assert code == 3
    assert out.startswith("invalid")


def test_text_starts_with_the_verdict(job_path: Path) -> None:
    _, out = run(job_path)
    assert out.startswith("fits  llama3 8B on 8 × h100-80gb")
    for word in ("active", "reserved", "device", "tokens/s", "4 GPUs", "loss backward"):
        assert word in out


def test_text_shows_each_pipeline_stage(job_path: Path) -> None:
    _, out = run(job_path, sets=["parallelism.pipeline_parallel_degree=4", "training.local_batch_size=8"])
    assert all(f"stage {stage}" in out for stage in range(4))


def test_pressure_is_neither_fit_nor_misfit(job_path: Path) -> None:
    code, out = run(job_path, as_json=True, gpus=2, gpu="h100-80gb", sets=["training.local_batch_size=1"])
    document = json.loads(out)
    assert code == 0
    # measured on H200: 63.5 GiB active, 81.0 reserved
    assert (document["verdict"], document["fits"]) == ("pressure", True)


def test_sweep(job_path: Path) -> None:
    code, out = run(job_path, sweep="training.local_batch_size=1,2,8")
    assert code == 0
    assert len(out.strip().splitlines()) == 4
    code, out = run(job_path, sweep="training.local_batch_size=1,2", as_json=True)
    document = json.loads(out)
    assert document["sweep"] == "training.local_batch_size"
    assert [row["value"] for row in document["rows"]] == [1, 2]
    assert document["rows"][0]["peak_active_gib"] < document["rows"][1]["peak_active_gib"]


def test_a_sweep_of_invalid_values_ends_with_3(job_path: Path) -> None:
    code, out = run(job_path, sweep="parallelism.tensor_parallel_degree=3,5")
    assert code == 3
    assert "invalid" in out


@pytest.mark.parametrize(
    "text", ["training.seq_len", "training.seq_len=", "training.seqlen=4", "training.seq_len=x"]
)
def test_bad_sweeps_are_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        sweep_values(text)
    assert "\n" not in str(caught.value)


def test_unknown_method_names_the_valid_ones(job_path: Path) -> None:
    with pytest.raises(InputError, match="methods: formula"):
        run(job_path, method="guess")


def test_layouts_beyond_the_formula_are_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "split.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
        "[training]\nlocal_batch_size = 2\nseq_len = 512\n"
        "[parallelism]\npipeline_parallel_degree = 2\n"
        'module_fqns_per_model_part = [["tok_embeddings", "layers.0"],'
        ' ["layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"]]\n'
    )
    with pytest.raises(InputError, match="module_fqns_per_model_part"):
        run(path)


def test_estimating_imports_no_torch(job_path: Path) -> None:
    program = (
        "import sys; from titan_tune.cli.app import invoke\n"
        f"code = invoke(['estimate', {str(job_path)!r}, '--gpus', '8', '--gpu', 'h200', '--json'])\n"
        "assert not {'torch', 'torchtitan', 'optuna'} & set(sys.modules), 'heavy import'\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
