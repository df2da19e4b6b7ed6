"""What makes ``make`` fill wheels/ anew: another version of torch in constraints.txt, or another TORCH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GIVEN = "torch --index-url http://index.invalid"


def would_run(folder: Path, *variables: str) -> str:
    """The commands that would fill wheels/; "" when they are as they should be."""
    command = ["make", "--dry-run", "wheels/.filled", *variables]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout if "pip download" in done.stdout else ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nnumpy==2.3.5\n")
    (tmp_path / "wheels").mkdir()
    return tmp_path


def test_from_nothing_the_version_of_the_constraints_is_taken(folder: Path) -> None:
    assert "torch==2.13.0+cpu" in would_run(folder)


@pytest.mark.parametrize("torch", ["", GIVEN])
def test_what_is_there_stays_until_another_version_is_wanted(folder: Path, torch: str) -> None:
    (folder / "wheels" / ".filled").write_text(f"2.13.0\n{torch}\n")
    assert not would_run(folder)
    assert not would_run(folder, f"TORCH={torch}")
    (folder / "constraints.txt").write_text("torch==2.13.0\nnumpy==3.0.0\n")
    assert not would_run(folder), "another library's version says nothing about torch"
    (folder / "constraints.txt").write_text("torch==2.14.0\n")
    assert (torch or "torch==2.14.0+cpu") in would_run(folder), "from where it came before"


def test_another_torch_fills_them_anew(folder: Path) -> None:
    (folder / "wheels" / ".filled").write_text("2.13.0\n\n")
    assert GIVEN in would_run(folder, f"TORCH={GIVEN}")


def test_those_of_a_make_that_remembered_nothing_are_filled_anew(folder: Path) -> None:
    (folder / "wheels" / ".filled").touch()
    assert would_run(folder)
