"""``mooncake store``: the store on its own. Subcommands are imported when they are asked for."""

from __future__ import annotations

import importlib

import click

COMMANDS = {
    "run": "cli.store_run:run",
    "ls": "cli.store_show:ls",
    "stat": "cli.store_show:stat",
    "bench": "cli.store_bench:bench",
    "verify": "cli.store_verify:verify",
}


class StoreGroup(click.Group):
    """What is none of :data:`COMMANDS` is a flag of ``run``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if not first or (first.startswith("-") and first not in ("-h", "--help")):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(
    short_help="Run a store without a model; look into stores.",
    cls=StoreGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
)
def store() -> None:
    """A store without any engine: run an agent, look into stores, measure and verify them. Bare, it runs one."""
