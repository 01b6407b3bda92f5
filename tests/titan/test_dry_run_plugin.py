"""What the plug-in does in a dry run: answers of collectives, the count, and pipelines without neighbours.

Everything in one process with torch's fake process group.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
START = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
from titan_tune.titan.plugin.dry_run_answers import Answers
from titan_tune.titan.plugin.dry_run_collectives import CollectiveCounter, Group, process_groups
dist.init_process_group("fake", rank=2, world_size=4)
world = dist.group.WORLD
nan = float("nan")
def answers(**asked):
    return Answers("cpu", **{"partial_sums": [], "futures": False, **asked})
"""

pytestmark = pytest.mark.torchtitan


def printed(code):
    """The JSON that a fresh process with rank 2 of 4 fake ranks prints last."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + code],
        env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_no_output_is_memory_that_nobody_wrote():
    found = printed(
        """
import json
kept = answers()
given = torch.arange(8.0)
eager, listed, single = torch.full((2,), nan), torch.full((2,), nan), torch.full((8,), nan)
dist.reduce_scatter_tensor(eager, given)
dist.reduce_scatter(listed, list(given.view(4, 2)))
functional = funcol.reduce_scatter_tensor(given, "sum", 0, world)
dist.all_to_all_single(single, given)
uneven = torch.full((5, 1), nan)
dist.all_to_all_single(uneven, torch.tensor([[1.0], [2.0]]), [2, 1, 1, 1], [1, 1, 0, 0])
counts = torch.zeros(8, dtype=torch.int64)
dist.all_to_all_single(counts, torch.arange(8))
parts = [torch.full((2,), nan) for _ in range(4)]
dist.all_to_all(parts, list(given.view(4, 2)))
print(json.dumps([t.tolist() for t in (eager, listed, functional + 0, single, uneven.flatten(), counts, parts[0])]))
"""
    )
    eager, listed, functional, single, uneven, counts, part = found
    assert eager == listed == functional == [4.0, 5.0]  # rank 2's own part
    assert single == list(range(8))
    assert uneven == [1.0, 2.0, 1.0, 2.0, 1.0]
    # every peer sends as many tokens for this rank's experts as this rank has for them itself
    assert counts == [4, 5] * 4
    assert part == [4.0, 5.0]


def test_activations_are_added_up_where_gradients_are_not():
    found = printed(
        """
import json
kept = answers(partial_sums=[world.group_name])
output = torch.full((2,), nan)
dist.reduce_scatter_tensor(output, torch.arange(8.0))
print(json.dumps(output.tolist()))
"""
    )
    assert found == [0.0 + 2 + 4 + 6, 1.0 + 3 + 5 + 7]


def test_received_activations_and_gradients_are_random_and_filled_once():
    found = printed(
        """
import json
kept = answers()
activation, gradient = torch.full((4096,), nan, requires_grad=True), torch.full((4096,), nan)
message = torch.zeros(2, dtype=torch.int32)
before = torch.get_rng_state()
version = activation._version
for tensor in (activation, gradient, message):
    dist.recv(tensor, src=1)
first = activation.detach().clone()
dist.recv(activation, src=1)
print(json.dumps({
    "std": [activation.std().item(), gradient.std().item()], "same": torch.equal(first, activation.detach()),
    "message": message.tolist(), "rng": torch.equal(before, torch.get_rng_state()),
    "version": activation._version - version, "leaf": activation.is_leaf,
}))
"""
    )
    assert found["std"] == pytest.approx([1.0, 1e-3], rel=0.05)
    assert found["same"] and found["rng"] and found["leaf"]
    assert (found["message"], found["version"]) == ([0, 0], 0)


def test_messages_are_marked_as_used_by_a_stream_behind_the_one_that_computes():
    found = printed(
        """
import json
from titan_tune.titan.plugin.dry_run_answers import _Messages
class Stream:
    def wait_stream(self, other):
        said.append(["wait for", other])
class Tensor:
    def is_floating_point(self):
        return False
    def record_stream(self, stream):
        said.append(["mark", stream is messages._stream])
said = []
torch.cuda.current_stream = lambda: "compute"
messages = _Messages(Stream())
messages.send([Tensor()])
messages.receive([Tensor(), Tensor()])
print(json.dumps(said))
"""
    )
    wait, mark = ["wait for", "compute"], ["mark", True]
    assert found == [wait, mark, wait, mark, mark]


def test_ddp_finds_its_gradients_in_the_future():
    found = printed(
        """
import json
kept = answers(futures=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.ones(3, 2)).sum().backward()
print(json.dumps(model.module.weight.grad.tolist()))
"""
    )
    assert found == [[0.75, 0.75]]  # 3 ones, divided by 4 ranks


def test_the_count_is_of_one_step_and_the_operators_are_given_back():
    found = printed(
        """
import json
kept = answers()
pairs, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
counter = CollectiveCounter("cpu")
def step():
    dist.all_reduce(torch.ones(3))
    counter.in_model = True
    weight = torch.ones(4, requires_grad=True)
    gathered = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(gathered, weight.detach(), group=pairs)
    weight.register_post_accumulate_grad_hook(lambda w: dist.reduce_scatter_tensor(torch.zeros(1), w.grad))
    weight.sum().backward()
    dist.send(torch.ones(2), dst=3)
    counter.in_model = False
step()
counter.start()
step()
counter.stop()
step()
dims = {4: ("fsdp",), 2: ()}
groups = {name: Group(group.ranks, dims[len(group.ranks)]) for name, group in process_groups({}).items()}
print(json.dumps({"records": counter.records(groups), "seconds": counter.answer_seconds()}))
"""
    )
    rows = [
        (
            r["op"],
            r["count"],
            r["bytes"],
            r["group_size"],
            r["stride"],
            r["first_rank"],
            r["mesh_dim"],
            r["phase"],
        )
        for r in found["records"]
    ]
    assert sorted(rows) == [
        ("all_gather", 1, 32, 2, 2, 0, None, "forward"),
        ("all_reduce", 1, 12, 4, 1, 0, "fsdp", "optimizer"),
        ("reduce_scatter", 1, 16, 4, 1, 0, "fsdp", "backward"),
        ("send", 1, 8, 4, 1, 0, "fsdp", "backward"),
    ]
    assert found["seconds"] > 0


@pytest.mark.parametrize(("ngpu", "rank"), [("", 0), ("8", 8), ("x", 1), ("8", -1)])
def test_a_rank_that_the_job_does_not_have(ngpu, rank):
    from titan_tune.titan.plugin.dry_run import simulated_world_size

    with pytest.raises(ValueError, match=f"TITAN_TUNE_DRY_RUN_RANK={rank} is not a rank of NGPU='{ngpu}'"):
        simulated_world_size({"NGPU": ngpu}, rank)
    assert simulated_world_size({"NGPU": "8"}, 7) == 8
