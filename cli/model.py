"""``mooncake model``: fetch the default model, or say where a model lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cli.console import err, print_json
from shared.errors import MooncakeError
from shared.model import Progress, ProgressCallback, resolve_model

COLUMNS = (TextColumn("{task.description:<9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A callback that shows each stage as a bar on stderr; on no terminal, as one line a stage."""
    with Bar(*COLUMNS, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        seen: set[str] = set()

        def show(step: Progress) -> None:
            if step.stage not in seen:
                seen.add(step.stage)
                if not err.is_terminal:
                    err.print(f"model: {step.stage}")
                bar.reset(task, description=step.stage, total=step.total or None)
            bar.update(task, completed=step.done, total=step.total or None)

        yield show


def find_model(name: str, fetch: bool = True) -> Path:
    """The folder of a model; the default one is fetched first if need be, with a bar. Raises MooncakeError."""
    with progress_bar() as show:
        return resolve_model(name, progress=show, fetch=fetch)


@click.group()
def model() -> None:
    """Fetch the default model into the cache, or show where it is."""


@model.command(short_help="Fetch the default model, unless it is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def fetch(as_json: bool) -> None:
    """Fetch the default model into the cache (MOONCAKE_CACHE, else ~/.cache/mooncake). Safe to repeat."""
    _show("", True, as_json)


@model.command(short_help="Print the folder of a model.")
@click.argument("name", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def path(name: str, as_json: bool) -> None:
    """Print the folder of model NAME (a folder or hub id; default: the default model), without fetching it."""
    _show(name, False, as_json)


def _show(name: str, fetch: bool, as_json: bool) -> None:
    try:
        folder = find_model(name, fetch)
    except MooncakeError as error:
        raise click.ClickException(error.message) from None
    if as_json:
        print_json({"model": name or "default", "path": str(folder)})
    else:
        print(folder)
