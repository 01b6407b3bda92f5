"""``search``: runners, slots, screening and locks, with replayed probes in place of processes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli import run
from titan_tune.cli import search as command
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import Measurement, Origin, ProbeOutcome, ProbeStatus, RankMemory
from titan_tune.errors import InputError
from titan_tune.machine import cpu_spec
from titan_tune.probe import factory
from titan_tune.probe.replay import ReplayRunner
from titan_tune.probe.slots import SlicedRunner, device_slices
from titan_tune.study import search as search_module
from titan_tune.study.open import open_study

SPACE = """
[base.model]
name = "llama3"
flavor = "8B"
[base.training]
seq_len = 4096
local_batch_size = 1
[cluster]
gpu = "h200"
num_nodes = {nodes}
gpus_per_node = 8
[axes]
activation_checkpoint = ["selective-2", "full"]
local_batch_size = [1, 2]
[budget]
max_probes = 6
[probe]
finalists = 1
"""


def measured(speed: float, origin: Origin) -> ProbeOutcome:
    memory = (RankMemory(0, 1, 1, 1),)
    return ProbeOutcome(
        ProbeStatus.COMPLETED, "", 20.0,
        Measurement(
            speed, (0.99 * speed, 1.01 * speed), 1.0, 10, 2, False, 9.0, (2.0, 1.9), memory, 0, "cuda", origin
        ),
    )  # fmt: skip


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_module, "POLL_SECONDS", 0.0)
    (tmp_path / "space.toml").write_text(SPACE.format(nodes=2))
    return tmp_path


@pytest.fixture
def replayed(monkeypatch):
    """``slurm`` and ``dry-run`` answer at once; what each of them was asked."""
    asked = {"slurm": [], "dry-run": []}

    def speed(spec):
        return 5000.0 + int(spec.config_id[:4], 16) % 1000

    def runner(name, origin):
        def make(request):
            made = ReplayRunner(lambda spec: measured(speed(spec), origin))
            made.name = name
            asked[name].append(SimpleNamespace(request=request, started=made.started))
            return made

        return make

    monkeypatch.setitem(factory.RUNNERS, "slurm", runner("slurm", Origin.MEASURED))
    monkeypatch.setitem(factory.RUNNERS, "dry-run", runner("dry-run", Origin.DRY_RUN))
    return asked


def last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--runner", "slrum"], ["--runner: 'slrum' is not one of: local", "did you mean slurm?"]),
        (["--on-interrupt", "stay"], ["--on-interrupt: 'stay' is not one of: ask, leave, cancel"]),
        (["--screen", "wet-run"], ["--screen: 'wet-run' is not one of: none, dry-run"]),
        (["--runner", "local"], ["--runner local runs on one node, the job asks for 2"]),
    ],
)
def test_bad_options_are_one_line(space, capsys, arguments, words):
    assert run(["search", "space.toml", *arguments]) == 2
    line = last_line(capsys)
    assert all(word in line for word in words)


def test_the_file_says_where_probes_run_unless_the_command_does(space, capsys, replayed):
    text = (space / "space.toml").read_text()
    (space / "space.toml").write_text(text + 'runner = "slurm"\n')
    assert run(["search", "space.toml"]) == 0
    assert len(replayed["slurm"]) == 1 and not replayed["dry-run"]
    assert run(["search", "space.toml", "--study", "dry", "--runner", "dry-run"]) == 0
    assert len(replayed["slurm"]) == 1 and len(replayed["dry-run"]) == 1


def test_a_second_ctrl_c_says_that_everything_is_saved(space, capsys, replayed, monkeypatch):
    def interrupted(search):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module.Search, "run", interrupted)
    assert run(["search", "space.toml", "--runner", "slurm"]) == 130
    line = last_line(capsys)
    assert f"saved in {space / 'runs' / 'space'}; the same command resumes" in line
    monkeypatch.setattr("titan_tune.study.plan.make_plan", interrupted)
    assert run(["search", "space.toml", "--study", "other", "--plan"]) == 130
    assert last_line(capsys) == "titan-tune: interrupted"


def test_a_storage_that_does_not_answer_leaves_no_folder(space, capsys, replayed):
    url = "postgresql://u:secret@127.0.0.1:1/x"
    assert run(["search", "space.toml", "--runner", "slurm", "--storage", url]) == 2
    assert "127.0.0.1:1/x" in last_line(capsys)
    assert not (space / "runs").exists()


def test_a_renamed_study_goes_on_and_is_reported(space, capsys, replayed):
    assert run(["search", "space.toml", "--runner", "slurm", "--study", "one"]) == 0
    (space / "runs" / "one").rename(space / "runs" / "two")
    assert run(["report", "two", "-o", "pages"]) == 0
    assert (space / "pages" / "two.html").is_file()
    assert run(["search", "space.toml", "--runner", "slurm", "--study", "two"]) == 0
    first, second = (len(asked.started) for asked in replayed["slurm"])
    assert first > 0 and second == 0, "its probes are known"


def test_jobs_elsewhere_need_the_name_of_their_gpu(space, capsys, monkeypatch):
    monkeypatch.setattr(
        "titan_tune.machine.local_cluster", lambda: ClusterSpec(gpu=cpu_spec(2), gpus_per_node=2)
    )
    (space / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    assert run(["search", "job.toml", "--runner", "slurm"]) == 2
    assert "this machine has no GPU; name the cluster's with --gpu" in last_line(capsys)


def test_the_slurm_table_is_checked_before_anything_starts(space, capsys):
    with (space / "space.toml").open("a") as file:
        file.write('[slurm]\npartitoin = "gpu"\n')
    assert run(["search", "space.toml", "--plan"]) == 2
    line = last_line(capsys)
    assert "space.toml: slurm: unknown key 'partitoin' (did you mean partition?)" in line


def test_a_search_of_jobs_knows_its_nodes_and_table(space, capsys, replayed):
    with (space / "space.toml").open("a") as file:
        file.write('[slurm]\npartition = "gpu"\n')
    assert run(["search", "space.toml", "--runner", "slurm", "--parallel", "3", "--json"]) == 0
    (asked,) = replayed["slurm"]
    assert asked.request.parallel == 3 and asked.request.slurm == {"partition": "gpu"}
    assert {(spec.num_nodes, spec.nproc_per_node) for spec in asked.started} == {(2, 8)}
    assert json.loads(capsys.readouterr().out)["best"]["tokens_per_second_per_gpu"] >= 5000.0


def test_screening_is_a_study_of_its_own_before_the_probes(space, capsys, replayed):
    assert run(["search", "space.toml", "--runner", "slurm", "--screen", "dry-run"]) == 0
    (dry,), (real,) = replayed["dry-run"], replayed["slurm"]
    first = open_study("space.dry-run", storage=None, runs_dir=space / "runs").records
    second = open_study("space", storage=None, runs_dir=space / "runs").records
    assert {r.measurement.origin for r in first} == {Origin.DRY_RUN}
    assert {r.measurement.origin for r in second} == {Origin.MEASURED}
    assert len(dry.started) == len(first) and len(real.started) == len(second)
    # the first probe after the baseline is the one that its dry run says is fastest
    fastest = max((r for r in first if r.config_id != second[0].config_id), key=lambda r: r.tokens_per_second)
    assert second[1].config_id == fastest.config_id
    assert "screening: dry runs before the probes" in capsys.readouterr().err


def test_a_job_of_one_gpu_is_not_screened(space, capsys, replayed):
    (space / "space.toml").write_text(SPACE.format(nodes=1).replace("gpus_per_node = 8", "gpus_per_node = 1"))
    assert run(["search", "space.toml", "--runner", "slurm", "--screen", "dry-run"]) == 0
    assert not replayed["dry-run"] and replayed["slurm"]


def test_without_a_storage_a_study_belongs_to_one_search(space, capsys, replayed):
    from titan_tune.study.storage import search_lock

    with search_lock(space / "runs" / "space", "space"):
        assert run(["search", "space.toml", "--runner", "slurm"]) == 2
        assert "study 'space' is being searched by process" in last_line(capsys)
        assert run(["search", "space.toml", "--runner", "slurm", "--storage", "shared.journal"]) == 0
    assert "next: titan-tune export space --storage" in capsys.readouterr().err


@pytest.mark.parametrize(("choice", "left"), [("leave", True), ("cancel", False), ("ask", False)])
def test_what_becomes_of_jobs_on_ctrl_c_without_a_terminal(choice, left, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert command.leave_running(choice, None, 3) is left


@pytest.mark.parametrize(
    ("answer", "left"), [("l\n", True), ("leave\n", True), ("c\n", False), ("\n", False), ("", False)]
)
def test_on_a_terminal_the_user_is_asked(answer, left, monkeypatch):
    notes = []
    terminal = SimpleNamespace(isatty=lambda: True, readline=lambda: answer)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr(command.select, "select", lambda *_: ([terminal], [], []))
    assert command.leave_running("ask", SimpleNamespace(note=notes.append), 3) is left
    assert "3 jobs in flight: l + Enter leaves them" in notes[0]
    monkeypatch.setattr(command.select, "select", lambda *_: ([], [], []))
    assert command.leave_running("ask", SimpleNamespace(note=notes.append), 1) is False


def test_slices_are_disjoint():
    assert device_slices(["0", "1", "2", "3", "4"], per_probe=2, slots=2) == ("0,1", "2,3")
    assert device_slices(["GPU-a", "GPU-b"], per_probe=1, slots=2) == ("GPU-a", "GPU-b")
    with pytest.raises(ValueError, match="2 probes of 2 GPUs need 4, there are 3"):
        device_slices(["0", "1", "2"], per_probe=2, slots=2)


def request(machine_gpus, parallel, gpus=2):
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=gpus)
    machine = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=machine_gpus)
    return factory.RunnerRequest(cluster, machine, "cuda", "s", None, parallel)


def test_local_probes_side_by_side_have_devices_of_their_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    runner = factory.make_runner("local", request(4, 2))
    assert isinstance(runner, SlicedRunner) and runner.slots == 2
    assert runner._devices == ("4,5", "6,7")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert factory.make_runner("local", request(4, 2))._devices == ("0,1", "2,3")
    assert factory.make_runner("local", request(4, 1)).slots == 1
    with pytest.raises(InputError, match="--parallel 3: 3 probes of 2 GPUs need 6, there are 4"):
        factory.make_runner("local", request(4, 3))


def test_a_slot_is_taken_until_its_probe_has_ended(tmp_path):
    from titan_tune.domain.probe import ProbeSettings, ProbeSpec

    inner = ReplayRunner(lambda spec: measured(1.0, Origin.MEASURED), polls=9)
    runner = SlicedRunner(inner, ["0", "1"])

    def start(name):
        (tmp_path / name).mkdir()
        spec = ProbeSpec(name, tmp_path / name, "", 1, "cuda", ProbeSettings(), tmp_path, 1.0)
        return runner.start(spec)

    first, second = start("a"), start("b")
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        start("early")
    while first.poll() is None:
        pass
    start("c")
    assert [dict(spec.environment)["CUDA_VISIBLE_DEVICES"] for spec in inner.started] == ["0", "1", "0"]
    assert second.poll() is None
