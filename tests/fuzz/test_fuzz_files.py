"""Random and mutated job and space files: exit code 0, 2 or 3, one line that names the file, no hang, valid JSON.

The cases are numbers (``fuzz_cases.make_case``), so a failure is repeated by its number alone.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.fuzz.fuzz_cases import ROOT, Case, cases, make_case, remove, rename, set_any_value, wrap_in_list
from titan_tune import cli
from titan_tune.cli.console import stdout_console
from titan_tune.cli.estimate import run_estimate
from titan_tune.cli.search import SearchOptions, run_search
from titan_tune.errors import TitanTuneError

FILE = Path("case.toml")
GPUS = (8, 512, 4096)
BATCH = 250
DEFAULT_CASES = 2_000
ALL_CASES = 10_000
HANG_SECONDS = 60
"""Far beyond what any case takes: the slowest are seconds on a busy machine."""


class Hang(BaseException):
    """Not an Exception: nothing in the project may swallow it."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    def expired(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def commands(tmp_path, monkeypatch):
    """The commands behind ``cli.run``, without what argument parsing costs; a good job beside the case."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_bytes((ROOT / "examples" / "llama3_8b.toml").read_bytes())
    monkeypatch.setattr(cli, "_dispatch", dispatch)


def dispatch(arguments: list[str]) -> int:
    command, number, *flags = arguments
    as_json = "--json" in flags
    if command == "search":
        return run_search(SearchOptions(target=FILE, plan_only=True, as_json=as_json))
    return run_estimate(
        FILE, gpus=GPUS[int(number) % len(GPUS)], nodes=None, gpus_per_node=None, gpu="h100-80gb", sets=[],
        hf_config=None, sweep=None, method="formula", as_json=as_json, console=stdout_console(),
    )  # fmt: skip


def outcome(case: Case) -> tuple[int | BaseException, str, str]:
    """Exit code (or what escaped), stdout and stderr."""
    FILE.write_bytes(case.data)
    arguments = ["search" if case.is_space else "estimate", str(case.number)]
    arguments += ["--json"] if case.number % 2 else []
    out, err = io.StringIO(), io.StringIO()
    code: int | BaseException
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with no_hang():
                code = cli.run(arguments)
        except (Exception, Hang) as error:
            code = error
    return code, out.getvalue(), err.getvalue()


def strict_json(text: str) -> Any:
    """JSON as the standard has it: Python's NaN and Infinity do not pass."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def problem(case: Case) -> str | None:
    """What is wrong with the way a case ended."""
    code, out, err = outcome(case)
    said = err.strip().splitlines()
    if code not in (0, 2, 3):
        return f"ended with {code!r}: {said[-1:]}"
    if code == 2 and (len(said) != 1 or FILE.name not in said[0]):
        return f"not one line that names the file: {said[:3]}"
    if not err.isascii() and not all(c.isprintable() or c == "\n" for c in err):
        return f"control characters reach the terminal: {err!r}"
    if code == 0 and case.number % 2:
        try:
            answer = strict_json(out)
        except ValueError as error:
            return f"stdout is not JSON: {error}: {out[:200]}"
        if case.is_space and not answer["total"] >= len(answer["candidates"]) > -1:
            return f"counts do not add up: {answer['total']}"
    if code == 0 and not case.is_space and not out.strip():
        return "success without an answer"
    return None


def check(start: int, stop: int) -> None:
    had_torch = "torch" in sys.modules
    problems = [
        f"case {case.number} ({', '.join(case.history)}): {found}"
        for case in cases(start, stop)
        if (found := problem(case)) is not None
    ]
    assert not problems, "\n".join(problems)
    assert had_torch or "torch" not in sys.modules


@pytest.mark.parametrize("start", range(0, DEFAULT_CASES, BATCH))
def test_mutated_files(start):
    check(start, start + BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(DEFAULT_CASES, ALL_CASES, BATCH))
def test_more_mutated_files(start):
    check(start, start + BATCH)


def test_the_cases_are_deterministic_and_varied():
    made = list(cases(0, 300))
    assert made == list(cases(0, 300))
    assert len({case.data for case in made}) > 250
    used = {name for case in made for name in case.history}
    assert {
        "crlf",
        "utf16",
        "byte_order_mark",
        "truncate",
        "nest_deeply",
        "set_cluster",
        "define_model",
    } <= used
    assert {case.is_space for case in made} == {True, False}


def test_unharmed_cases_are_answered():
    """The corpus itself is good: whatever the mutations find is theirs."""
    untouched = [case for case in cases(0, 200) if len(case.history) == 1]
    assert len(untouched) > 10
    assert all(outcome(case)[0] in (0, 3) for case in untouched)


def test_a_repeated_case_is_the_same():
    assert make_case(4711) == make_case(4711)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_mutated_hugging_face_configs(architecture, capsys):
    rng = random.Random(architecture)
    for number in range(400):
        config = copy.deepcopy(LLAMA) | {"architectures": [architecture]}
        if architecture == "Qwen3ForCausalLM":
            del config["rope_scaling"]
        for _ in range(rng.choice((1, 1, 2, 3))):
            rng.choice((set_any_value, remove, wrap_in_list, rename))(rng, config)
        text = json.dumps(config, default=str)
        Path("config.json").write_text(text if rng.random() < 0.9 else text[: rng.randrange(len(text))])
        with no_hang():
            code = run_hf()
        said = capsys.readouterr().err
        assert code in (0, 2, 3), (number, config, said)
        assert code != 2 or (len(said.splitlines()) == 1 and "config.json" in said), (number, config, said)


def run_hf() -> int:
    console = Console(file=io.StringIO())
    try:
        return run_estimate(
            Path("job.toml"), gpus=64, nodes=None, gpus_per_node=None, gpu="h100-80gb", sets=[],
            hf_config=Path("config.json"), sweep=None, method="formula", as_json=True, console=console,
        )  # fmt: skip
    except TitanTuneError as error:
        return cli.fail(str(error), error.exit_code)
