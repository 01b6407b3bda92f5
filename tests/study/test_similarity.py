import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.study.similarity import label_similarity

AC = ("none", "selective-op", "selective-2", "full", "memory_budget-0.5")
COMPILE = ("off", "default", "max-autotune", "max-autotune-no-cudagraphs")
FLOAT8 = ("tensorwise", "rowwise", "tensorwise-fsdp_all_gather")
NUMBERS = ("1", "2", "4", "64", "0", "0.5", "nan", "1e400")
LAYOUTS = ("dp_shard=2", "dp_shard=4,tp=2", "tp=2", "pp=2,schedule=1F1B")
LABELS = st.sampled_from(("", "base", *AC, *COMPILE, *FLOAT8, *NUMBERS, *LAYOUTS)) | st.text(max_size=6)


@given(labels=st.lists(LABELS, min_size=1, max_size=12, unique=True))
def test_similarities_are_a_covariance(labels):
    matrix = np.array([[label_similarity(a, b) for b in labels] for a in labels])
    assert np.array_equal(matrix, matrix.T)
    assert (np.diag(matrix) == 1.0).all()
    assert matrix.min() >= 0.0
    assert np.linalg.eigvalsh(matrix).min() > 0.0


@given(a=LABELS, b=LABELS)
def test_only_equal_labels_are_wholly_alike(a, b):
    assert (label_similarity(a, b) == 1.0) == (a == b)


@pytest.mark.parametrize(
    ("label", "near", "far"),
    [
        ("4", "8", "32"),
        ("8", "4", "1"),
        ("tensorwise", "tensorwise-fsdp_all_gather", "rowwise"),
        ("tensorwise", "rowwise", "off"),
        ("max-autotune", "max-autotune-no-cudagraphs", "default"),
        ("dp_shard=2,tp=2", "dp_shard=4,tp=2", "pp=4"),
        ("dp_shard=2,tp=2", "tp=4", "cp=4"),
        ("selective-op", "selective-2", "full"),
    ],
)
def test_what_is_nearer_teaches_more(label, near, far):
    assert label_similarity(label, near) > label_similarity(label, far)
