"""How ``benchmarks/launchers.py`` judges: each launcher's own spread is the yardstick."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from titan_tune.domain.probe import Measurement, ProbeOutcome, ProbeSpec, ProbeStatus, RankMemory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("launchers")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def outcome_of(
    losses: Sequence[float], *, active: int = 100, reserved: int = 200, device: int = 300, kind: str = "cuda"
) -> ProbeOutcome:
    memory = (RankMemory(0, active, reserved, device), RankMemory(1, active, reserved, device))
    measured = Measurement(
        1000.0, (990.0, 1010.0), 1.0, 10, 2, False, 9.0, tuple(losses), memory, 0, kind
    )  # fmt: skip
    return ProbeOutcome(ProbeStatus.COMPLETED, f"{len(losses)} steps", 20.0, measured)


def compared(bench: Any, torchrun: Sequence[ProbeOutcome], preloaded: Sequence[ProbeOutcome]) -> Any:
    runs = [bench.Run("one", "torchrun", "warm", outcome) for outcome in torchrun]
    runs += [bench.Run("one", "preloaded", "warm", outcome) for outcome in preloaded]
    (found,) = bench.comparisons(runs)
    return found


def losses(*steps: Sequence[float]) -> list[ProbeOutcome]:
    return [outcome_of(list(of_one)) for of_one in steps]


def test_launchers_may_differ_as_much_as_one_does_from_itself(bench: Any) -> None:
    found = compared(bench, losses([10.0, 10.0], [10.0, 10.001]), losses([10.0, 10.002], [10.0, 10.0015]))
    assert found.problems == ()
    assert found.own["torchrun"].all_steps == pytest.approx(1e-4, rel=1e-3)
    assert found.own["preloaded"].all_steps == pytest.approx(5e-5, rel=1e-3)
    assert (found.between.all_steps, found.between.first_step) == (pytest.approx(2e-4, rel=1e-3), 0.0)


@pytest.mark.parametrize(("factor", "fails"), [(0.98, False), (1.02, True)])
def test_what_is_beyond_the_allowed_multiple_of_the_spread_fails(
    bench: Any, factor: float, fails: bool
) -> None:
    spread = 1e-4
    far = 10.0 * (1 + factor * bench.MAX_SPREADS * spread)
    near = 10.0 * (1 + spread)
    # runs of preloaded agree with each other: the larger spread counts, here torchrun's
    found = compared(bench, losses([10.0], [near]), losses([far], [far]))
    assert bool(found.problems) is fails
    assert all(problem.startswith("losses: ") for problem in found.problems)


def test_deterministic_launchers_must_agree_to_the_last_bit(bench: Any) -> None:
    same = losses([10.0, 9.0], [10.0, 9.0])
    assert compared(bench, same, losses([10.0, 9.0], [10.0, 9.0])).problems == ()
    other = losses([10.0, 9.000000001], [10.0, 9.000000001])
    assert compared(bench, same, other).problems


def test_steps_that_only_one_run_has_are_not_compared(bench: Any) -> None:
    assert compared(bench, losses([10.0, 9.0], [10.0]), losses([10.0], [10.0, 9.0, 8.0])).problems == ()


@pytest.mark.parametrize(("loss", "fails"), [(float("nan"), False), (9.0, True)])
def test_a_loss_that_is_not_a_number_equals_only_another(bench: Any, loss: float, fails: bool) -> None:
    nan = losses([float("nan")], [float("nan")])
    assert bool(compared(bench, nan, losses([loss], [loss])).problems) is fails


def test_peaks_must_be_equal_to_the_byte_on_gpus(bench: Any) -> None:
    same = [outcome_of([10.0]) for _ in range(2)]
    others = {"active": outcome_of([10.0], active=999), "reserved": outcome_of([10.0], reserved=999)}
    for peak, other in others.items():
        (problem,) = compared(bench, same, [other] * 2).problems
        assert problem.startswith(f"{peak}_bytes: ") and "999" in problem
        assert "differs among" not in problem
    one_differs = [outcome_of([10.0]), outcome_of([10.0], active=101)]
    (problem,) = compared(bench, same, one_differs).problems
    assert problem.endswith("(differs among the runs of preloaded)")
    # the device's memory is everybody's; resident sets of processes are no prediction
    assert compared(bench, same, [outcome_of([10.0], device=1) for _ in range(2)]).problems == ()
    on_cpu = [outcome_of([10.0], active=value, kind="rss") for value in (1, 2)]
    assert compared(bench, on_cpu, on_cpu).problems == ()


def test_one_run_of_a_launcher_is_nothing_to_compare_with(bench: Any, tmp_path: Path) -> None:
    assert compared(bench, losses([10.0]), losses([10.0], [10.0])).problems == ("1 runs by torchrun",)
    # a start that fell back counts for neither
    fallen = bench.Run("one", "torchrun (no driver)", "warm", outcome_of([10.0]))
    (found,) = bench.comparisons([fallen, fallen])
    assert found.problems == ("0 runs by preloaded", "0 runs by torchrun")
    with pytest.raises(SystemExit):
        bench.parse(["space.toml", "-o", str(tmp_path / "r.md"), "--repeats", "1"])


def test_other_ends_are_compared_by_status_and_message(bench: Any) -> None:
    refused = [ProbeOutcome(ProbeStatus.UNSUPPORTED, "KeyError", 3.0) for _ in range(2)]
    assert compared(bench, refused, refused).problems == ()
    other = [ProbeOutcome(ProbeStatus.UNSUPPORTED, "TypeError", 3.0) for _ in range(2)]
    assert "KeyError" in compared(bench, refused, other).problems[0]
    assert compared(bench, refused, losses([10.0], [10.0])).problems[0].startswith("status: ")
    assert compared(bench, [refused[0], *losses([10.0])], refused).problems[0].startswith("status: ")


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
activation_checkpoint = ["none"]
"""


class Instant:
    """A runner whose probes have ended; remembers what it was given."""

    started: ClassVar[list[tuple[str, str]]] = []
    preloaded: ClassVar[float] = 9.0
    """The second loss of what the preloaded launcher starts."""

    def __init__(self, nproc: int, device: str, *, launcher: str) -> None:
        self.launcher = launcher

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, spec: ProbeSpec) -> Instant:
        Instant.started.append((self.launcher, spec.cache_directory.name))
        return self

    def poll(self) -> ProbeOutcome:
        outcome = outcome_of([10.0, 9.0 if self.launcher == "torchrun" else Instant.preloaded], kind="rss")
        outcome.details["launcher"] = self.launcher
        outcome.details["phases"] = {"imports": 1.0}
        return outcome


@pytest.mark.parametrize(("preloaded", "code"), [(9.0, 0), (8.0, 1)])
def test_every_launcher_runs_twice_in_turn_with_caches_of_its_own(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    preloaded: float,
    code: int,
) -> None:
    monkeypatch.setattr(bench, "LocalRunner", Instant)
    monkeypatch.setattr(Instant, "started", [])
    monkeypatch.setattr(Instant, "preloaded", preloaded)
    (tmp_path / "space.toml").write_text(SPACE)
    report = tmp_path / "report.md"
    arguments = [str(tmp_path / "space.toml"), "-o", str(report), "--configurations", "1"]
    assert bench.main([*arguments, "--runs", str(tmp_path / "runs")]) == code
    names = [name for name, _ in Instant.started]
    assert names == ["preloaded", "preloaded", "torchrun", "torchrun"] * 2  # cold, then warm
    caches = [cache for _, cache in Instant.started]
    assert caches[0::2] == caches[1::2] and len(set(caches)) == 4
    text = report.read_text()
    rows = [line for line in text.splitlines() if "| cold |" in line]
    assert len(rows) == 3  # a configuration, then the phases of each launcher
    assert ("| nothing |" in rows[0]) is (code == 0), json.dumps(rows)
    assert capsys.readouterr().out.count("cold") >= 4
