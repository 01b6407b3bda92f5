"""How many candidates a second one core enumerates and checks.

    python benchmarks/enumerate_speed.py [SPACE.toml]

Counts every combination of the axes: all validity rules, identity and de-duplication, each once for every distinct
reading (docs/decisions/0004-large-spaces.md); candidates are not built, and nothing is estimated. Processor time,
the best of five runs: other work on the machine only slows it down.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from titan_tune.space.axes import Space
from titan_tune.space.enumerate import Enumeration, candidates
from titan_tune.space.file import load_space

DEFAULT = Path(__file__).parent.parent / "search_spaces" / "llama3_8b.toml"
REPEATS = 5


def main(path: Path) -> None:
    space = load_space(path)
    best_seconds, enumeration = min((timed(space) for _ in range(REPEATS)), key=lambda pair: pair[0])
    rejected = sum(enumeration.rejected.values())
    print(
        f"{path.name}: {enumeration.total:,} combinations ({len(enumeration.feasible):,} feasible, "
        f"{rejected:,} rejected, {enumeration.duplicates:,} duplicates) in {best_seconds:.3f} s of one core"
    )
    print(f"{enumeration.total / best_seconds:,.0f} combinations a second")
    checked = enumeration.total - rejected
    print(f"{checked / best_seconds:,.0f} a second counting only the {checked:,} that pass every rule")


def timed(space: Space) -> tuple[float, Enumeration]:
    start = time.process_time()
    enumeration = candidates(space)
    return time.process_time() - start, enumeration


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
