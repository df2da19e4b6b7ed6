"""A test of no other use than that its run is killed: ``test_guarded.py`` runs it. It starts processes and stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
time.sleep(1000)
"""


def test_that_never_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        Path(os.environ["LEFT"]).write_text(f"{child.pid} {child.stdout.readline()}")
        time.sleep(1000)
