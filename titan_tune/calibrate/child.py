"""One rank of a calibration, started by torchrun: ``-m titan_tune.calibrate.child REQUEST.json``.

All ranks measure the same things at the same time, as they would train, and the slowest counts. Whether a
collective is still measured rank 0 decides, so that no rank waits for one that has run out of time.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_tune.calibrate import kernels
from titan_tune.calibrate.plan import CollectiveTask, LaunchTask, Task, seconds_each, tasks
from titan_tune.estimate.collectives import Op

GROUP_TIMEOUT = timedelta(seconds=120)
COLLECTIVE_REPEATS = 5
"""At least, between two questions to the clock."""


def main() -> None:
    """Measure what the request asks for; rank 0 writes the result."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    warnings.filterwarnings("ignore")
    device = _device(request["device"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT, device_id=device if backend == "nccl" else None)
    try:
        document = _Run(device, request["seconds"]).document()
        if dist.get_rank() == 0:
            document |= {"backend": backend, "nccl": _nccl_version(backend)}
            Path(request["output"]).write_text(json.dumps(document), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _nccl_version(backend: str) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else None


class _Run:
    """The measurements of one rank."""

    def __init__(self, device: torch.device, budget_seconds: float) -> None:
        self.device = device
        self.world_size = dist.get_world_size()
        # decisions travel beside the measured backend
        self.control = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        self.tasks = tasks(device=device.type, world_size=self.world_size, capability=capability)
        self.each = seconds_each(budget_seconds, len(self.tasks))
        dist.barrier(group=self.control)
        self.began = time.monotonic()
        self.deadline = self.began + budget_seconds

    def document(self) -> dict[str, Any]:
        """Everything measured, the slowest rank's figures."""
        results, problems = [], []
        for task in self.tasks:
            if not self._all_agree(time.monotonic() < self.deadline):
                problems.append(f"{_text(task)}: no time left")
                continue
            timed, problem = self._time(task)
            if problem is not None:
                problems.append(f"{_text(task)}: {problem}")
            else:
                results.append((task, self._slowest(timed)))
        return _document(results, problems, self.world_size, time.monotonic() - self.began)

    def _time(self, task: Task) -> tuple[dict[str, float], str | None]:
        """Seconds by name, or why there are none; the same on every rank."""
        problem, timed = None, {}
        try:
            timed = self._collective(task) if isinstance(task, CollectiveTask) else self._kernel(task)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            problem = str(error).strip().split("\n")[0][:200] or type(error).__name__
        found: list[str | None] = [None] * self.world_size
        dist.all_gather_object(found, problem, group=self.control)
        return timed, next((text for text in found if text is not None), None)

    def _kernel(self, task: Task) -> dict[str, float]:
        if isinstance(task, LaunchTask):
            return {"seconds": kernels.launch_seconds(self.device)}
        timers = kernels.steps(task, self.device)
        return {name: kernels.median_seconds(step, self.device, self.each) for name, step in timers.items()}

    def _collective(self, task: CollectiveTask) -> dict[str, float]:
        step = _collective_step(task, self.device, self.world_size)
        for _ in range(2):
            step()
        kernels.synchronize(self.device)
        timings: list[float] = []
        began = time.monotonic()
        while not timings or self._all_agree(time.monotonic() - began < self.each):
            timings.append(kernels.batch_seconds(step, self.device, COLLECTIVE_REPEATS))
        return {"seconds": kernels.median(timings)}

    def _slowest(self, timed: dict[str, float]) -> dict[str, float]:
        found: list[dict[str, float]] = [{}] * self.world_size
        dist.all_gather_object(found, timed, group=self.control)
        return {name: max(other[name] for other in found) for name in timed}

    def _all_agree(self, mine: bool) -> bool:
        """Rank 0's answer."""
        answer = [mine]
        dist.broadcast_object_list(answer, src=0, group=self.control)
        return answer[0]


def _collective_step(task: CollectiveTask, device: torch.device, world_size: int) -> Any:
    """A call that starts the collective; buffers are bf16."""
    elements = task.bytes // 2 // world_size * world_size
    whole = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    part = torch.zeros(elements // world_size, dtype=torch.bfloat16, device=device)
    if task.op is Op.ALL_GATHER:
        return lambda: dist.all_gather_into_tensor(whole, part)
    if task.op is Op.REDUCE_SCATTER:
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if task.op is Op.ALL_REDUCE:
        return lambda: dist.all_reduce(whole)
    received = torch.empty_like(whole)
    if task.op is Op.ALL_TO_ALL:
        return lambda: dist.all_to_all_single(received, whole)
    rank = dist.get_rank()

    def pass_on() -> None:
        sends = dist.P2POp(dist.isend, whole, (rank + 1) % world_size)
        receives = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return pass_on


def _text(task: Task) -> str:
    values = " ".join(str(value) for value in asdict(task).values())
    return f"{type(task).__name__.removesuffix('Task').lower()} {values}".strip()


def _document(
    results: list[tuple[Task, dict[str, float]]], problems: list[str], world_size: int, seconds: float
) -> dict[str, Any]:
    """As ``Calibration`` has it, fingerprint left out."""
    document: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "world_size": world_size,
        "torch": torch.__version__,
        "matmuls": [],
        "attention": [],
        "copies": [],
        "collectives": [],
        "not_measured": problems,
        "measured": len(results),
    }
    lists = {"Matmul": "matmuls", "Attention": "attention", "Copy": "copies", "Collective": "collectives"}
    for task, timed in results:
        kind = type(task).__name__.removesuffix("Task")
        if kind == "Launch":
            document["launch_seconds"] = timed["seconds"]
        else:
            extra = {"group_size": world_size} if kind == "Collective" else {}
            document[lists[kind]].append({**asdict(task), **extra, **timed})
    return document


if __name__ == "__main__":
    main()
