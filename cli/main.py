"""The ``mooncake`` command."""

from __future__ import annotations

import importlib.metadata

import click

DISTRIBUTION = "mooncake-mesh"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version(DISTRIBUTION), prog_name="mooncake")
def main() -> None:
    """Mooncake Mesh: KVCache-centric, disaggregated serving of large language models."""
