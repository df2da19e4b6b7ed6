"""What the commands that look into stores share: options, the metadata, and how one names an agent."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

import click

from cli.probe import why_unreachable
from shared.addresses import shown
from shared.blocks import KEY
from shared.config import CommonSettings
from shared.errors import MooncakeError, Unavailable
from shared.index.lookup import census
from shared.metadata import Metadata
from shared.records import AgentRecord
from shared.setting import settings_of

P = ParamSpec("P")
TLS = {
    "data_tls_cert": "PEM file of a certificate, where agents talk over TLS.",
    "data_tls_key": "PEM file of its key.",
    "data_tls_ca": "PEM file of the authorities whose certificates count.",
}
DEFAULT = {setting.name: setting.default for setting in settings_of(CommonSettings)}


@dataclass(frozen=True)
class Link:
    """Where a store's metadata is. ``secret`` and ``tls`` (files of certificate, key and authorities) are those of the
    data plane."""

    redis: str
    mesh: str
    secret: str = ""
    tls: tuple[str, str, str] = ("", "", "")

    @asynccontextmanager
    async def metadata(self) -> AsyncIterator[Metadata]:
        if why := await asyncio.to_thread(why_unreachable, self.redis, 3.0):
            where = "`mooncake up` and `mooncake store` say where theirs is: --redis or MOONCAKE_REDIS"
            raise Unavailable(f"no Redis answers at {shown(self.redis)}: {why} ({where})")
        async with Metadata(self.redis, self.mesh) as metadata:
            yield metadata

    async def counted(self, metadata: Metadata) -> tuple[list[AgentRecord], dict[bytes, int]]:
        """Living agents by id, and how many blocks the index has of each code. Raises Unavailable."""
        agents = sorted(await metadata.agents(), key=lambda agent: agent.ref.id)
        return agents, await census(metadata.link, self.mesh)


def linked(function: Callable[..., None]) -> Callable[..., None]:
    """``--redis``, ``--mesh`` and ``--json``; the first two become ``link``."""

    @click.option("--redis", default=DEFAULT["redis"], envvar="MOONCAKE_REDIS", show_default=True, help="URL of Redis.")
    @click.option(
        "--mesh", default=DEFAULT["mesh"], envvar="MOONCAKE_MESH", show_default=True, help="Name of the mesh."
    )
    @click.option("--json", "as_json", is_flag=True, help="One JSON document.")
    @functools.wraps(function)
    def wrapped(redis: str, mesh: str, secret: str = "", **rest: Any) -> None:
        cert, key, ca = (rest.pop(name, "") for name in TLS)
        function(link=Link(redis, mesh, secret, (cert, key, ca)), **rest)

    return wrapped


secret_option = click.option(
    "--secret", default="", envvar="MOONCAKE_SECRET", help="Shared secret of the agents; better in MOONCAKE_SECRET."
)


def secured(function: Callable[..., None]) -> Callable[..., None]:
    """What it takes to talk to agents as one of them: the secret, and certificates where their data port wants them."""
    for name, what in TLS.items():
        flag = "--" + name.replace("_", "-")
        function = click.option(flag, default="", envvar="MOONCAKE_" + name.upper(), help=what)(function)
    return secret_option(function)


def finish(work: Awaitable[int]) -> None:
    """Run to the end and exit with its code; errors in one sentence."""

    async def run() -> int:
        return await work

    try:
        code = asyncio.run(run())
    except MooncakeError as error:
        raise click.ClickException(error.message) from None
    except KeyboardInterrupt:
        raise click.Abort from None
    sys.exit(code)


def agent_named(agents: list[AgentRecord], name: str) -> AgentRecord:
    """By id, or by the beginning of one. Raises ClickException that names the others."""
    exact = [agent for agent in agents if agent.ref.id == name]
    found = exact or [agent for agent in agents if agent.ref.id.startswith(name)]
    if len(found) != 1:
        there = ", ".join(agent.ref.id for agent in agents) or "none"
        raise click.ClickException(f"--agent {name} names {len(found)} agents (registered: {there})")
    return found[0]


def key_named(text: str) -> bytes:
    """32 hexadecimal digits. Raises BadParameter."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY:
        raise click.BadParameter(f"a key is {2 * KEY} hexadecimal digits, not {text!r}")
    return key
