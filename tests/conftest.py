"""Hypothesis profiles. ``pytest --hypothesis-profile=explore`` looks for new counterexamples; the suite repeats its own."""

from hypothesis import settings

# no deadlines: they are timed assertions
settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=400, print_blob=True)
settings.load_profile("suite")
