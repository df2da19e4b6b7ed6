"""What a pytest run has started and written ends with it, also where nobody could end it: after ``kill -9``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import alive, eventually

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider")
"""Without the project's settings and plugins, which take seconds to load."""


def test_nothing_that_tests_start_outlives_a_killed_run(tmp_path: Path) -> None:
    """Of a worker's test, whose run is killed: the worker does not see it coming, either."""
    file, left = Path(__file__).with_name("leaves_processes.py"), tmp_path / "left"
    argv = [sys.executable, "-m", "pytest", "-q", *ALONE, "-p", "xdist.plugin", "-n1", str(file)]
    env = os.environ | {"LEFT": str(left), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as run:
        try:
            assert eventually(lambda: run.poll() is not None or (left.exists() and left.read_text().endswith("\n")))
            pids = [int(pid) for pid in left.read_text().split()]
            assert len(pids) == 2 and all(map(alive, pids))
        finally:
            run.kill()
    assert eventually(lambda: not any(map(alive, pids)))


def test_what_a_killed_process_leaves_lies_in_the_folder_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    code = "import os; from shared.embedded import RedisServer; s = RedisServer().start(); os.kill(os.getpid(), 9)"
    before = set(leftover_folders())
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    (left,) = set(leftover_folders()) - before
    assert left.is_relative_to(tmp_path_factory.getbasetemp())


def leftover_folders() -> Iterator[Path]:
    return Path(tempfile.gettempdir()).glob("mooncake-embedded-*")
