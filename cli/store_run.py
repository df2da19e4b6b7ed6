"""``mooncake store run``: a store agent without any engine, and a Redis where none is named; Ctrl-C ends both."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
import msgspec
from rich.text import Text

from cli import first_look
from cli.child import Spec
from cli.config_docs import settings_type
from cli.console import Lines, bytes_text, out, print_json, redis_option, typed
from cli.foreground import Foreground
from cli.leftovers import MARK
from cli.probe import why_unreachable
from cli.supervisor import WRONG_SETTING, Supervisor
from shared.config import CommonSettings, config_file, from_flags, from_variables, from_yaml, load, usage
from shared.embedded import RedisServer, free_port
from shared.errors import ConfigError, DeadlineExceeded, MooncakeError, Unavailable
from shared.metadata import Metadata
from shared.records import AgentRecord
from shared.setting import settings_of

SERVERS, STORE = range(2)
GRACE = {SERVERS: 1.0, STORE: 3.0}
READY_TIMEOUT = 300.0
PAUSE = 0.1
SPACES = 4
"""Namespaces that a pool is for, where nobody says how much each gets: an engine wants one, programs have several."""

JSON = "--json"


class Refused(click.ClickException):
    """A setting is wrong: the same exit code as a service's."""

    exit_code = WRONG_SETTING


@click.command(
    short_help="Run a store agent.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> None:
    """Run a store agent, without any engine (`mooncake store run --help` lists its settings).

    With a Redis of its own, unless --redis, MOONCAKE_REDIS or the configuration file names one. Each namespace gets a
    quarter of the pool, unless --slab-bytes says otherwise. --json: the ready line is one JSON document.
    """
    if {"-h", "--help"} & set(arguments):
        settings = settings_of(settings_type("store"))
        click.echo(f"{inspect.getdoc(run.callback)}\n\n{usage(settings, 'mooncake store run')}")
        return
    argv = [word for word in arguments if word != JSON]
    try:
        asyncio.run(Standalone(plan(argv), JSON in arguments).run())
    except ConfigError as error:
        raise Refused(error.message) from None
    except MooncakeError as error:
        raise click.ClickException(error.message) from None


@dataclass(frozen=True)
class Plan:
    """What is started. ``embedded``: the port of a Redis of ours, 0 for somebody else's at ``redis``. ``pool`` and
    ``slab``: bytes of the agent, and of each namespace in it (0: the first one has all)."""

    argv: Sequence[str]
    id: str
    mark: str
    mesh: str
    redis: str
    embedded: int
    secret: bool
    pool: int
    slab: int

    def specs(self) -> list[Spec]:
        env = os.environ | {MARK: self.mark, "MOONCAKE_REDIS": self.redis, "PYTHONUNBUFFERED": "1"}
        specs = []
        if self.embedded:
            # with a process title of its own it would overwrite the environment that carries our mark
            server = [*RedisServer(self.embedded).command("/"), "--set-proc-title", "no"]
            specs.append(Spec("redis", server, SERVERS, env, GRACE[SERVERS]))
        agent = [sys.executable, "-P", "-m", "services.store", *self.argv]
        return [*specs, Spec("store", agent, STORE, env, GRACE[STORE])]

    def memory(self) -> str:
        """Who gets how much, and how that is changed."""
        each = f"{bytes_text(self.slab)} for each namespace" if self.slab else "all of it for the first namespace"
        return f"{bytes_text(self.pool)} of memory, {each} (--pool-bytes, --slab-bytes)"

    def options(self) -> str:
        """For the commands that look at this store."""
        mesh = "" if self.mesh == "default" else f" --mesh {self.mesh}"
        return f" {redis_option(self.redis)}{mesh}"


def plan(argv: Sequence[str]) -> Plan:
    """Raises ConfigError, also when the Redis that is named does not answer."""
    kind = settings_type("store")
    settings = load(kind, argv, prog="mooncake store run")
    assert isinstance(settings, CommonSettings)
    said = named_settings(kind, argv)
    given = msgspec.structs.asdict(settings)
    first_look.pools_fit(1, given["pool_bytes"])
    if given["ssd_path"]:
        first_look.folder_takes_files("--ssd-path", given["ssd_path"])
    named = "redis" in said
    if named:
        first_look.server_answers("redis", settings.redis)
    embedded = 0 if named else free_port()
    slab = given["slab_bytes"] if "slab_bytes" in said else given["pool_bytes"] // SPACES
    id = given["id"] or f"store-{secrets.token_hex(3)}"
    words = [*argv, *([] if given["id"] else ["--id", id])]
    words += [] if "slab_bytes" in said else ["--slab-bytes", str(slab)]
    words += [] if given["log_format"] != "auto" else ["--log-format", "console"]
    redis = settings.redis if named else f"redis://127.0.0.1:{embedded}/0"
    return Plan(
        words,
        id,
        secrets.token_hex(4),
        settings.mesh,
        redis,
        embedded,
        bool(given["secret"]),
        given["pool_bytes"],
        slab,
    )


def named_settings(kind: type[msgspec.Struct], argv: Sequence[str]) -> set[str]:
    """What somebody has chosen, wherever settings come from."""
    settings = settings_of(kind)
    flags = from_flags(settings, argv)
    path = config_file(flags, os.environ)
    found = set(flags) | set(from_variables(settings, os.environ))
    return found | set(from_yaml(settings, path, "store") if path else ())


class Standalone:
    """One run, from nothing to ready to nothing."""

    def __init__(self, plan: Plan, as_json: bool) -> None:
        self._plan = plan
        self._as_json = as_json
        self._begin = time.monotonic()

    async def run(self) -> None:
        """Until somebody wants to stop. Raises MooncakeError when the agent cannot be brought up."""
        async with Supervisor(self._plan.mark, Lines(("redis",))) as supervisor:
            await Foreground(supervisor).run(self._serve(supervisor))

    async def _serve(self, supervisor: Supervisor) -> None:
        for spec in self._plan.specs():
            await supervisor.start(spec)
            if spec.stage == SERVERS:
                await self._redis_answers()
        record = await self._registered()
        supervisor.settled()
        self._say(record)
        await asyncio.Event().wait()

    async def _redis_answers(self) -> None:
        while why := await asyncio.to_thread(why_unreachable, self._plan.redis):
            self._check_deadline(f"Redis to answer; {why}")
            await asyncio.sleep(PAUSE)

    async def _registered(self) -> AgentRecord:
        async with Metadata(self._plan.redis, self._plan.mesh) as metadata:
            while True:
                try:
                    agents = await metadata.agents()
                except Unavailable:
                    agents = []
                for record in agents:
                    if record.ref.id == self._plan.id:
                        return record
                self._check_deadline("the agent to register")
                await asyncio.sleep(PAUSE)

    def _check_deadline(self, what: str) -> None:
        if time.monotonic() > self._begin + READY_TIMEOUT:
            raise DeadlineExceeded(f"waited {READY_TIMEOUT:g} s for {what}")

    def _say(self, record: AgentRecord) -> None:
        """On stdout: one JSON document, or a few lines with commands to copy."""
        seconds = time.monotonic() - self._begin
        if self._as_json:
            document = {"ready": True, "id": record.ref.id, "socket": record.socket, "redis": self._plan.redis}
            document |= {"port": record.port, "metrics": record.metrics, "mesh": self._plan.mesh}
            print_json(document | {"mesh_id": self._plan.mark, "ready_s": round(seconds, 3)})
            return
        out.print()
        out.print(Text(f"Ready after {seconds:.1f} s: store agent {record.ref.id}", style="bold green"))
        click.echo(f"programs of this machine attach at {record.socket}, other agents at {record.host}:{record.port}")
        click.echo(f"{self._plan.memory()}\n")
        if self._plan.secret:
            click.echo("(give the commands the same MOONCAKE_SECRET)")
        options = self._plan.options()
        for command in ("ls", "verify", f"bench --socket {record.socket}"):
            click.echo(f"{typed()} store {command}{options}")
        click.echo(f"{typed()} store run{options} --socket @mooncake-store-2   # a second agent\n\nCtrl-C stops it.\n")
