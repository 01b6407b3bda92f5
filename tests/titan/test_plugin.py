import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_tune.titan.plugin.config import TitanTune
from titan_tune.titan.plugin.environment import PluginEnvironment
from titan_tune.titan.plugin.failure import FailureRecorder, bytes_asked, describe, phase_of

ROOT = str(Path(__file__).parents[2])
VENV = "/venv/lib/python3.11/site-packages"


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ROOT, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_the_package_and_its_config_needs_no_torch():
    code = (
        "import sys; import titan_tune.titan.plugin.config, titan_tune.titan.plugin.environment;"
        "print('torch' in sys.modules)"
    )
    assert run_python(code).stdout.strip() == "False"


@pytest.mark.parametrize(("key", "value"), [("compile_mode", "fast"), ("data", "c4")])
def test_a_wrong_choice_names_the_key_and_the_choices(key, value):
    with pytest.raises(ValueError, match=f"titan_tune.{key}='{value}' is not one of"):
        TitanTune(**{key: value})


def test_no_variables_ask_for_nothing():
    assert PluginEnvironment.read({}) == PluginEnvironment(None, None, None, None, 0)
    assert PluginEnvironment.read({"TITAN_TUNE_DATA": "", "RANK": "3"}).data is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total", int(2.5 * 2**30)),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes.", 1024),
        ("CUDA error: out of memory", None),
    ],
)
def test_bytes_asked(message, expected):
    assert bytes_asked(message) == expected


STEP = [(f"{VENV}/torchtitan/train.py", "train"), (f"{VENV}/torchtitan/train.py", "train_step")]
FORWARD = [*STEP, (f"{VENV}/torchtitan/train.py", "forward_backward_step")]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (STEP, "step"),
        ([*STEP, (f"{VENV}/torchtitan/train.py", "batch_generator")], "data"),
        ([*FORWARD, (f"{VENV}/torchtitan/models/llama3/model/model.py", "forward")], "forward"),
        ([*FORWARD, (f"{VENV}/torch/_tensor.py", "backward"), ("x.py", "recompute")], "backward"),
        ([*FORWARD, (f"{VENV}/torch/distributed/pipelining/stage.py", "backward_one_chunk")], "backward"),
        ([*FORWARD, (f"{VENV}/torch/_dynamo/eval_frame.py", "_fn"), ("/cache/x.py", "call")], "forward"),
        ([*FORWARD, (f"{VENV}/torch/_dynamo/convert_frame.py", "_compile"), ("x.py", "f")], "compile"),
        ([*FORWARD, (f"{VENV}/torch/_functorch/_aot_autograd/runtime_wrappers.py", "save")], "compile"),
        ([*STEP, (f"{VENV}/torchtitan/distributed/utils.py", "clip_grad_norm_")], "gradient_clipping"),
        ([*STEP, (f"{VENV}/torchtitan/components/optimizer.py", "step"), ("adam.py", "step")], "optimizer"),
    ],
)
def test_the_phase_of_a_traceback(frames, phase):
    assert phase_of(frames, started=True) == phase


def test_before_training_everything_is_init_or_compile():
    assert phase_of(STEP[:1], started=False) == "init"
    assert phase_of([], started=False) == "init"


def test_a_bare_assertion_is_described_by_its_source():
    degree = 0
    try:
        assert degree >= 1
    except AssertionError as error:
        error.args = ()
        record = describe(error, rank=2, step=0)
    assert record["message"] == "assert degree >= 1"
    assert (record["rank"], record["type"], record["phase"]) == (2, "builtins.AssertionError", "init")


def test_only_the_first_exception_is_kept(tmp_path):
    recorder = FailureRecorder(tmp_path, 1)
    recorder.write(ValueError("first"))
    recorder.write(ValueError("second"))
    assert json.loads((tmp_path / "error.rank1.json").read_text())["message"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["error.rank1.json"]


def test_an_uncaught_exception_is_recorded_and_still_reported(tmp_path):
    code = (
        "import pathlib\nfrom titan_tune.titan.plugin.failure import FailureRecorder\n"
        f"FailureRecorder(pathlib.Path({str(tmp_path)!r}), 0).install()\nraise KeyError('float8')"
    )
    result = run_python(code)
    assert result.returncode == 1
    assert "KeyError: 'float8'" in result.stderr
    assert json.loads((tmp_path / "error.rank0.json").read_text())["type"] == "builtins.KeyError"


LAUNCHER = """
import os, subprocess, sys, time
worker = (
    "import os, sys, time; from titan_tune.titan.plugin.safety import die_with_parent;"
    "time.sleep(float(sys.argv[1])); die_with_parent(int(sys.argv[2])); print('armed', flush=True); time.sleep(1000)"
)
process = subprocess.Popen([sys.executable, "-c", worker, sys.argv[1], str(os.getppid())])
print(process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("armed_first", [True, False])
def test_a_worker_dies_with_its_launcher(armed_first):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "0" if armed_first else "1"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    worker = int(launcher.stdout.readline())
    if armed_first:
        assert launcher.stdout.readline().strip() == "armed"
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while _is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- below: torch, and torchtitan where a test asks for it ---

torchtitan = pytest.mark.torchtitan


def tokens_of_step(step, *, local, dp, steps_of_accumulation, seed=0):
    """All samples that all ranks see in one step, as a multiset of (input, label) rows."""
    from titan_tune.titan.plugin.synthetic import SyntheticTokens

    rows = []
    for rank in range(dp):
        loader = SyntheticTokens(
            vocab_size=512, seq_len=8, local_batch_size=local, dp_rank=rank, dp_world_size=dp, seed=seed,
            global_batch_size=local * dp * steps_of_accumulation,
        )  # fmt: skip
        loader.load_state_dict({"microbatches_read": step * steps_of_accumulation})
        batches = iter(loader)
        for _ in range(steps_of_accumulation):
            inputs, labels = next(batches)
            rows += [
                (tuple(ids), tuple(next_ids))
                for ids, next_ids in zip(inputs["input"].tolist(), labels.tolist(), strict=True)
            ]
    return Counter(rows)


@torchtitan
@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 50), st.integers(0, 3))
def test_every_layout_of_a_global_batch_sees_the_same_tokens(data, step, seed):
    global_batch = 12
    local = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    dp = data.draw(st.sampled_from([d for d in (1, 2, 3, 4, 6, 12) if global_batch % (local * d) == 0]))
    accumulation = global_batch // (local * dp)
    found = tokens_of_step(step, local=local, dp=dp, steps_of_accumulation=accumulation, seed=seed)
    assert found == tokens_of_step(step, local=12, dp=1, steps_of_accumulation=1, seed=seed)
    assert sum(found.values()) == global_batch


@torchtitan
def test_steps_samples_and_seeds_differ():
    plain = tokens_of_step(0, local=4, dp=1, steps_of_accumulation=1)
    assert len(plain) == 4
    assert not plain & tokens_of_step(1, local=4, dp=1, steps_of_accumulation=1)
    assert not plain & tokens_of_step(0, local=4, dp=1, steps_of_accumulation=1, seed=1)


@torchtitan
def test_tokens_follow_zipf_and_labels_are_the_next_tokens():
    from titan_tune.titan.plugin.synthetic import StubTokenizer, SyntheticTokens

    loader = SyntheticTokens(
        vocab_size=32000, seq_len=4096, local_batch_size=8, global_batch_size=8, dp_rank=0, dp_world_size=1
    )
    inputs, labels = next(iter(loader))
    tokens = inputs["input"]
    assert tokens.shape == labels.shape == (8, 4096)
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    assert tokens.min() >= 0 and tokens.max() < 32000
    share_of_first = (tokens == 0).float().mean().item()
    assert share_of_first == pytest.approx(math.log(2) / math.log(32000), rel=0.1)
    eos = StubTokenizer(32000).eos_id
    assert tokens.numel() / (tokens == eos).sum().item() == pytest.approx(1000, rel=0.4)


@torchtitan
def test_a_loader_continues_from_its_state():
    from titan_tune.titan.plugin.synthetic import SyntheticTokens

    def loader():
        return SyntheticTokens(
            vocab_size=99, seq_len=5, local_batch_size=2, global_batch_size=4, dp_rank=0, dp_world_size=1
        )

    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert (next(batches)[1] == next(iter(second))[1]).all()


@torchtitan
def test_torchtitan_parses_the_section(tmp_path):
    from torchtitan.config import ConfigManager

    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\ncustom_config_module = "titan_tune.titan.plugin.config"\n'
        '[titan_tune]\ndata = "synthetic"\ncompile_mode = "max-autotune"\n'
        '[titan_tune.model_args]\ndim = 64\nffn_dim_multiplier = 1.3\ndepth_init = false\nattn_type = "sdpa"\n'
        "[titan_tune.model_args.rope_scaling_args]\nscaling_factor = 4.0\n"
    )
    section = ConfigManager().parse_args([f"--job.config_file={path}", "--training.steps=7"]).titan_tune
    assert (section.data, section.compile_mode, section.custom_import) == ("synthetic", "max-autotune", "")
    assert section.model_args == {
        "dim": 64, "ffn_dim_multiplier": 1.3, "depth_init": False, "attn_type": "sdpa",
        "rope_scaling_args": {"scaling_factor": 4.0},
    }  # fmt: skip


@torchtitan
@pytest.mark.parametrize(
    ("family", "model_args", "path", "value"),
    [
        ("llama3", {"dim": 64, "n_kv_heads": 2}, ("n_kv_heads",), 2),
        (
            "llama3",
            {"rope_scaling_args": {"scaling_factor": 2.0}},
            ("rope_scaling_args", "scaling_factor"),
            2.0,
        ),
        ("qwen3", {"dim": 64, "head_dim": 16}, ("head_dim",), 16),
        ("deepseek_v3", {"moe_args": {"num_experts": 4, "top_k": 2}}, ("moe_args", "top_k"), 2),
    ],
)
def test_a_flavor_is_built_from_its_familys_class(family, model_args, path, value):
    from torchtitan.protocols.train_spec import get_train_spec

    from titan_tune.titan.plugin.flavors import with_flavor

    original = get_train_spec(family)
    spec = with_flavor(original, "mine", model_args)
    found = spec.model_args["mine"]
    assert type(found) is type(next(iter(original.model_args.values())))
    for name in path:
        found = getattr(found, name)
    assert found == value
    assert "mine" not in original.model_args
    assert dataclasses.replace(spec, model_args=original.model_args) == original


@torchtitan
@pytest.mark.parametrize(
    ("model_args", "says"),
    [
        ({"dimm": 64}, "titan_tune.model_args.dimm is not a field of TransformerModelArgs"),
        ({"rope_scaling_args": {"x": 1}}, "titan_tune.model_args.rope_scaling_args.x is not a field of"),
        ({"dim": {"x": 1}}, "titan_tune.model_args.dim must not be a table"),
    ],
)
def test_a_wrong_model_argument_is_named(model_args, says):
    from torchtitan.protocols.train_spec import get_train_spec

    from titan_tune.titan.plugin.flavors import with_flavor

    with pytest.raises(ValueError, match=says):
        with_flavor(get_train_spec("llama3"), "mine", model_args)


COMPILE = """
import torch
from torch._inductor import compile_fx, config
from titan_tune.titan.plugin.compile_mode import use_mode
seen = []
original = compile_fx._InProcessFxCompile.codegen_and_compile
def spy(self, gm, example_inputs, inputs_to_check, graph_kwargs):
    options = (config.max_autotune, config.coordinate_descent_tuning, config.triton.cudagraphs)
    seen.append((bool(graph_kwargs.get("is_backward")), *options))
    return original(self, gm, example_inputs, inputs_to_check, graph_kwargs)
compile_fx._InProcessFxCompile.codegen_and_compile = spy
use_mode(MODE)
block = torch.compile(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU()), backend="inductor", fullgraph=True)
block(torch.randn(4, 8, requires_grad=True)).sum().backward()
print(sorted(seen))
"""


@torchtitan
@pytest.mark.parametrize(
    ("mode", "options"),
    [("default", (False, False)), ("max-autotune-no-cudagraphs", (True, True))],
)
def test_the_compile_mode_reaches_forward_and_backward(mode, options, tmp_path):
    result = run_python(f"MODE = {mode!r}\n{COMPILE}", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert result.stdout.strip() == str([(False, *options, False), (True, *options, False)]), result.stderr


@torchtitan
def test_a_mode_or_options_that_the_caller_names_are_kept(monkeypatch):
    import torch

    from titan_tune.titan.plugin.compile_mode import use_mode

    calls = []
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: calls.append(kwargs))
    use_mode("reduce-overhead")
    torch.compile(None, backend="inductor")
    torch.compile(None, mode="max-autotune-no-cudagraphs")
    torch.compile(None, options={"max_autotune": True})
    torch.compile(None, backend="aot_eager")
    assert [call.get("mode") for call in calls] == [
        "reduce-overhead",
        "max-autotune-no-cudagraphs",
        None,
        None,
    ]


@torchtitan
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_leave_the_graphs_memory_once_a_step_if_they_are_added_to(accumulation, monkeypatch):
    import torch

    from titan_tune.titan.plugin.compile_mode import mark_cuda_graph_steps

    marks = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    pool = torch.ones(3)

    class Trainer:
        gradient_accumulation_steps = accumulation

        def __init__(self):
            self.model_parts = [torch.nn.Linear(3, 1, bias=False)]

        def forward_backward_step(self, **kwargs):
            weight = self.model_parts[0].weight
            if weight.grad is None:
                weight.grad = pool.view(1, 3)
            else:
                weight.grad += 1
            return torch.tensor(0.0)

    mark_cuda_graph_steps(Trainer)
    trainer = Trainer()
    for _ in range(accumulation):
        trainer.forward_backward_step(input_dict={})
    grad = trainer.model_parts[0].weight.grad
    assert len(marks) == accumulation
    assert (grad.data_ptr() == pool.data_ptr()) is (accumulation == 1)
    assert grad.tolist() == [[float(accumulation)] * 3]
    assert pool.tolist() == [1.0, 1.0, 1.0]


@torchtitan
def test_memory_peaks_outlive_torchtitans_resets():
    from titan_tune.titan.plugin.metrics import MemoryPeaks

    readings = iter([(700, 900, 50), (300, 400, 80)])

    class Device:
        def memory_stats(self):
            active, reserved, self.free = next(readings)
            return {
                "active_bytes.all.peak": active,
                "reserved_bytes.all.peak": reserved,
                "num_alloc_retries": 2,
            }

        def mem_get_info(self):
            return self.free, 1000

    peaks, device = MemoryPeaks(), Device()
    peaks.update(device)
    peaks.update(device)
    assert (peaks.active_bytes, peaks.reserved_bytes, peaks.device_bytes) == (700, 900, 950)
    assert (peaks.alloc_retries, peaks.ooms) == (2, 0)


@torchtitan
def test_the_cpu_device_counts_this_process_alone():
    from titan_tune.titan.plugin.cpu import CpuDevice, peak_rss_bytes

    before = peak_rss_bytes()
    block = bytearray(before + 2**27)
    block[::4096] = b"x" * len(block[::4096])
    assert CpuDevice.memory_stats()["active_bytes.all.peak"] >= before + 2**27
    free, total = CpuDevice.mem_get_info()
    assert 0 < free < total


@torchtitan
def test_each_rank_has_its_own_caches(tmp_path, monkeypatch):
    from titan_tune.titan.plugin.caches import use_rank_caches

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    use_rank_caches(tmp_path, 3)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "rank3" / "inductor")
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()


@torchtitan
def test_float8_linears_are_counted_under_fsdps_class_too():
    import torch

    from titan_tune.titan.plugin.metrics import is_float8_linear

    class Float8Linear(torch.nn.Linear):
        pass

    class FSDPFloat8Linear(Float8Linear):
        pass

    assert is_float8_linear(Float8Linear(2, 2))
    assert is_float8_linear(FSDPFloat8Linear(2, 2))
    assert not is_float8_linear(torch.nn.Linear(2, 2))


@torchtitan
def test_an_unknown_source_of_data_is_refused():
    from titan_tune.titan.plugin.install import apply_section

    environment = PluginEnvironment(None, None, "c4", None, 0)
    with pytest.raises(ValueError, match="TITAN_TUNE_DATA='c4' is not one of job, synthetic"):
        apply_section(object, SimpleNamespace(), environment)
