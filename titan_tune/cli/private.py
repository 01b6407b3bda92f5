"""What a search writes is for its user alone: jobs name paths, models and data sets, and logs show them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def private_files() -> Iterator[None]:
    """Folders 0700 and files 0600, also those of every process started meanwhile, whatever the user's umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
