"""How records are kept in Redis: keys, calls of the scripts and their answers, without a connection (pure)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from shared.blocks import Namespace
from shared.errors import MALFORMED, NamespaceMismatch, ProtocolError, Refused, StaleIncarnation
from shared.index import code
from shared.records import AgentRecord, ConductorRecord, InstanceRecord
from shared.redis_client import Argument

Record = InstanceRecord | AgentRecord | ConductorRecord

TTL = 10.0  # seconds without a heartbeat until a process counts as dead
KINDS: dict[type[Record], str] = {InstanceRecord: "instance", AgentRecord: "agent", ConductorRecord: "conductor"}

_HEAD = struct.Struct(">8sddH")


class _Agreement(msgspec.Struct, array_like=True, frozen=True):
    """What the instances of one served model agree on."""

    namespace: Namespace
    proof: bytes


class Keys:
    """Names of a mesh's metadata keys; all in one hash tag, so that a script may touch them together."""

    def __init__(self, mesh: str) -> None:
        self._base = f"mc:{{{mesh}}}:"
        self.namespaces = self._base + "namespaces"
        self.reserved = [self._base + "reserved", self._base + "reserved:until"]

    def of(self, kind: type[Record]) -> list[str]:
        name = self._base + KINDS[kind]
        return [name, name + ":until"]

    def lease(self, name: str) -> str:
        return f"{self._base}lease:{name}"


class Registration:
    """The calls for one process. ``claim`` first, ``renew`` afterwards; ``born`` orders incarnations of one id."""

    def __init__(self, mesh: str, ttl: float = TTL) -> None:
        self._keys = Keys(mesh)
        self._ttl = ttl
        self._born = 0.0
        self.claimed = False

    def call(self, record: Record) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of register.lua. Raises NamespaceMismatch when the record contradicts itself."""
        model, agreement = "", b""
        if isinstance(record, InstanceRecord):
            model, agreement = record.model, _agreement(record)
        mode = "renew" if self.claimed else "claim"
        keys = [*self._keys.of(type(record)), self._keys.namespaces]
        head: list[Argument] = [mode, record.ref.id, code(record.ref.incarnation), repr(self._born)]
        return keys, [*head, int(self._ttl * 1000), msgspec.msgpack.encode(record), model, agreement]

    def answered(self, answer: list[Any], record: Record) -> None:
        """Raises StaleIncarnation when a later incarnation holds the id, NamespaceMismatch naming the field."""
        if answer[0] == b"replaced":
            raise StaleIncarnation(f"another incarnation of {record.ref.id} has registered since")
        if answer[0] == b"namespace":
            raise _mismatch(answer[1], record)
        self._born, self.claimed = float(answer[1]), True

    def removal(self, record: Record) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of deregister.lua."""
        return self._keys.of(type(record)), [record.ref.id, code(record.ref.incarnation)]


def unpack(value: bytes, until: bytes, now: float) -> tuple[bytes, float]:
    """(record, seconds since its last heartbeat) out of a value of list.lua; ``now`` in ms as Redis says.

    Raises ProtocolError for what no service has written."""
    try:
        _, _, ttl, model = _HEAD.unpack_from(value)
    except struct.error:
        raise ProtocolError(f"not a record: {len(value)} bytes") from None
    return value[_HEAD.size + model :], max(0.0, now - (float(until) - ttl)) / 1000


def _agreement(record: InstanceRecord) -> bytes:
    if record.proof != record.namespace.proof():
        raise NamespaceMismatch("the proof is not that of the namespace", field="proof")
    return msgspec.msgpack.encode(_Agreement(record.namespace.deployment(), record.proof))


def _mismatch(agreed: bytes, record: Record) -> Refused:
    assert isinstance(record, InstanceRecord)  # nothing else brings a namespace
    try:
        theirs = msgspec.msgpack.decode(agreed, type=_Agreement)
    except MALFORMED:
        return NamespaceMismatch(f"the mesh serves {record.model} under an unreadable namespace", field="schema")
    field = theirs.namespace.difference(record.namespace.deployment())
    if not field:  # the same words, but another way to make keys of them
        mine, other = record.proof.hex(), theirs.proof.hex()
        return NamespaceMismatch(f"{record.model}: proof is {mine} here and {other} in the mesh", field="proof")
    mine, other = getattr(record.namespace, field), getattr(theirs.namespace, field)
    return NamespaceMismatch(f"{record.model}: {field} is {mine!r} here and {other!r} in the mesh", field=field)
