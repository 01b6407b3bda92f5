import json
from pathlib import Path

import pytest

from titan_tune.domain.probe import ProbeSettings, ProbeSpec, ProbeStatus
from titan_tune.errors import InputError
from titan_tune.probe.replay import ReplayRunner
from titan_tune.probe.statistics import MINIMUM_TO_JUDGE
from titan_tune.study.pool import PoolItem
from titan_tune.study.table import DEFAULT_RUN_NOISE, TableReplay, read_table, stand_in

HEADER = {
    "kind": "table",
    "space": "s.toml",
    "gpu": "h200",
    "gpus": 2,
    "date": "2026-11-30",
    "torch": "2.11.0",
}
SLOW = {
    "config_id": "slow", "choices": {"compile": "off"}, "status": "completed", "seconds": 40.0,
    "tokens_per_second_per_gpu": 100.0, "interval": [98.0, 103.0], "time_to_first_step": 20.0,
    "step_tokens_per_second": [98.0, 99.0, 100.0, 101.0, 102.0], "memory": [[0, 5, 6, 7], [1, 8, 9, 10]],
}  # fmt: skip
FAST = {
    **SLOW,
    "config_id": "fast",
    "tokens_per_second_per_gpu": 200.0,
    "step_tokens_per_second": [199, 200, 201],
}
AGAIN = {**FAST, "tokens_per_second_per_gpu": 210.0, "seconds": 41.0}
OOM = {
    "config_id": "oom",
    "choices": {"compile": "off"},
    "status": "oom",
    "seconds": 28.0,
    "message": "no room",
}


@pytest.fixture
def write(tmp_path):
    def lines(*rows):
        path = tmp_path / "t.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return path

    return lines


def spec(config_id, beat=None):
    settings = ProbeSettings(steps=9, warmup_steps=3, min_measured_steps=2)
    return ProbeSpec(config_id, Path(), "", 2, "cuda", settings, Path(), 1000.0, beat=beat)


def test_a_table_knows_truth_optimum_and_cost(write):
    table = read_table(write(HEADER, SLOW, FAST, OOM, AGAIN))
    assert table.name == "t" and list(table.by_config) == ["slow", "fast", "oom"]
    assert table.truth("fast") == 205.0 and table.truth("oom") is None
    assert table.optimum == 205.0
    assert table.exhaustive_gpu_seconds == 2 * (40.0 + 40.0 + 28.0)
    assert table.repeat_noise == pytest.approx((2 * (5 / 205) ** 2) ** 0.5)


def test_without_repeats_noise_is_unknown(write):
    assert read_table(write(HEADER, SLOW)).repeat_noise is None


def test_what_a_later_writer_adds_is_ignored(write):
    assert read_table(write({**HEADER, "slots": 4}, {**SLOW, "losses": [1.0]})).optimum == 100.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([SLOW], "line 1: kind"),
        ([HEADER, {**SLOW, "seconds": -1}], "line 2: seconds"),
        ([HEADER, SLOW, {**FAST, "status": "fine"}], "line 3: status"),
        ([HEADER, OOM], "no row has status = completed"),
        ([HEADER, {**SLOW, "config_id": None}], "line 2: config_id"),
    ],
)
def test_a_bad_table_is_named_by_line_and_key(write, rows, message):
    with pytest.raises(InputError, match=message):
        read_table(write(*rows))


def test_files_that_are_no_table(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "text.jsonl").write_text("hello\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("empty", "empty"), ("text", "line 1"), ("bytes", "cannot be read"), ("gone", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            read_table(tmp_path / f"{name}.jsonl")


def test_replays_repeat_under_a_seed_and_differ_between_seeds(write):
    table = read_table(write(HEADER, SLOW, FAST))
    draws = [
        [TableReplay(table, seed=seed).draw("slow").tokens_per_second for _ in range(2)] for seed in (1, 2)
    ]
    assert draws[0][0] == draws[0][1] and draws[0] != draws[1]


def test_draws_lie_around_the_truth(write):
    replay = TableReplay(read_table(write(HEADER, SLOW, FAST, AGAIN)), seed=0)
    fast = [replay.draw("fast").tokens_per_second for _ in range(400)]
    assert sum(fast) / len(fast) == pytest.approx(205.0, rel=0.01)
    replay = TableReplay(read_table(write(HEADER, {**SLOW, "step_tokens_per_second": []})), seed=0)
    slow = [replay.draw("slow").tokens_per_second for _ in range(400)]
    spread = (sum((x / 100.0 - 1.0) ** 2 for x in slow) / len(slow)) ** 0.5
    assert spread == pytest.approx(DEFAULT_RUN_NOISE, rel=0.15)


def test_a_draws_interval_is_as_wide_as_its_rows(write):
    drawn = TableReplay(read_table(write(HEADER, SLOW)), seed=3).draw("slow")
    low, high = drawn.interval
    assert high / low == pytest.approx(103.0 / 98.0)
    assert drawn.noise == pytest.approx(0.05 / 3.92)


def test_a_replayed_probe_is_an_outcome(write):
    replay = TableReplay(read_table(write(HEADER, SLOW, OOM)), seed=0)
    outcome = replay.outcome_of(spec("slow"))
    assert outcome.status is ProbeStatus.COMPLETED and outcome.seconds == 40.0
    assert outcome.measurement.peak_active_bytes == 8 and outcome.measurement.measured_steps == 5
    assert outcome.measurement.time_to_first_step == 20.0
    failed = replay.outcome_of(spec("oom"))
    assert (failed.status, failed.message, failed.seconds) == (ProbeStatus.OOM, "no room", 28.0)
    assert failed.measurement is None


def test_a_probe_that_cannot_win_ends_after_the_fewest_steps(write):
    table = read_table(write(HEADER, SLOW))
    whole = TableReplay(table, seed=0).outcome_of(spec("slow", beat=50.0))
    cut = TableReplay(table, seed=0).outcome_of(spec("slow", beat=150.0))
    assert not whole.measurement.stopped_early and whole.seconds == 40.0
    assert cut.measurement.stopped_early and cut.measurement.measured_steps == MINIMUM_TO_JUDGE
    step = 1000.0 / cut.measurement.tokens_per_second_per_gpu
    assert cut.seconds == pytest.approx(40.0 - (5 - MINIMUM_TO_JUDGE) * step)


def test_a_runner_answers_from_a_table(write, tmp_path):
    runner = ReplayRunner(TableReplay(read_table(write(HEADER, SLOW)), seed=0).outcome_of)
    handle = runner.start(
        ProbeSpec("slow", tmp_path / "trial", "", 2, "cuda", ProbeSettings(), tmp_path, 1000.0)
    )
    assert handle.poll().status is ProbeStatus.COMPLETED


def test_the_header_tells_the_noise_between_runs_where_there_are_no_repeats(write):
    told, untold = {**HEADER, "run_noise": 0.2}, HEADER
    draws = {}
    for header in (told, untold):
        name = str(header.get("run_noise"))
        replay = TableReplay(read_table(write(header, SLOW)), seed=1)
        draws[name] = [replay.draw("slow").tokens_per_second for _ in range(50)]
    assert max(draws["0.2"]) > 120.0 > 105.0 > max(draws["None"])


def test_what_stands_in_for_a_job_without_a_row_is_near_it_and_slow():
    job = {"ac": "op", "compile": "off", "batch": "4"}
    far = PoolItem("far", {"ac": "none", "compile": "default", "batch": "4"}, 1.0)
    near = PoolItem("near", {"ac": "op", "compile": "default", "batch": "4"}, 90.0)
    fast = PoolItem("fast", {"ac": "op", "compile": "max", "batch": "4"}, 100.0)
    assert stand_in(job, [far, fast, near]) is near
    assert stand_in(job, [far]) is far
    with pytest.raises(ValueError):
        stand_in(job, [])


def test_an_axis_that_only_one_of_them_has_counts_as_a_difference():
    with_more = PoolItem("more", {"ac": "op", "float8": "off"}, 1.0)
    without = PoolItem("without", {"ac": "op"}, 2.0)
    assert stand_in({"ac": "op"}, [with_more, without]) is without
