"""The JSON picture of the mesh, for ``GET /cluster`` and ``mooncake status``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from services.conductor.dispatch.matching import AgentTable
from services.conductor.dispatch.mesh import Mesh
from services.conductor.dispatch.roster import Member
from services.conductor.generation import Readiness
from shared.records import DECODE, PREFILL, AgentRecord, ConductorRecord


def cluster(
    mesh: Mesh,
    agents: AgentTable,
    conductors: Iterable[ConductorRecord],
    keeper: Mapping[str, Any],
    readiness: Readiness,
) -> dict[str, Any]:
    members = list(mesh.roster.members.values())
    counts = mesh.counts
    return {
        "conductor": {"id": mesh.me.id, "incarnation": f"{mesh.me.incarnation:016x}"},
        "conductors": [conductor(mesh, record) for record in conductors],
        "ready": readiness.ready,
        "reasons": readiness.reasons,
        "degraded": readiness.degraded,
        "policy": mesh.settings.policy,
        "instances": [instance(mesh, member) for member in members],
        "agents": [agent(record) for record in agents.records.values()],
        "promises": len(mesh.ledger.open_bookings),
        "keeper": dict(keeper),
        "index": dict(mesh.placer.matcher.summary()),
        "requests": {
            "running": len(mesh.runs),
            "accepted": counts.accepted,
            "rejected": mesh.gatekeeper.rejected,
            "retried": counts.retried,
            "migrated": counts.migrated,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "overcommitted": counts.overcommitted,
        },
        "balance": {role: balance(mesh, members, role) for role in (PREFILL, DECODE)},
    }


def conductor(mesh: Mesh, record: ConductorRecord) -> dict[str, Any]:
    """``promises``: attempts that this conductor counts for it; ``heard``: over the bus, of late."""
    return {
        "id": record.ref.id,
        "incarnation": f"{record.ref.incarnation:016x}",
        "node": record.node,
        "url": record.url,
        "pid": record.pid,
        "heard": record.ref == mesh.me or record.ref in mesh.sharing.others.promises,
        "promises": mesh.sharing.promises(record.ref),
    }


def instance(mesh: Mesh, member: Member) -> dict[str, Any]:
    record, id = member.record, member.record.ref.id
    return {
        "id": id,
        "incarnation": f"{record.ref.incarnation:016x}",
        "role": record.role,
        "node": record.node,
        "model": record.model,
        "state": member.state.value,
        "refused": member.refused,
        "registered": member.registered,
        "agent": record.agent.id,
        "context_length": record.context_length,
        "load": msgspec.structs.asdict(member.load),
        "latency": msgspec.to_builtins(record.prefill or record.decode),
        "served": mesh.counts.served[id],
        "metrics": record.metrics,
        "pid": record.pid,
    }


def agent(record: AgentRecord) -> dict[str, Any]:
    return {
        "id": record.ref.id,
        "incarnation": f"{record.ref.incarnation:016x}",
        "code": record.code.hex(),
        "node": record.node,
        "address": f"{record.host}:{record.port}",
        "transports": record.transports,
        "slots": record.slots,
        "used": record.used,
        "slot_bytes": record.slot_bytes,
        "backlog_bytes": record.backlog_bytes,
        "rate": record.rate,
        "held": record.held,
        "nics": [msgspec.structs.asdict(nic) for nic in record.nics],
        "ssd": None if record.ssd is None else msgspec.structs.asdict(record.ssd),
        "metrics": record.metrics,
        "pid": record.pid,
    }


def balance(mesh: Mesh, members: Iterable[Member], role: str) -> dict[str, float]:
    """Served requests of the busiest instance over the mean of all of that role."""
    served = [mesh.counts.served[m.record.ref.id] for m in members if m.record.role == role]
    mean = sum(served) / len(served) if served else 0.0
    return {"busiest": max(served, default=0), "mean": mean, "ratio": max(served) / mean if mean else 0.0}
