"""Scripts and streams on Redis 7.0 itself, which production runs, as on the embedded server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.embedded import SERVER_VARIABLE

TESTS = Path(__file__).parents[1]
FILES = ("metadata/test_metadata.py", "index/test_indexing.py", "index/test_index_scripts.py", "dispatch/test_watch.py")


def version() -> str:
    """Of the redis-server of PATH, "" without one."""
    if shutil.which("redis-server") is None:
        return ""
    said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, timeout=60).stdout
    return found[1] if (found := re.search(r"\bv=(\S+)", said)) else ""


@pytest.mark.rig
@pytest.mark.skipif(not version(), reason="no redis-server: Debian's package of that name")
def test_what_passes_on_the_embedded_server_passes_on_redis() -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in FILES)]
    env = os.environ | {SERVER_VARIABLE: "redis-server"}
    done = subprocess.run(argv, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b[1-9]\d+ passed", done.stdout), done.stdout[-500:]
