"""docs/architecture.md has a line for every module, and each line is the module's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_line_per_module_is_true() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "modules.py", "--check"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
