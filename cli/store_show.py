"""``mooncake store ls`` and ``stat``: agents, their namespaces, and where a block is."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from cli.console import bytes_text, out, print_json, table
from cli.status import cell, nics
from cli.store_link import Link, agent_named, finish, key_named, linked, secured
from shared.errors import MooncakeError
from shared.index.lookup import lookup
from shared.metadata import Metadata
from shared.records import AgentRecord, SlabRecord

TIERS = ("dram", "ssd")


@click.command()
@linked
def ls(link: Link, as_json: bool) -> None:
    """List agents and namespaces: bytes, and blocks by tier."""
    finish(_ls(link, as_json))


async def _ls(link: Link, as_json: bool) -> int:
    async with link.metadata() as metadata:
        agents, indexed = await link.counted(metadata)
    if as_json:
        print_json({"mesh": link.mesh, "agents": [agent_document(a, indexed.get(a.code, 0)) for a in agents]})
    elif agents:
        out.print(agent_table(agents, indexed))
        out.print(namespace_table(agents))
    else:
        click.echo(f"no store agent is registered in the mesh {link.mesh}")
    return 0


def slab_document(slab: SlabRecord) -> dict[str, Any]:
    return {
        "namespace": slab.segment,
        "model": slab.namespace.model,
        "layout": slab.namespace.layout,
        "dtype": slab.namespace.dtype,
        "slots": slab.slots,
        "used": slab.used,
        "blocks": slab.blocks,
        "slot_bytes": slab.stride,
        "bytes": slab.blocks * slab.stride,
    }


def agent_document(agent: AgentRecord, indexed: int) -> dict[str, Any]:
    return {
        "id": agent.ref.id,
        "incarnation": agent.ref.incarnation,
        "node": agent.node,
        "address": f"{agent.host}:{agent.port}",
        "socket": agent.socket,
        "transports": agent.transports,
        "topology": agent.topology,
        "nics": [msgspec.structs.asdict(nic) for nic in agent.nics],
        "blocks": {
            "dram": sum(slab.blocks for slab in agent.slabs),
            "ssd": agent.ssd.blocks if agent.ssd else 0,
            "indexed": indexed,
        },
        "bytes": sum(slab.blocks * slab.stride for slab in agent.slabs),
        "namespaces": [slab_document(slab) for slab in agent.slabs],
    }


def agent_table(agents: list[AgentRecord], indexed: dict[bytes, int]) -> Table:
    counts = ("DRAM blocks", "bytes", "SSD blocks", "indexed", "held")
    shown = table(("agent", "node", "address"), counts, "Store agents")
    for agent in agents:
        blocks = agent_document(agent, indexed.get(agent.code, 0))
        numbers = [str(blocks["blocks"]["dram"]), bytes_text(blocks["bytes"])]
        numbers += [str(blocks["blocks"]["ssd"]), str(blocks["blocks"]["indexed"]), f"{agent.used}/{agent.slots}"]
        shown.add_row(agent.ref.id, agent.node, blocks["address"], *numbers)
    return shown


def namespace_table(agents: list[AgentRecord]) -> Table:
    """One line for each namespace of an agent."""
    shown = table(("namespace", "agent", "layout"), ("slot", "blocks", "held", "slots"), "\nNamespaces")
    for agent in agents:
        for slab in agent.slabs:
            counts = [bytes_text(slab.stride), str(slab.blocks), str(slab.used), str(slab.slots)]
            shown.add_row(slab.segment, agent.ref.id, slab.namespace.layout, *counts)
    return shown


# -- stat ------------------------------------------------------------------------------------------------------


@click.command(short_help="Show where a block is, or all about an agent.")
@click.argument("key", required=False)
@click.option("--agent", default="", help="Everything about one agent: its id, or how it begins.")
@secured
@linked
def stat(link: Link, key: str | None, agent: str, as_json: bool) -> None:
    """Show where the block KEY (32 hexadecimal digits) is, or all about one --agent."""
    if bool(key) == bool(agent):
        raise click.UsageError("either a KEY or --agent ID")
    finish(_stat_agent(link, agent, as_json) if agent else _stat_key(link, key_named(key or ""), as_json))


async def _stat_agent(link: Link, name: str, as_json: bool) -> int:
    async with link.metadata() as metadata:
        agents, indexed = await link.counted(metadata)
    agent = agent_named(agents, name)
    document = agent_document(agent, indexed.get(agent.code, 0))
    document |= {"held": agent.held, "backlog_bytes": agent.backlog_bytes, "rate": agent.rate}
    document |= {"metrics": agent.metrics, "pid": agent.pid, "beat": agent.beat}
    if as_json:
        print_json(document)
        return 0
    namespaces, devices = document.pop("namespaces"), document.pop("nics")
    for name, value in document.items():
        out.print(Text.assemble((f"{name}: ", "bold"), cell(value)), soft_wrap=True)
    if namespaces:
        out.print(namespace_table([agent]))
    for shown in nics([{"id": agent.ref.id, "nics": devices}]):
        out.print(shown)
    return 0


async def _stat_key(link: Link, key: bytes, as_json: bool) -> int:
    """Exit code 1 where nobody has it."""
    async with link.metadata() as metadata:
        places = await _places(link, metadata, key)
    if as_json:
        print_json({"key": key.hex(), "places": places})
    for place in [] if as_json else places:
        what = f"{place['size']} bytes in {place['namespace']}" if place["there"] else f"not there: {place['why']}"
        click.echo(f"{place['agent']}  {place['tier']}  {what}")
    if not places and not as_json:
        click.echo("no agent has it, says the index")
    return 0 if any(place["there"] for place in places) else 1


async def _places(link: Link, metadata: Metadata, key: bytes) -> list[dict[str, Any]]:
    """What the index says, and what each owner says to it."""
    from services.store.inspection import inspector  # starts threads and a port: only where it is needed

    tiers = (await lookup(metadata.link, link.mesh, [key]))[0]
    owners = [agent for agent in await metadata.agents() if agent.code in tiers]
    places: list[dict[str, Any]] = []
    async with inspector(metadata, link.mesh, link.secret, tls=link.tls) as eye:
        for owner in sorted(owners, key=lambda agent: agent.ref.id):
            place: dict[str, Any] = {"agent": owner.ref.id, "tier": TIERS[min(tiers[owner.code], 1)], "there": False}
            try:
                place |= await _at(eye, owner, key)
            except MooncakeError as error:
                place["why"] = error.message
            places.append(place)
    return places


async def _at(eye: Any, owner: AgentRecord, key: bytes) -> dict[str, Any]:
    for slab in owner.slabs:
        leased = await eye.lease(owner.ref, [key], slab)
        await eye.release(owner.ref, slab, leased)
        found = leased.blocks[0]
        if found is not None:
            return {"there": True, "namespace": slab.segment, "size": found.size, "checksum": found.checksum}
    return {"why": "its owner does not have it"}
