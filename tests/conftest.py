"""Hypothesis profiles: the suite repeats its examples; ``pytest --hypothesis-profile=explore`` looks for new ones."""

from hypothesis import settings

# no deadlines: they are timed assertions
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("suite")
