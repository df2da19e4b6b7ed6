"""How the files of the project look: none too long, nothing left behind, tests where they are looked for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ("services", "shared", "cli", "simulator", "benchmarks")
CODE = (*SOURCE, "tests")
LONGEST = 400
LEFT_BEHIND = ("TO" + "DO", "FIX" + "ME", "Not" + "ImplementedError", "break" + "point()", "/wo" + "rk/", "/ro" + "ot/")
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".lua", ".cfg", ""}


def code_files(folders: tuple[str, ...] = CODE) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def committed() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        pytest.skip("this is no git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_too_long() -> None:
    long = {str(p.relative_to(ROOT)): n for p in code_files() if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long, f"files are at most {LONGEST} lines long; split along a noun"


def test_every_module_says_what_it_is() -> None:
    silent = [str(p.relative_to(ROOT)) for p in code_files(SOURCE) if p.read_text().strip() and not _has_docstring(p)]
    assert not silent


def _has_docstring(path: Path) -> bool:
    return path.read_text().lstrip().startswith(('"""', "#!", 'r"""'))


def test_nothing_is_left_behind() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in committed()
        if path.suffix in TEXT and path.name != "LICENSE"
        for word in LEFT_BEHIND
        if word in path.read_text(encoding="utf-8", errors="replace")
    ]
    assert not found


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_is_large() -> None:
    large = [str(path.relative_to(ROOT)) for path in committed() if path.stat().st_size > 2 << 20]
    assert not large


def test_profiles_decide_how_many_examples_are_drawn() -> None:
    """A number of a test's own is one that ``--hypothesis-profile thorough`` cannot multiply."""
    fixed = re.compile(r"max_examples=\d")
    own = [str(p.relative_to(ROOT)) for p in code_files(("tests",)) if fixed.search(p.read_text())]
    assert own == ["tests/conftest.py"]
