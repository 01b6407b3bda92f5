"""Search-space files: what they say, and one line for what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError
from titan_tune.estimate import estimate_step_time
from titan_tune.space.file import is_space_file, load_space
from titan_tune.titan.settings import settings_from

SPACES = Path(__file__).parents[2] / "search_spaces"
BASE = '[base.model]\nname = "llama3"\nflavor = "8B"\n[base.training]\nlocal_batch_size = 2\n'
CLUSTER = '[cluster]\ngpu = "h200"\ngpus_per_node = 4\n'
MACHINE = ClusterSpec(gpu=gpu_spec("a100-80gb"), gpus_per_node=2)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, axes: str, *, head: str = "", rest: str = CLUSTER, **options):
    return load_space(write(tmp_path, f"{head}{BASE}[axes]\n{axes}\n{rest}"), **options)


def labels(space) -> dict[str, tuple[str, ...]]:
    return {axis.name: axis.labels for axis in space.axes}


def test_named_axes(tmp_path: Path) -> None:
    space = load(
        tmp_path,
        'activation_checkpoint = ["none", "selective-op", "selective-3", "full", "memory_budget-0.25"]\n'
        'compile = ["off", "max-autotune"]\nfloat8 = ["off", "rowwise", "tensorwise-fsdp_all_gather"]\n'
        "local_batch_size = [1, 2]",
    )
    values = {
        value.label: value.values for axis in space.axes for value in axis.values if value.label != "off"
    }
    assert values["selective-3"] == {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "3",
    }
    assert values["memory_budget-0.25"]["activation_checkpoint.memory_budget"] == 0.25
    assert values["max-autotune"] == {"compile.enable": True, "titan_tune.compile_mode": "max-autotune"}
    assert values["rowwise"]["quantize.linear.float8.recipe_name"] == "rowwise"
    assert values["rowwise"]["quantize.linear.float8.filter_fqns"] == ["output"]
    gather = values["tensorwise-fsdp_all_gather"]
    assert gather["model.converters"] == ["quantize.linear.float8"]
    assert gather["quantize.linear.float8.recipe_name"] is None
    assert gather["quantize.linear.float8.enable_fsdp_float8_all_gather"] is True
    assert values["2"] == {"training.local_batch_size": 2}
    assert labels(space)["compile"] == ("off", "max-autotune")
    assert space.numerics_axes == ("float8",)


def test_float8_keeps_the_bases_converters_and_filters(tmp_path: Path) -> None:
    head = (
        '[base.quantize.linear.float8]\nfilter_fqns = ["output", "wk"]\n'
        '[base.quantize.grouped_mm.float8]\nfqns = ["experts"]\n'
    )
    text = BASE.replace('flavor = "8B"\n', 'flavor = "8B"\nconverters = ["quantize.grouped_mm.float8"]\n')
    path = write(tmp_path, f'{head}{text}[axes]\nfloat8 = ["off", "tensorwise"]\n{CLUSTER}')
    off, on = load_space(path).axes[0].values
    assert off.values == {"model.converters": ["quantize.grouped_mm.float8"]}
    assert on.values["model.converters"] == ["quantize.linear.float8", "quantize.grouped_mm.float8"]
    assert on.values["quantize.linear.float8.filter_fqns"] == ["output", "wk"]


@pytest.mark.parametrize(
    "axis", ['training.dtype = ["float32", "bfloat16"]', '"training.dtype" = ["float32", "bfloat16"]']
)
def test_dotted_axes_with_and_without_quotes(tmp_path: Path, axis: str) -> None:
    space = load(tmp_path, axis)
    assert labels(space) == {"training.dtype": ("float32", "bfloat16")}
    assert space.numerics_axes == ("training.dtype",)


def test_parallelism_by_short_names(tmp_path: Path) -> None:
    space = load(
        tmp_path,
        "parallelism = [{}, {tp = 2}, {dp_replicate = 2, dp_shard = 2}, "
        '{pp = 4, schedule = "GPipe", microbatch = 2}]',
    )
    assert labels(space)["parallelism"] == (
        "dp_shard=4",
        "dp_shard=2,tp=2",
        "dp_replicate=2,dp_shard=2",
        "pp=4,schedule=GPipe,microbatch=2",
    )
    last = space.axes[0].values[-1].values
    assert last["parallelism.data_parallel_shard_degree"] == 1
    assert last["parallelism.pipeline_parallel_microbatch_size"] == 2


def test_automatic_parallelism_covers_every_factorisation(tmp_path: Path) -> None:
    for value in load(tmp_path, 'parallelism = "auto"').axes[0].values:
        degrees = value.values
        product = 1
        for name in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
        ):
            product *= degrees[f"parallelism.{name}_degree"]
        assert product * degrees["parallelism.context_parallel_degree"] == 4
        assert degrees["parallelism.expert_parallel_degree"] == 1
    # 4 = 2 x 2 over five degrees: 5 with one 4, 10 with two 2s
    assert len(load(tmp_path, 'parallelism = "auto"').axes[0].values) == 15


def test_automatic_parallelism_adds_expert_degrees(tmp_path: Path) -> None:
    text = BASE.replace('"llama3"', '"qwen3"').replace('"8B"', '"30B-A3B"')
    path = write(tmp_path, f'{text}[axes]\nparallelism = "auto"\n{CLUSTER}')
    layouts = load_space(path).axes[0].values
    assert {v.values["parallelism.expert_parallel_degree"] for v in layouts} == {1, 2, 4}
    assert {v.values["parallelism.pipeline_parallel_degree"] for v in layouts} == {1}
    assert len({v.label for v in layouts}) == len(layouts)


def test_automatic_local_batch_is_bounded_by_the_global_batch(tmp_path: Path) -> None:
    space = load(tmp_path, 'local_batch_size = "auto"', rest=CLUSTER + "[fixed]\nglobal_batch_size = 12")
    assert labels(space)["local_batch_size"] == ("1", "2", "4", "8")
    assert space.global_batch_size == 12


def test_global_batch_is_the_bases_own_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, 'compile = ["off"]').global_batch_size == 2 * 4


def test_budget_and_probe(tmp_path: Path) -> None:
    rest = CLUSTER + "[budget]\nmax_probes = 7\nmax_gpu_hours = 2\n[probe]\nsteps = 12\nhang_seconds = 60\n"
    space = load(tmp_path, 'compile = ["off"]', rest=rest)
    assert (space.budget.max_probes, space.budget.max_gpu_hours) == (7, 2.0)
    assert space.budget.max_wall_clock_hours is None
    assert (space.probe.steps, space.probe.hang_seconds) == (12, 60.0)
    changed = space.with_budget(max_probes=3)
    assert (changed.budget.max_probes, changed.budget.max_gpu_hours) == (3, 2.0)


def test_a_named_interconnect_reaches_the_prediction(tmp_path: Path) -> None:
    two_nodes = CLUSTER + "num_nodes = 2\n"
    usual = load(tmp_path, 'compile = ["off"]', rest=two_nodes)
    slow = load(tmp_path, 'compile = ["off"]', rest=two_nodes + 'interconnect = "ethernet-100"\n')
    assert slow.cluster.interconnect == "ethernet-100"
    seconds = [
        estimate_step_time(settings_from(space.base.resolved(), space.base.model, space.cluster)).components[
            "communication"
        ]
        for space in (usual, slow)
    ]
    assert seconds[1] > 2 * seconds[0] > 0
    assert "interconnect" not in slow.cluster.model_dump()


def test_cluster_from_file_flags_and_machine(tmp_path: Path) -> None:
    axes = 'compile = ["off"]'
    assert load(tmp_path, axes).cluster == ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=4)
    assert load(tmp_path, axes, cluster=MACHINE).cluster == MACHINE
    assert load(tmp_path, axes, rest="", machine=MACHINE).cluster == MACHINE
    nodes = load(tmp_path, axes, rest="[cluster]\nnum_nodes = 3", machine=MACHINE).cluster
    assert (nodes.gpu.name, nodes.world_size) == ("a100-80gb", 6)
    cpu = load(tmp_path, axes, rest='[cluster]\ngpu = "cpu"\ngpus_per_node = 3', machine=MACHINE).cluster
    assert cpu.gpu.is_cpu and cpu.world_size == 3


def test_base_by_path_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n', encoding="utf-8")
    path = write(tmp_path, f'base = "jobs/job.toml"\n[axes]\ncompile = ["off"]\n{CLUSTER}')
    space = load_space(path, sets=["training.seq_len=1024"])
    assert space.base.get("training.seq_len") == 1024
    assert space.base.path == tmp_path / "jobs" / "job.toml"
    inline = load(tmp_path, 'compile = ["off"]', sets=["training.seq_len=1024"])
    assert inline.base.get("training.seq_len") == 1024


@pytest.mark.parametrize(
    ("axes", "rest", "said"),
    [
        ('compil = ["off"]', "", "did you mean compile?"),
        ('compile = ["on"]', "", "axes.compile: unknown value 'on'; values: off, default,"),
        ("compile = []", "", "the list is empty"),
        ('compile = "off"', "", "must be a list of values"),
        ('compile = ["off", "off"]', "", "off is listed twice"),
        ('activation_checkpoint = ["selective"]', "", "did you mean selective-2"),
        ('activation_checkpoint = ["memory_budget-2"]', "", "memory_budget"),
        ('activation_checkpoint = ["memory_budget-x"]', "", "a number from 0 to 1"),
        ('float8 = ["row"]', "", "values: off, tensorwise, rowwise,"),
        ("parallelism = [{dp = 2}]", "", "unknown key 'dp'"),
        ("parallelism = [{tp = 0}]", "", "tensor_parallel_degree"),
        ('parallelism = "all"', "", 'or "auto"'),
        ("local_batch_size = [0]", "", "training.local_batch_size"),
        ('training.dtyp = ["float32"]', "", "training.dtype"),
        ('training.dtype = ["fp8"]', "", "float32"),
        ('model.flavor = ["8B"]', "", "keeps the model"),
        ("training.global_batch_size = [8]", "", "[fixed] global_batch_size"),
        ("metrics.log_freq = [1, 2]", "", "nothing to search"),
        (
            'compile = ["off"]\n"compile.enable" = [true]',
            "",
            "axes compile and compile.enable both set compile.enable",
        ),
        ("", "", "[axes] is empty"),
        ('compile = ["off"]', "[budgets]\nmax_probes = 1", "did you mean budget?"),
        ('compile = ["off"]', "[budget]\nmax_probe = 1", "did you mean max_probes?"),
        ('compile = ["off"]', "[budget]\nmax_probes = 0", "budget.max_probes = 0"),
        ('compile = ["off"]', '[probe]\nsteps = "x"', "probe.steps = 'x'"),
        ('compile = ["off"]', "[probe]\nstep = 3", "did you mean steps"),
        ('compile = ["off"]', '[probe]\nrunner = "slrum"', "probe.runner = 'slrum'"),
        (
            'compile = ["off"]',
            "[probe]\nsteps = 5",
            "probe.warmup_steps = 5: leaves nothing to measure of steps = 5",
        ),
        ('compile = ["off"]', "[fixed]\nglobal_batch_size = 0", "fixed.global_batch_size = 0"),
        ('compile = ["off"]', "[fixed]\nseq_len = 5", "keys: global_batch_size"),
        ('compile = ["off"]', '[cluster]\ngpu = "h20000"', "cluster.gpu: "),
        ('compile = ["off"]', "[cluster]\nnodes = 2", "did you mean num_nodes?"),
        ('compile = ["off"]', "[cluster]\nnum_nodes = true", "cluster.num_nodes = True"),
        ('compile = ["off"]', CLUSTER + "interconnect = 400", "cluster.interconnect = 400: must be"),
        ('compile = ["off"]', CLUSTER + 'interconnect = "efa-p6"', "cluster.interconnect: unknown link"),
        ('compile = ["off"]', CLUSTER + 'interconnect = "nvlink4"', "links between nodes: ib-ndr"),
    ],
)
def test_one_line_for_what_is_wrong(tmp_path: Path, axes: str, rest: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, axes, rest=rest, machine=MACHINE)
    message = str(error.value)
    assert said in message
    assert "\n" not in message
    assert message.startswith(str(tmp_path / "space.toml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[axes]\ncompile = ['off']", "base is missing"),
        (BASE, "axes is missing"),
        (BASE + "[axess]\ncompile = ['off']", "unknown key 'axess' (did you mean axes?)"),
        ("base = 3\n[axes]\ncompile = ['off']", "must be the path of a job file"),
        ("base = 'none.toml'\n[axes]\ncompile = ['off']", "no such file"),
        ("[base.training]\nseqlen = 3\n[axes]\ncompile = ['off']", "seq_len"),
        ("[axes\n", "is not valid TOML"),
        (BASE + "[axes]\ncompile = ['off']\n[[cluster]]\n", "must be a table"),
    ],
)
def test_files_that_are_no_space(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*$") as error:
        load_space(write(tmp_path, text), machine=MACHINE)
    assert said in str(error.value)


def test_space_files_are_told_from_jobs(tmp_path: Path) -> None:
    assert is_space_file(write(tmp_path, "[axes]\n"))
    assert is_space_file(write(tmp_path, BASE + "[axess]\n")), "a typing error in its name is not a job"
    assert not is_space_file(write(tmp_path, "[model]\n"))
    assert not is_space_file(write(tmp_path, "[axes\n"))
    assert not is_space_file(tmp_path)
    assert not is_space_file(tmp_path / "missing.toml")
    assert all(map(is_space_file, SPACES.glob("*.toml")))
