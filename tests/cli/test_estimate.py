"""``titan-tune estimate`` as a user runs it: text, JSON, sweep, accounting, page, methods."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli import run
from titan_tune.cli.estimate import run_estimate
from titan_tune.cli.target import cluster_from
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError

JOB = """\
[model]
name = "llama3"
flavor = "70B"

[training]
local_batch_size = 1
seq_len = 8192

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
"""
CPU_MACHINE = ClusterSpec(
    gpu=gpu_spec("h200").model_copy(update={"name": "cpu", "is_cpu": True}), gpus_per_node=2
)
NUMBER = (int, float)
COMPONENTS = {
    "parameters", "gradients", "optimizer", "activations", "attention_scores", "logits_loss",
    "gathered_parameters", "other",
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "schema": int,
    "torchtitan": str,
    "world_size": int,
    "gpu": {"name": str, "capacity_gib": NUMBER},
    "method": str,
    "fits": bool,
    "verdict": str,
    "peak_active_gib": NUMBER,
    "peak_active_interval_gib": [NUMBER],
    "peak_reserved_gib": NUMBER,
    "device_used_gib": NUMBER,
    "peak_phase": str,
    "worst_stage": int,
    "components_gib": dict.fromkeys(COMPONENTS, NUMBER),
    "stages": [{"stage": int, "peak_active_gib": NUMBER, "peak_reserved_gib": NUMBER, "peak_phase": str}],
    "step_time": {"seconds": NUMBER, "tokens_per_second_per_gpu": NUMBER, "interval": [NUMBER]},
    "advice_method": (str, type(None)),
    "minimum_gpus": (int, type(None)),
    "minimum_gpus_under_pressure": (int, type(None)),
    "warnings": [{"rule": str, "message": str, "fix": str}],
    "invalid": [{"rule": str, "message": str, "fix": str}],
    "suggestions": [
        {
            "values": dict, "gpus": int, "gpus_per_node": int, "global_batch_size": int, "verdict": str,
            "peak_active_gib": NUMBER, "device_used_gib": NUMBER, "tokens_per_second_per_gpu": NUMBER,
            "changes_numerics": bool, "host_gib_per_node": (*NUMBER, type(None)), "warnings": [str],
        }
    ],
    "assumptions": [str],
}  # fmt: skip
"""Scripts rely on it; keys may be added, never renamed or dropped."""
FIGURES = [
    "fits", "verdict", "peak_active_gib", "peak_active_interval_gib", "peak_reserved_gib", "device_used_gib",
    "peak_phase", "worst_stage", "components_gib", "stages", "step_time", "advice_method", "minimum_gpus",
    "minimum_gpus_under_pressure",
]  # fmt: skip


@pytest.fixture
def job_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def check(value: Any, schema: Any, where: str = "") -> None:
    """``value`` has exactly the shape of ``schema``."""
    if isinstance(schema, dict):
        assert isinstance(value, dict) and set(value) == set(schema), where
        for key, inner in schema.items():
            check(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for item in value:
            check(item, schema[0], f"{where}[]")
    else:
        assert isinstance(value, schema), f"{where}: {value!r}"
        if isinstance(value, bool):
            assert schema is bool, where


def ask(job_path: Path, capsys: pytest.CaptureFixture[str], *more: str, gpu: str = "h100-80gb") -> Any:
    code = run(["estimate", str(job_path), "--gpus", "8", "--gpu", gpu, "--json", *more])
    captured = capsys.readouterr()
    return code, json.loads(captured.out)


def call(job_path: Path, **options: Any) -> tuple[int, str]:
    """The command below the argument parser."""
    arguments: dict[str, Any] = {
        "gpus": 8, "nodes": None, "gpus_per_node": None, "gpu": "h100-80gb", "sets": (), "hf_config": None,
        "sweep": None, "method": "formula", "as_json": False,
    } | options  # fmt: skip
    out = io.StringIO()
    code = run_estimate(job_path, console=Console(file=out, width=120), **arguments)
    return code, out.getvalue()


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["--set", "activation_checkpoint.mode=full"],
        ["--set", "parallelism.pipeline_parallel_degree=2", "--set", "training.local_batch_size=4"],
        ["--set", "parallelism.tensor_parallel_degree=8"],
    ],
    ids=["does-not-fit", "full", "pipeline", "tp"],
)
def test_json_has_its_schema(job_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str]) -> None:
    code, document = ask(job_path, capsys, *sets)
    assert code == 0
    check(document, SCHEMA)
    assert document["schema"] == 1
    assert document["fits"] is (document["verdict"] != "does_not_fit")
    low, high = document["peak_active_interval_gib"]
    assert low <= document["peak_active_gib"] <= high
    assert document["peak_reserved_gib"] >= document["peak_active_gib"]
    worst = next(s for s in document["stages"] if s["stage"] == document["worst_stage"])
    assert worst["peak_active_gib"] == document["peak_active_gib"]
    total = sum(document["components_gib"].values())
    assert total == pytest.approx(document["peak_active_gib"], abs=0.01)


def test_json_of_an_invalid_job_has_the_same_keys(job_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = ask(job_path, capsys, "--set", "parallelism.tensor_parallel_degree=3")
    assert code == 3
    assert set(document) == set(SCHEMA)
    assert all(document[name] is None for name in FIGURES)
    check(document["invalid"], SCHEMA["invalid"])
    assert document["invalid"]


def test_70b_on_eight_80_gb_gpus_says_what_it_takes(
    job_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, document = ask(job_path, capsys)
    assert document["verdict"] == "does_not_fit"
    # op AC: the activations of 80 layers nearly fill the card
    assert (document["minimum_gpus"], document["minimum_gpus_under_pressure"]) == (None, 1024)
    same = [s for s in document["suggestions"] if s["gpus"] == 8 and not s["changes_numerics"]]
    more = [s for s in document["suggestions"] if s["gpus"] > 8]
    assert same and all(s["values"]["training.enable_cpu_offload"] is True for s in same)
    assert any(s["values"] == {"activation_checkpoint.mode": "full"} and s["verdict"] == "fits" for s in more)
    assert all(s["peak_active_gib"] < document["gpu"]["capacity_gib"] for s in document["suggestions"])
    # the job leaves the shard degree to torchtitan, so only the number of GPUs says it
    assert all("parallelism.data_parallel_shard_degree" not in s["values"] for s in more)

    assert run(["estimate", str(job_path), "--gpus", "8", "--gpu", "h100-80gb"]) == 0
    text = capsys.readouterr().out
    first, rest = text.split("\n", 1)
    assert first.startswith("does not fit  llama3 70B on 8 × h100-80gb: a GPU needs 176.8 GiB")
    assert "as it is    1024 GPUs, under pressure; without it no number is enough: on 4096 GPUs" in rest
    assert 'on 32 GPUs  activation_checkpoint.mode = "full"' in rest


def test_a_shard_degree_that_the_job_names_is_suggested_by_name(
    job_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, document = ask(job_path, capsys, "--set", "parallelism.data_parallel_shard_degree=8")
    more = [s for s in document["suggestions"] if s["gpus"] > 8]
    assert more
    for suggestion in more:
        values = suggestion["values"]
        shards = values.get("parallelism.data_parallel_shard_degree", 8)
        others = values.get("parallelism.tensor_parallel_degree", 1)
        assert shards * others == suggestion["gpus"]
    assert any("parallelism.data_parallel_shard_degree" in s["values"] for s in more)


def test_sweep_is_a_row_for_each_value(job_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = ask(job_path, capsys, "--sweep", "training.seq_len=4096,8192,16384")
    assert code == 0
    assert [row["value"] for row in document["rows"]] == [4096, 8192, 16384]
    active = [row["peak_active_gib"] for row in document["rows"]]
    assert active == sorted(active) and len(set(active)) == 3
    for row in document["rows"]:
        row.pop("value")
        check(row, SCHEMA)


def test_a_sweep_has_the_minimum_of_each_value(job_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "model.flavor=8B"]
    _, document = ask(job_path, capsys, *sets, "--sweep", "training.local_batch_size=1,2")
    for row in document["rows"]:
        value = f"training.local_batch_size={row['value']}"
        _, alone = ask(job_path, capsys, *sets, "--set", value)
        assert row["minimum_gpus"] == alone["minimum_gpus"] is not None


def test_accounting_in_json_and_text(job_path: Path) -> None:
    _, out = call(job_path, accounting=True, as_json=True)
    found = json.loads(out)["accounting"]
    quoted = {c["component"]: c["total_gb"] for c in found["quoted"]["components"]}
    assert quoted == {"parameters": 140.0, "gradients": 140.0, "optimizer": 420.0}
    assert found["quoted"]["total_gb"] == 700.0
    assert found["held"]["total_gb"] == pytest.approx(16 * found["parameters"] / 1e9, rel=1e-3)
    assert found["held"]["rank_gb"] == pytest.approx(found["held"]["total_gb"] / 8, rel=1e-3)
    _, text = call(job_path, accounting=True)
    for words in ("140.0", "420.0", "700.0", "1,128.9", "141.1", "2 bytes each"):
        assert words in text


def test_page_is_written_beside_the_answer(job_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "memory.html"
    code, text = call(job_path, html=page)
    assert code == 0
    assert text.startswith("does not fit") and str(page) in text
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") and "175.2 GiB" in html
    code, out = call(job_path, html=page, as_json=True)
    assert json.loads(out)["verdict"] == "does_not_fit"


def test_page_replaces_only_a_page(job_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--html: .*job.toml exists and was not written by titan-tune; --force"
    ):
        call(job_path, html=job_path)
    assert job_path.read_text() == JOB
    page = tmp_path / "memory.html"
    page.write_text("<!doctype html>")
    call(job_path, html=page, force=True)
    first = page.read_text(encoding="utf-8")
    call(job_path, html=page, sets=["training.seq_len=4096"])
    assert page.read_text(encoding="utf-8") != first
    arguments = ["estimate", str(job_path), "--gpus", "8", "--gpu", "h200", "--html", str(job_path)]
    assert run(arguments) == 2
    assert job_path.read_text() == JOB
    assert run([*arguments, "--force"]) == 0


def test_a_page_is_no_device(job_path: Path) -> None:
    with pytest.raises(InputError, match="--html: /dev/null is not an ordinary file"):
        call(job_path, html=Path("/dev/null"), force=True)


def test_page_of_an_invalid_job(job_path: Path, tmp_path: Path) -> None:
    page = tmp_path / "memory.html"
    code, _ = call(job_path, html=page, sets=["parallelism.tensor_parallel_degree=3"], accounting=True)
    assert code == 3
    assert "invalid" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "trase"}, ["--method", "trase", "did you mean trace", "formula, trace"]),
        ({"sweep": "training.seq_len=1,2", "html": Path("x.html")}, ["--sweep", "--html"]),
        ({"sweep": "training.seq_len=1,2", "accounting": True}, ["--sweep", "--accounting"]),
        ({"html": Path()}, ["--html", "folder"]),
    ],
)
def test_bad_options_are_one_line(job_path: Path, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        call(job_path, **options)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_tracing_without_torchtitan_names_the_extra(
    job_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["estimate", str(job_path), "--gpus", "8", "--gpu", "h200", "--method", "trace"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert "torch and torchtitan" in line and "titan-tune[probe]" in line


SMALL = """\
[model]
name = "{name}"
flavor = "debugmodel"
[training]
local_batch_size = 4
seq_len = 512
"""


@pytest.mark.torchtitan
def test_trace_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(SMALL.format(name="llama3"))
    page = tmp_path / "memory.html"
    code, out = call(path, gpus=2, gpu="h200", method="trace", as_json=True, html=page)
    document = json.loads(out)
    (trace,) = document.pop("traces")
    check(document, SCHEMA)
    assert (code, document["method"], document["fits"]) == (0, "trace", True)
    assert trace["phases_gib"] and trace["torch"]
    assert document["advice_method"] == "formula"
    assert any(sentence.startswith("speed, minimum GPUs and sug") for sentence in document["assumptions"])
    assert any(sentence.startswith("attention:") for sentence in document["assumptions"])
    assert 'id="timeline"' in page.read_text(encoding="utf-8")
    assert "tracing two steps of one rank" in capfd.readouterr().err


@pytest.mark.torchtitan
def test_what_only_torchtitan_refuses_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(SMALL.format(name="llama3") + "[parallelism]\ndata_parallel_shard_degree = 2\n")
    with pytest.raises(InputError, match=r"--method trace: .*cpu_offload") as caught:
        call(path, gpus=2, gpu="h200", method="trace", sets=["training.enable_cpu_offload=true"])
    assert "\n" not in str(caught.value)


def test_every_catalogue_gpu_gives_an_answer(job_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = []
    for gpu in ("a100-40gb", "h100-80gb", "h200", "b200", "mi300x"):
        _, document = ask(job_path, capsys, "--set", "activation_checkpoint.mode=full", gpu=gpu)
        needed.append((gpu_spec(gpu).memory_gib, document["minimum_gpus"]))
    fewest = [gpus for _, gpus in sorted(needed)]
    assert fewest == sorted(fewest, reverse=True)


def test_minimum_gpus_hold_all_expert_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nname = "qwen3"\nflavor = "30B-A3B"\n[training]\nlocal_batch_size = 1\nseq_len = 2048\n'
        '[activation_checkpoint]\nmode = "full"\n[parallelism]\nexpert_parallel_degree = 8\n'
    )
    _, document = ask(path, capsys, gpu="mi300x")
    assert document["minimum_gpus"] == 8


@pytest.mark.parametrize(("flags", "world_size"), [([], 8), (["--nodes", "2"], 16)])
def test_gpus_that_the_machine_does_not_have_come_in_nodes_of_eight(
    job_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flags: list[str], world_size: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("titan_tune.cli.estimate.local_cluster", lambda: CPU_MACHINE)
    assert run(["estimate", str(job_path), "--gpu", "h200", "--json", *flags]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["world_size"] == world_size
    assert captured.err == "8 GPUs a node assumed; --gpus or --gpus-per-node say otherwise\n"


def test_a_machine_with_gpus_says_how_many_a_node_has(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=4)
    found = cluster_from(machine, gpus=None, nodes=2, gpus_per_node=None, gpu="h100-80gb")
    assert (found.num_nodes, found.gpus_per_node) == (2, 4)
    assert capsys.readouterr().err == ""


def test_more_ranks_than_any_job_has_are_refused() -> None:
    with pytest.raises(InputError, match="1600000 GPUs; at most 131072"):
        cluster_from(CPU_MACHINE, gpus=None, nodes=200_000, gpus_per_node=None, gpu="h200")


@pytest.mark.parametrize("key", ["local_batch_size", "global_batch_size", "seq_len"])
def test_sizes_beyond_all_jobs_are_one_line(
    job_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    arguments = ["--gpus", "8", "--gpu", "h200", "--set", f"training.{key}=99999999999999999999"]
    assert run(["estimate", str(job_path), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"training.{key} = 99999999999999999999: must be a whole number from 1 to" in line
