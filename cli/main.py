"""The ``mooncake`` command. Subcommands are imported when they are asked for: ``--help`` stays quick."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform

import click

from cli.console import print_json
from shared.early_signals import end_when_told

DISTRIBUTION = "mooncake-mesh"

COMMANDS = {
    "up": "cli.up:up",
    "chat": "cli.chat:chat",
    "load": "cli.load.command:load",
    "calibrate": "cli.calibrate.command:calibrate",
    "store": "cli.store:store",
    "status": "cli.status:status",
    "trace": "cli.trace:trace",
    "simulate": "cli.simulate:simulate",
    "plan": "cli.plan_cluster:plan",
    "trace-stats": "cli.trace_stats:trace_stats_command",
    "doctor": "cli.doctor:doctor",
    "model": "cli.model:model",
    "config-docs": "cli.config_docs:config_docs",
}


class Lazy(click.Group):
    """A group whose commands are named in :data:`COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version(DISTRIBUTION), prog_name="mooncake")
def main() -> None:
    """Mooncake Mesh: KVCache-centric, disaggregated serving of large language models."""
    end_when_told()


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def version(as_json: bool) -> None:
    """Print the version."""
    own = importlib.metadata.version(DISTRIBUTION)
    if as_json:
        print_json({"version": own, "python": platform.python_version()})
    else:
        click.echo(own)
