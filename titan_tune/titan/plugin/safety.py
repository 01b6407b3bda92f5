"""A worker does not outlive its launcher, even when the launcher dies by SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent(warden_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; end now if it already has.

    A worker that lost torchrun before this call was handed to the warden (a subreaper) or, with the
    warden gone too, to init.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() in (1, warden_pid):
        os.kill(os.getpid(), signal.SIGKILL)
