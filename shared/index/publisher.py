"""The agent's side of the index, pure: what it holds, what Redis was told, what to tell next.

The inventory is the truth and always enough to start over, so nothing is lost by dropping what is queued. One *flight*
of entries per shard is under way at a time; its answers come back before the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.blocks import KEY
from shared.index import SHARDS, shard_of
from shared.index.batches import Change, cut, most_batch
from shared.index.digest import State, rotated
from shared.index.entry import ADD, BEGIN, DELETE, END, FORCE, MOST_KEYS, REPUBLISH, Entry, pack
from shared.index.inventory import Inventory
from shared.index.twin import DIFFERS, RESYNC

MOST_QUEUED = 1 << 16  # keys; beyond it (Redis is down) the queue is dropped and everything published anew
MOST_FLIGHT = 32  # entries of one shard under way
MOST_BEGUN = 1 << 14  # keys of the shards whose republish begins with one flight, but for one shard
MOST_TAKEN = 1 << 11  # changes that one flight takes out of the queue: an agent's loop has others to serve
MOST_RECENT = 1 << 14  # evicted keys, of all shards, that a stale copy of Redis may still have

_NOTHING = State()


@dataclass
class _Shard:
    inventory: Inventory = field(default_factory=Inventory)
    covered: int = 0  # changes up to this number went with the last republish
    queue: deque[Change] = field(default_factory=deque)
    issued: State = _NOTHING  # after the last entry made
    acked: State = _NOTHING  # after the last entry that Redis took
    flight: list[Entry] = field(default_factory=list)
    oldest: int = 0  # number of the first change in the flight
    again: bool = False  # the flight's answer was lost
    stale: bool = False  # a republish is due
    republish: Iterator[Entry] | None = None
    differs: bool = False  # a republish did not help: read what Redis holds
    surplus: Sequence[bytes] | None = None  # what Redis holds, read for the next republish
    recent: deque[bytes] = field(default_factory=deque)

    @property
    def quiet(self) -> bool:
        return not (self.queue or self.flight or self.unsure)

    @property
    def unsure(self) -> bool:
        """What Redis has of the inventory is not known until a republish ends."""
        return self.stale or self.differs or self.republish is not None


class Publisher:
    """One incarnation of an agent, all shards. ``code``: 8 bytes. Not thread-safe."""

    def __init__(self, code: bytes, shards: int = SHARDS) -> None:
        self.code = code
        self._shards = [_Shard(recent=deque(maxlen=MOST_RECENT // shards)) for _ in range(shards)]
        self._most_batch = most_batch(shards)
        self._changes: deque[Change] = deque()
        self._queued = 0
        self._batch = 0
        self.changed = 0  # changes so far: a mark for :meth:`reached`
        self.republished = 0

    # -- what the store says --------------------------------------------------------------------------------

    def committed(self, parent: bytes | None, keys: Sequence[bytes], tier: int = 0) -> None:
        """``keys`` are held at ``tier`` now, consecutive after ``parent`` (b"": a chain begins; None: not known)."""
        for key in keys:
            shard = self._of(key)
            old = shard.inventory.change(key, tier)
            if old != tier:
                self._queue(shard, key, parent, old, tier)
            parent = key

    def evicted(self, keys: Sequence[bytes]) -> None:
        """``keys`` are not held any more."""
        for key in keys:
            shard = self._of(key)
            old = shard.inventory.change(key, -1)
            if old >= 0:
                shard.recent.append(key)
                self._queue(shard, key, None, old, -1)

    def _of(self, key: bytes) -> _Shard:
        return self._shards[shard_of(key, len(self._shards))]

    def _queue(self, shard: _Shard, key: bytes, parent: bytes | None, old: int, new: int) -> None:
        self.changed += 1
        if shard.stale:
            return  # the republish will have it
        self._changes.append(Change(key, parent, old, new, self.changed))
        self._queued += 1
        if self._queued > MOST_QUEUED:
            self.start_over()

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Redis has taken everything, as far as its answers and the last comparison say."""
        return not self._changes and all(shard.quiet for shard in self._shards)

    @property
    def blocks(self) -> int:
        return sum(len(shard.inventory) for shard in self._shards)

    def reached(self, mark: int) -> bool:
        """Redis has taken the first ``mark`` changes."""
        if self._changes and self._changes[0].number <= mark:
            return False
        return not any(
            shard.unsure or (shard.flight and shard.oldest <= mark) or (shard.queue and shard.queue[0].number <= mark)
            for shard in self._shards
        )

    def told(self, shard: int) -> State | None:
        """What to publish of this agent's shard; None while something is under way there, which then speaks itself."""
        mine = self._shards[shard]
        return mine.acked if mine.quiet else None

    def inventory(self, shard: int) -> dict[bytes, int]:
        """Key -> tier, as held."""
        return dict(self._shards[shard].inventory.items())

    # -- flights --------------------------------------------------------------------------------------------

    def take(self) -> dict[int, list[bytes]]:
        """Shard -> entries to send now, in order. Each shard's answers go to :meth:`answered` or :meth:`failed`."""
        self._distribute()
        out, begun = {}, 0
        for number, shard in enumerate(self._shards):
            if not shard.flight:
                if shard.stale and not shard.differs:
                    if begun and begun + len(shard.inventory) > MOST_BEGUN:
                        continue  # it has to wait: all of it is read out at once
                    begun += len(shard.inventory)
                shard.flight = self._next(shard)
            elif not shard.again:
                continue
            shard.again = False
            if shard.flight:
                out[number] = [pack(entry) for entry in shard.flight]
        return out

    def _distribute(self) -> None:
        """Changes in order -> batches -> the shards' queues. Their keys get positions in the batch on the way."""
        some = [self._changes.popleft() for _ in range(min(len(self._changes), MOST_TAKEN))]
        news = [change for change in some if change.number > self._of(change.key).covered]
        self._queued -= len(some) - len(news)
        for batch in cut(news, self._most_batch):
            self._batch = (self._batch + 1) & 0xFFFFFFFF
            for change in batch:
                change.batch, change.total = self._batch, len(batch)
                self._of(change.key).queue.append(change)

    def _next(self, shard: _Shard) -> list[Entry]:
        """The next flight of a shard. It ends with END, whose answer decides how to go on."""
        if shard.differs:
            return []
        if shard.stale:
            self._begin(shard)
        out: list[Entry] = []
        shard.oldest = shard.queue[0].number if shard.queue else 0
        while len(out) < MOST_FLIGHT and (not out or out[-1].op != END):
            entry = next(shard.republish, None) if shard.republish is not None else self._pop(shard)
            if entry is None:
                break
            out.append(entry)
        return out

    def _pop(self, shard: _Shard) -> Entry | None:
        """The next entry out of the queue: changes of one batch."""
        if not shard.queue:
            return None
        first = shard.queue[0]
        changes: list[Change] = []
        while shard.queue and len(changes) < MOST_KEYS and shard.queue[0].batch == first.batch:
            changes.append(shard.queue.popleft())
        self._queued -= len(changes)
        size, xor = shard.issued.size, shard.issued.xor
        for change in changes:
            number = int.from_bytes(change.key, "big")
            size += (change.new >= 0) - (change.old >= 0)
            xor ^= rotated(number, change.old) if change.old >= 0 else 0
            xor ^= rotated(number, change.new) if change.new >= 0 else 0
        shard.issued = State(shard.issued.seq + 1, size, xor)
        return first.entry(self.code, shard.issued, changes)

    # -- answers --------------------------------------------------------------------------------------------

    def answered(self, shard: int, answers: Sequence[tuple[str, State | None]]) -> None:
        """The scripts' answers to the flight of ``shard``, in order."""
        mine = self._shards[shard]
        flight, mine.flight = mine.flight, []
        for at, (entry, (status, held)) in enumerate(zip(flight, answers, strict=True)):
            if status == RESYNC and not _taken_before(flight[at:], held):
                mine.stale = True
                return
            mine.acked = entry.state
            if entry.op == END:
                mine.republish = None
                differs = held is None or held != entry.state
                mine.differs = differs and not mine.stale
            elif status == DIFFERS:
                mine.stale = True
                return

    def failed(self, shard: int) -> None:
        """No answer: whether the flight was taken is not known, so the same one goes again."""
        self._shards[shard].again = True

    def compare(self, shard: int, taken: State | None, keys: int) -> None:
        """rule: agent_compares. ``taken``: what Redis holds of this agent now, ``keys``: of everybody."""
        mine = self._shards[shard]
        if mine.quiet and ((taken or _NOTHING) != mine.acked or keys < mine.acked.size):
            mine.stale = True

    # -- starting over --------------------------------------------------------------------------------------

    def start_over(self) -> None:
        """Drop what is queued; every shard is published anew."""
        self._changes.clear()
        self._queued = 0
        for shard in self._shards:
            shard.queue.clear()
            shard.stale = True

    def _begin(self, shard: _Shard) -> None:
        """A republish out of the inventory as it is now, which has all that is queued."""
        self._queued -= len(shard.queue)
        shard.queue.clear()
        shard.covered = self.changed
        shard.republish = self._republish(shard, shard.surplus)
        shard.stale, shard.surplus = False, None
        self.republished += 1

    def _republish(self, shard: _Shard, surplus: Sequence[bytes] | None) -> Iterator[Entry]:
        """BEGIN, all keys by tier, what Redis may have or has beyond them, END. The inventory is read here and now."""
        held: dict[int, list[bytes]] = {}
        inventory = shard.inventory
        if inventory.slow:
            for key, tier in inventory.items():
                held.setdefault(tier, []).append(key)
        else:
            held[0] = list(inventory)
        beyond = shard.recent if surplus is None else surplus
        gone = [key for key in dict.fromkeys(beyond) if key not in inventory]
        size, xor = len(inventory), inventory.xor

        def entry(op: int, keys: Sequence[bytes] = (), tier: int = 0, flags: int = REPUBLISH) -> Entry:
            shard.issued = State(shard.issued.seq + 1, size, xor)
            return Entry(op, self.code, shard.issued, b"".join(keys), tier, flags, positions=bytes(2 * len(keys)))

        def entries() -> Iterator[Entry]:
            yield entry(BEGIN)
            for tier, keys in held.items():
                for at in range(0, len(keys), MOST_KEYS):
                    yield entry(ADD, keys[at : at + MOST_KEYS], tier)
            for at in range(0, len(gone), MOST_KEYS):
                yield entry(DELETE, gone[at : at + MOST_KEYS])
            yield entry(END, flags=0 if surplus is None else FORCE)

        return entries()

    @property
    def differing(self) -> list[int]:
        """Shards where Redis still differed after a republish: read what it holds and call :meth:`reconcile`."""
        return [number for number, shard in enumerate(self._shards) if shard.differs]

    def reconcile(self, shard: int, held: Sequence[bytes]) -> None:
        """``held``: the keys that Redis has of this agent. The next republish removes the surplus, and is final."""
        mine = self._shards[shard]
        mine.differs, mine.stale = False, True
        mine.surplus = [key for key in held if len(key) == KEY]  # the rest is nobody's


def _taken_before(flight: Sequence[Entry], held: State | None) -> bool:
    """An earlier sending was taken up to one of ``flight``, and its answer was lost."""
    for entry in flight:
        if held is not None and held.seq == entry.state.seq:
            return held == entry.state or entry.op == BEGIN or entry.flags & REPUBLISH != 0
    return False
