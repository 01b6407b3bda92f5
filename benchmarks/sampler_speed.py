"""How long choosing the next probe takes.

    python benchmarks/sampler_speed.py [CANDIDATES] [OBSERVATIONS]

A study in memory with finished trials, six axes. Processor time of ``FeasibleSampler.proposal``, which reads the
trials, scores every candidate and takes the best; the best of ``REPEATS`` suggestions, each with one more trial
than the one before.
"""

from __future__ import annotations

import itertools
import random
import sys
import time

import optuna
from optuna.trial import create_trial

from titan_tune.study.propose import PoolItem
from titan_tune.study.sampler import FeasibleSampler, distributions

AXES = {
    "activation_checkpoint": ("none", "selective-op", "selective-2", "full", "memory_budget-0.5"),
    "compile": ("off", "default", "max-autotune-no-cudagraphs"),
    "parallelism": tuple(f"layout-{number}" for number in range(60)),
    "local_batch_size": ("1", "2", "4", "8", "16"),
    "float8": ("off", "tensorwise", "rowwise", "tensorwise-fsdp_all_gather"),
    "parallelism.fsdp_reshard_after_forward": ("default", "always", "never"),
}
REPEATS = 10


def pool_of(count: int) -> list[PoolItem]:
    rng = random.Random(0)
    every = list(itertools.product(*AXES.values()))
    chosen = rng.sample(every, count)
    speeds = sorted((rng.lognormvariate(9.0, 0.4) for _ in chosen), reverse=True)
    return [
        PoolItem(f"{number:012x}", dict(zip(AXES, labels, strict=True)), speed)
        for number, (labels, speed) in enumerate(zip(chosen, speeds, strict=True))
    ]


def main(candidates: int, observations: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pool, rng = pool_of(candidates), random.Random(1)
    start = time.process_time()
    sampler = FeasibleSampler(pool, AXES)
    built = time.process_time() - start
    study = optuna.create_study(direction="maximize", sampler=sampler)
    dists = distributions(AXES)
    seconds = []
    for number in range(observations + REPEATS):
        start = time.process_time()
        proposal = sampler.proposal(study)
        seconds.append(time.process_time() - start)
        assert proposal is not None
        item = sampler.item(proposal)
        if number % 5 == 4:
            trial = create_trial(
                state=optuna.trial.TrialState.FAIL, params=dict(item.choices), distributions=dists
            )
        else:
            measured = item.predicted * rng.lognormvariate(-0.2, 0.1)
            trial = create_trial(value=measured, params=dict(item.choices), distributions=dists)
        study.add_trial(trial)
    best = min(seconds[observations:])
    print(
        f"{candidates:,} candidates, {observations} to {observations + REPEATS} finished trials: "
        f"{1000 * best:.1f} ms a suggestion (sampler built in {1000 * built:.0f} ms)"
    )


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given if given else (10_000, 30)))
