"""``mooncake store verify``: reads every indexed block from its owner and checks it against its checksum."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from cli.console import bytes_text, err, print_json
from cli.store_link import Link, agent_named, finish, linked, secured
from shared.errors import MooncakeError
from shared.records import AgentRecord

if TYPE_CHECKING:
    from services.store.inspection import Inspector

SHOWN = 20
BAD = ("lost", "corrupt", "unread")


@click.command()
@click.option("--agent", default="", help="Only blocks of this agent: its id, or how it begins.")
@click.option("--namespace", default="", help="Report on this namespace alone, as `mooncake store ls` names it.")
@click.option("--transports", default="prefer:shm,tcp", show_default=True, help="How blocks are read.")
@click.option("--repair", is_flag=True, help="Have owners drop what is corrupt.")
@secured
@linked
def verify(link: Link, agent: str, namespace: str, transports: str, repair: bool, as_json: bool) -> None:
    """Read every indexed block from its owner and check it. Blocks on SSD are brought to DRAM for it, and all that is
    read counts as used lately.

    Exit code 1 when a block is lost (indexed, but not at its owner), corrupt, or cannot be read.
    """
    finish(_verify(link, agent, namespace, transports, repair, as_json))


async def _verify(link: Link, name: str, namespace: str, transports: str, repair: bool, as_json: bool) -> int:
    from services.store.inspection import inspector  # starts threads and a port: only where it is needed

    reports: list[dict[str, Any]] = []
    async with link.metadata() as metadata:
        agents = sorted(await metadata.agents(), key=lambda agent: agent.ref.id)
        agents = [agent_named(agents, name)] if name else agents
        async with inspector(metadata, link.mesh, link.secret, transports, tls=link.tls) as eye:
            for agent in agents:
                report = await _of_agent(eye, agent, namespace, repair)
                reports.append(report)
                if not as_json:
                    _say(report)
    totals = {what: sum(report[what] for report in reports) for what in ("good", "bytes", *BAD)}
    if as_json:
        print_json({"mesh": link.mesh, **totals, "agents": reports})
    elif not agents:
        click.echo(f"no store agent is registered in the mesh {link.mesh}")
    return 1 if any(totals[what] for what in BAD) or any(report["error"] for report in reports) else 0


async def _of_agent(eye: Inspector, agent: AgentRecord, namespace: str, repair: bool) -> dict[str, Any]:
    from services.store.inspection import Verdict

    begin, counts, size = time.monotonic(), Counter[str](), 0
    bad: list[dict[str, Any]] = []
    error, keys = "", list[bytes]()
    try:
        async for page in eye.indexed(agent):
            keys += [key for key, _ in page]
        slabs = sorted(agent.slabs, key=lambda slab: slab.segment != namespace)
        async for finding in eye.verify(agent, keys, slabs):
            if namespace and finding.segment not in ("", namespace):
                continue  # the index does not say in which namespace a key is: only its owner does
            counts[finding.verdict] += 1
            size += finding.size
            if finding.verdict in BAD:
                bad.append({"key": finding.key.hex(), "what": finding.verdict.value, "why": finding.why})
            if repair and finding.verdict is Verdict.CORRUPT:
                await eye.denounce(agent.ref, finding)
    except MooncakeError as e:
        error = e.message
    seconds = round(time.monotonic() - begin, 3)
    verdicts = {what: counts[what] for what in ("good", "unchecked", "moved", *BAD)}
    return {"agent": agent.ref.id, **verdicts, "bytes": size, "seconds": seconds, "error": error, "bad": bad}


def _say(report: dict[str, Any]) -> None:
    counts = ", ".join(f"{report[what]} {what}" for what in ("good", "unchecked", "moved", *BAD) if report[what])
    error = f"; stopped: {report['error']}" if report["error"] else ""
    read = f"{bytes_text(report['bytes'])} in {report['seconds']:.1f} s"
    click.echo(f"{report['agent']}: {counts or 'nothing indexed'} ({read}){error}")
    for one in report["bad"][:SHOWN]:
        err.print(f"  {one['what']}: {one['key']} {one['why']}", style="red")
    if len(report["bad"]) > SHOWN:
        err.print(f"  and {len(report['bad']) - SHOWN} more (--json lists them)", style="red")
