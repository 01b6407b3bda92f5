"""Custom import of a test: workers that ignore SIGTERM, with children in sessions of their own."""

import os
import signal
import subprocess
import sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "10000"], start_new_session=True)
print(f"rank {os.environ['RANK']} ignores SIGTERM", file=sys.stderr, flush=True)
