"""The registered instances and whether they live. Pure: time is passed in, and stands still while the bus is down."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from shared.blocks import Namespace
from shared.messages import Load, Ref
from shared.records import InstanceRecord

RECONNECT_GRACE = 5.0
"""Seconds after the bus came back in which 'no responders' may mean that the instance has not come back yet."""


class State(StrEnum):
    ALIVE = "alive"
    SUSPECTED = "suspected"
    DEAD = "dead"
    REFUSED = "refused"


@dataclass
class Member:
    """``heard``: last sign of life. ``moved``: when its engine last made progress, or was idle. ``registered``: its
    record is in the metadata store. ``refused``: the field in which its namespace differs, "" when none does."""

    record: InstanceRecord
    load: Load
    heard: float
    moved: float
    state: State = State.ALIVE
    registered: bool = True
    refused: str = ""

    @property
    def open(self) -> bool:
        """Gets new work."""
        return self.state is State.ALIVE and not self.load.draining


@dataclass(frozen=True)
class Change:
    """What became of an instance: joined, updated, died (or replaced), suspected, revived, left, refused."""

    kind: str
    member: Member


class Roster:
    def __init__(self, suspect_after: float, dead_after: float, hung_after: float) -> None:
        self.members: dict[str, Member] = {}
        self._suspect_after = suspect_after
        self._dead_after = dead_after
        self._hung_after = hung_after
        self._bus_up = True
        self._bus_since = float("-inf")
        self._reference: Namespace | None = None
        self._proofs: dict[Namespace, bytes] = {}

    def get(self, ref: Ref) -> Member | None:
        """The member that is this incarnation."""
        member = self.members.get(ref.id)
        return member if member and member.record.ref == ref else None

    @property
    def namespace(self) -> Namespace | None:
        """What all members not refused agree on; None while there are none."""
        return self._reference if any(m.state is not State.REFUSED for m in self.members.values()) else None

    def accepted(self) -> list[Member]:
        return [m for m in self.members.values() if m.state is not State.REFUSED]

    # -- what the metadata store says ------------------------------------------------------------------

    def replace_all(self, records: list[InstanceRecord], now: float) -> list[Change]:
        """A snapshot: what is not in it is no longer registered. The most common namespace is the mesh's."""
        common = most_common([record.namespace for record in records])
        ordered = sorted(records, key=lambda record: record.namespace != common)
        changes = [change for record in ordered for change in self.put(record, now)]
        absent = self.members.keys() - {record.ref.id for record in records}
        return changes + [change for id in absent for change in self.unregister(id, now)]

    def put(self, record: InstanceRecord, now: float) -> list[Change]:
        member = self.members.get(record.ref.id)
        if member and member.record.ref == record.ref:
            return self._update(member, record, now)
        changes = [*self._die(member), Change("left", member)] if member else []
        member = Member(record, record.load, now, now, refused=self._differs(record))
        member.state = State.REFUSED if member.refused else State.ALIVE
        self.members[record.ref.id] = member
        return [*changes, Change("refused" if member.refused else "joined", member)]

    def _update(self, member: Member, record: InstanceRecord, now: float) -> list[Change]:
        news = record.beat != member.record.beat
        member.record, member.registered = record, True
        if news:
            self._note_progress(member, record.load, now)
        return [Change("updated", member)] if news and member.state is not State.REFUSED else []

    def unregister(self, id: str, now: float) -> list[Change]:
        """Its record is gone. While it is heard on the bus it is kept: the metadata store may have lost it."""
        member = self.members.get(id)
        if member is None:
            return []
        member.registered = False
        if member.state in (State.DEAD, State.REFUSED) or now - member.heard > self._suspect_after:
            return self._drop(member)
        return []

    def _differs(self, record: InstanceRecord) -> str:
        """The field in which it disagrees with the mesh; the first good one to come decides for the mesh."""
        proof = self._proofs.get(record.namespace)
        if proof is None:
            proof = self._proofs[record.namespace] = record.namespace.proof()
        if record.proof != proof:
            return "proof"
        if self.namespace is None:
            self._reference = record.namespace
        return self._reference.difference(record.namespace) if self._reference else ""

    # -- what the bus says -----------------------------------------------------------------------------

    def heard(self, ref: Ref, load: Load | None, now: float) -> list[Change]:
        """A message of that incarnation arrived."""
        member = self.get(ref)
        if member is None or member.state is State.REFUSED:
            return []
        member.heard = now
        if load:
            self._note_progress(member, load, now)
        revived = member.state in (State.SUSPECTED, State.DEAD) and not self._hung(member, now)
        if revived:
            member.state = State.ALIVE
        return [Change("revived", member)] if revived else []

    def _note_progress(self, member: Member, load: Load, now: float) -> None:
        if load.progress != member.load.progress or not load.busy or not member.load.busy:
            member.moved = now
        member.load = load

    def no_responders(self, ref: Ref, now: float) -> list[Change]:
        """Nobody serves its id: dead at once, unless the bus itself has just come back."""
        member = self.get(ref)
        if member is None or not self._bus_up or now < self._bus_since + RECONNECT_GRACE:
            return []
        return self._die(member) + ([] if member.registered else self._drop(member))

    def replaced(self, ref: Ref) -> list[Change]:
        """Another incarnation answers for its id."""
        return self._die(self.get(ref))

    def bus(self, up: bool, now: float) -> None:
        """Silence while the bus was away is nobody's fault."""
        if up and not self._bus_up:
            self._bus_since = now
            for member in self.members.values():
                member.heard = member.moved = now
        self._bus_up = up

    def excuse(self, late: float, now: float) -> None:
        """This process was stopped or starved for ``late`` seconds: what was said meanwhile is still to be heard, so
        that time is nobody's silence."""
        for member in self.members.values():
            member.heard = min(now, member.heard + late)
            member.moved = min(now, member.moved + late)

    def tick(self, now: float) -> list[Change]:
        """Once a second or so."""
        if not self._bus_up:
            return []
        aged = [change for member in list(self.members.values()) for change in self._age(member, now)]
        return aged + self._reconsider(now)

    def _reconsider(self, now: float) -> list[Change]:
        """All that agreed are gone (a new model was rolled out): those refused for it agree among themselves."""
        refused = [m.record for m in self.members.values() if m.state is State.REFUSED and m.refused != "proof"]
        if self.namespace is not None or not refused:
            return []
        for record in refused:
            del self.members[record.ref.id]
        common = most_common([record.namespace for record in refused])
        ordered = sorted(refused, key=lambda record: record.namespace != common)
        return [change for record in ordered for change in self.put(record, now)]

    def _age(self, member: Member, now: float) -> list[Change]:
        silent = now - member.heard
        if member.state is State.REFUSED:
            return []
        if silent > self._dead_after or self._hung(member, now):
            return self._die(member) + ([] if member.registered else self._drop(member))
        if silent > self._suspect_after and member.state is State.ALIVE:
            member.state = State.SUSPECTED
            return [Change("suspected", member)]
        return []

    def _hung(self, member: Member, now: float) -> bool:
        return member.load.busy and now - member.moved > self._hung_after

    def _die(self, member: Member | None) -> list[Change]:
        if member is None or member.state in (State.DEAD, State.REFUSED):
            return []
        member.state = State.DEAD
        return [Change("died", member)]

    def _drop(self, member: Member) -> list[Change]:
        changes = self._die(member)
        self.members.pop(member.record.ref.id, None)
        return [*changes, Change("left", member)]


def most_common(namespaces: list[Namespace]) -> Namespace | None:
    return Counter(namespaces).most_common(1)[0][0] if namespaces else None
