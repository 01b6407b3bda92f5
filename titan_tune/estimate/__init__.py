"""Memory and step time from closed forms; no torch import."""

from titan_tune.estimate.advice import Suggestion, suggestions
from titan_tune.estimate.memory import estimate_memory
from titan_tune.estimate.minimum import Minimum, minimum_gpus
from titan_tune.estimate.parameters import NotCoveredError
from titan_tune.estimate.step_time import estimate_step_time

__all__ = [
    "Minimum",
    "NotCoveredError",
    "Suggestion",
    "estimate_memory",
    "estimate_step_time",
    "minimum_gpus",
    "suggestions",
]
