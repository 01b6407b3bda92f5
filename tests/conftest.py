"""One Hypothesis profile: no deadlines (a timed assertion), the same examples every time."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("suite")
