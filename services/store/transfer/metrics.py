"""What the engine counts. Labels: transport (shm, tcp, none), op (read, write), outcome (ok or the error's code)."""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter

from services.store.transfer.batches import Job
from shared.telemetry import counter, gauge, held_gauge

BYTES = counter("transfer_bytes", "Bytes moved by requests of this agent.", ("transport", "op"))
REQUESTS = counter("transfer_requests", "Finished requests of this agent.", ("transport", "op", "outcome"))
RETRIED = counter("transfer_slices_retried", "Slices sent again on another path.")
SECOND_CHOICE = counter("transfer_second_choice", "Requests not carried by the preferred transport.", ("transport",))
REFUSED_PEERS = counter("transfer_peers_refused", "Incoming connections that failed their handshake.")
CONNECTIONS = gauge("transfer_connections", "Open connections between agents.", ("side",))
IN_FLIGHT = held_gauge("transfer")
UNDER_WAY = gauge("transfer_under_way_bytes", "Bytes of transfers of this agent that have begun and not ended.")
WAITING = gauge("transfer_waiting", "Transfers of this agent that wait for room in the queue of a peer.")
CUT_OFF = counter("transfer_peers_cut_off", "Data streams ended because the peer read or sent too slowly.")

INITIATOR = CONNECTIONS.labels("initiator")
TARGET = CONNECTIONS.labels("target")


@cache
def _bytes(transport: str, op: str) -> Counter:
    return BYTES.labels(transport, op)


@cache
def _requests(transport: str, op: str, outcome: str) -> Counter:
    return REQUESTS.labels(transport, op, outcome)


def finished(job: Job) -> None:
    transport, op = job.transport or "none", job.request.op.value
    for error in job.refused.values():
        _requests(transport, op, error.code).inc()
    outcome = job.error.code if job.error else "ok"
    _requests(transport, op, outcome).inc(job.count - len(job.refused))
    if job.moved:
        _bytes(transport, op).inc(job.moved)
