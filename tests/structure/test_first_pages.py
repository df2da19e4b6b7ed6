"""What README and docs/ tell somebody to type or to open is there: commands, flags, targets, files, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.config_docs import settings_type
from cli.main import main
from cli.settings import UpSettings
from shared.setting import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")
MAKE = re.compile(r"(?:^|`)(?:\$ )?make ([a-z][a-z-]*)", re.MULTILINE)
SERVICE = re.compile(r"python -m services\.([a-z]+)([^\n`#|]*)")
COMMAND = re.compile(r"mooncake ((?:[a-z][a-z-]*)(?: (?:run|ls|stat|bench|verify|fetch|path))?)([^\n`#|]*)")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")
SERVICES_OWN = {"config", "help"}


def code(page: Path) -> Iterator[str]:
    """What is set as code: fenced lines, continuation lines joined, and spans between backticks."""
    text = page.read_text().replace("\\\n", " ")
    for number, part in enumerate(text.split("```")):
        yield from part.splitlines() if number % 2 else re.findall(r"`([^`]+)`", part)


def anchors(page: Path) -> set[str]:
    """Headings, as GitHub makes anchors of them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def flags_of(command: str) -> set[str]:
    """All flags of ``mooncake COMMAND``. Raises KeyError when there is no such command."""
    if command in ("up", "store", "store run"):
        owner = UpSettings if command == "up" else settings_type("store")
        return {setting.name.replace("_", "-") for setting in settings_of(owner)} | SERVICES_OWN | {"json"}
    one: click.Command | None = main
    for word in command.split():
        assert isinstance(one, click.Group)
        one = one.get_command(click.Context(one), word)
        if one is None:
            raise KeyError(command)
    assert one is not None
    options = [name for option in one.params for name in (*option.opts, *option.secondary_opts)]
    return {name.removeprefix("--") for name in options} | {"help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {name} is not there"
        assert not anchor or anchor[1:] in anchors(target), f"{page.name}: {name or page.name} has no heading {anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_has_the_targets_that_are_named(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for line in code(page) for target in MAKE.findall(line)}
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_services_have_the_flags_that_are_named(page: Path) -> None:
    for line in code(page):
        for name, words in SERVICE.findall(line):
            known = {setting.name.replace("_", "-") for setting in settings_of(settings_type(name))} | SERVICES_OWN
            assert set(FLAG.findall(words)) <= known, line
        for name, words in COMMAND.findall(line):
            assert set(FLAG.findall(words)) <= flags_of(name), line
