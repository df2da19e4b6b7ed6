"""The reference in docs/api.md is what the server says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_is_that_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "api.py", "--check"], capture_output=True, text=True, timeout=250, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
