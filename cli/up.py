"""``mooncake up``: a whole mesh on this machine, supervised; Ctrl-C stops all of it."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import click
from rich.text import Text

from cli import first_look
from cli.certificates import Certificate
from cli.console import Lines, err
from cli.foreground import Foreground
from cli.model import find_model
from cli.plan import Plan, Wiring, variables
from cli.probe import why_not_bindable, why_unreachable
from cli.ready import Ready
from cli.sections import NO_SECTIONS, SERVICES, Sections, read, told
from cli.settings import UpSettings
from cli.supervisor import WRONG_SETTING, Supervisor
from shared.addresses import shown
from shared.config import config_file, from_flags, load, usage
from shared.embedded import free_port
from shared.errors import ConfigError, DeadlineExceeded, MooncakeError
from shared.model import served_name
from shared.setting import settings_of

PAUSE = 0.1
SILENCE = 10.0
"""Seconds after which somebody who waits wants to know for what."""

TALKERS = ("nats", "redis")
"""Servers that say much at their start, nothing of it about the mesh."""


@click.command(
    short_help="Start a whole mesh on this machine.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def up(arguments: tuple[str, ...]) -> None:
    """Start a whole mesh on this machine (`mooncake up --help` lists its settings)."""
    if {"-h", "--help"} & set(arguments):
        click.echo(f"{inspect.getdoc(UpSettings)}\n\n{usage(settings_of(UpSettings), 'mooncake up')}")
        return
    try:
        others = set[str]().union(*map(variables, SERVICES))
        settings = load(UpSettings, arguments, prog="up", others=others)
        flags = from_flags(settings_of(UpSettings), arguments)
        config = config_file(flags, os.environ)
        settings, sections = read(config, settings, told(arguments, os.environ))
        code = asyncio.run(Up(settings, config, sections).run())
    except ConfigError as error:
        raise Refused(error.message) from None
    except MooncakeError as error:
        raise click.ClickException(error.message) from None
    sys.exit(code)


class Refused(click.ClickException):
    """A setting is wrong, or cannot be had: the same exit code as a service's."""

    exit_code = WRONG_SETTING


class Up:
    """One run of a mesh, from nothing to ready to nothing."""

    def __init__(self, settings: UpSettings, config: str = "", sections: Sections = NO_SECTIONS) -> None:
        self.settings = settings
        self.config = config
        self.sections = sections
        self._begin = time.monotonic()
        self._lines = Lines(() if settings.log_level == "debug" else TALKERS)

    async def run(self) -> int:
        """The exit code. Raises MooncakeError when the mesh cannot be brought up."""
        port = self.settings.port or free_port()
        self._look_first(port)
        with first_look.port_claimed(self.settings.host, port), self._tls() as files:
            plan = Plan(self.settings, self._wiring(port, files), os.environ)
            err.print(Text(f"Starting {plan.summary()}", style="bold"), soft_wrap=True)
            async with Supervisor(plan.wiring.mark, self._lines) as supervisor:
                await Foreground(supervisor).run(self._serve(plan, supervisor))
        return 0

    @contextmanager
    def _tls(self) -> Iterator[dict[str, str]]:
        """The files of the stores' certificate, as settings of a store; empty without TLS. Raises ConfigError."""
        files = self.settings.tls_files
        if any(files.values()):
            yield {name: os.path.abspath(path) for name, path in files.items()}
        elif self.settings.data_tls:
            with Certificate.make() as made:
                yield dict(zip(files, (made.cert, made.key, made.cert), strict=True))
        else:
            yield {}

    def _look_first(self, port: int) -> None:
        """Everything that can be wrong and is cheap to see, before a process or a download starts."""
        host = self.settings.host
        if why := why_not_bindable(host, port):
            raise ConfigError(f"cannot serve on {host}:{port}: {why} (choose another with --port)", field="port")
        for name, url in (("nats", self.settings.nats), ("redis", self.settings.redis)):
            if url:
                first_look.server_answers(name, url)
        for name, path in self.settings.tls_files.items():
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"--{name.replace('_', '-')}: {path} cannot be read", field=name)
        if self.settings.ssd_path:
            first_look.folder_takes_files("--ssd-path", self.settings.ssd_path)
        if self.settings.api_keys:
            first_look.keys_can_be_read(self.settings.api_keys)
        if self.settings.latency_model:
            first_look.is_calibration(self.settings.latency_model)
        first_look.pools_fit(self.settings.prefill + self.settings.decode, self.settings.pool_bytes)

    def _wiring(self, port: int, tls: dict[str, str]) -> Wiring:
        return Wiring(
            mark=secrets.token_hex(4),
            secret=secrets.token_hex(32),
            nats=self.settings.nats or f"nats://127.0.0.1:{free_port()}",
            redis=self.settings.redis or f"redis://127.0.0.1:{free_port()}/0",
            folder=self._folder(),
            served=served_name(self.settings.model),
            port=port,
            config=self.config,
            sections=self.sections,
            colour=err.is_terminal and not err.no_color,
            tls=tls,
        )

    def _folder(self) -> str:
        try:
            return str(find_model(self.settings.model))
        except ConfigError as error:
            raise ConfigError(f"--model: {error.message}" if self.settings.model else error.message) from None

    async def _serve(self, plan: Plan, supervisor: Supervisor) -> None:
        """Start everything in its order, say when it is ready, then stay."""
        deadline = self._begin + self.settings.ready_timeout
        for spec in plan.servers():
            await supervisor.start(spec)
        for url in (plan.wiring.nats, plan.wiring.redis):
            await self._until(partial(_reachable, url), deadline, f"{shown(url)} to answer")
        for spec in (*plan.stores(), *plan.engines(), *plan.conductors()):  # these wait for each other by themselves
            await supervisor.start(spec)
        ready = Ready(plan)
        await self._until(ready.look, deadline, "the mesh to be ready", lambda: ready.reason)
        supervisor.settled()
        ready.say(time.monotonic() - self._begin, self.settings.json)
        await asyncio.Event().wait()

    async def _until(
        self, look: Callable[[], bool], deadline: float, what: str, why: Callable[[], str] = lambda: ""
    ) -> None:
        say_at = time.monotonic() + SILENCE
        while not await asyncio.to_thread(look):
            now = time.monotonic()
            if now > deadline:
                raise DeadlineExceeded(f"waited {self.settings.ready_timeout:g} s for {what}; {why()}".rstrip("; "))
            if now > say_at:
                say_at = now + SILENCE
                waited = f"waiting for {what} ({now - self._begin:.0f} s): {why()}".rstrip(": ")
                err.print(Text(waited, style="dim"), soft_wrap=True)
            await asyncio.sleep(PAUSE)


def _reachable(url: str) -> bool:
    return not why_unreachable(url)
