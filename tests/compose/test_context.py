"""What the images are made of reaches their build: packages, files, and the filter before them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copied() -> set[str]:
    """What the Dockerfile takes from the build context."""
    lines = (line.split() for line in (ROOT / "Dockerfile").read_text().splitlines())
    return {
        source for words in lines if words[:1] == ["COPY"] and not words[1].startswith("--") for source in words[1:-1]
    }


def test_what_is_copied_is_there_and_not_filtered_out() -> None:
    passed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied() <= passed
    assert [source for source in copied() if not (ROOT / source).exists()] == []


def test_every_package_of_the_wheel_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied()
