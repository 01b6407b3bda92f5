from __future__ import annotations

import pytest

pytestmark = pytest.mark.torchtitan

MIB = 1 << 20


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([], []),
        ([MIB // 2], [MIB // 2]),
        # the first bucket closes at 1 MiB, the others at the cap
        ([MIB, 40 * MIB, 60 * MIB, 10 * MIB], [MIB, 100 * MIB, 10 * MIB]),
        # a gradient larger than a bucket is one by itself
        ([500 * MIB, 500 * MIB], [500 * MIB, 500 * MIB]),
    ],
)
def test_bucket_sizes(gradients: list[int], expected: list[int]) -> None:
    from titan_tune.trace.replicated import bucket_sizes

    assert bucket_sizes(gradients, 100 * MIB) == expected
    assert sum(bucket_sizes(gradients, 100 * MIB)) == sum(gradients)
