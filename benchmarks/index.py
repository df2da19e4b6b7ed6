"""The block index: applying, looking up, deciding (``python -m benchmarks.index``).

CPU seconds of the thread throughout, so that neighbours are not measured; each part runs in a process of its own, for
:data:`LIMIT` seconds at most. The last one (``benchmarks.metadata``) is what lies in Redis and how long agents and
mirrors take with it, and takes wall time too.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.index_decisions import decisions
from benchmarks.index_load import CHAIN, MESSAGE, clock, messages, random_chains, resident
from benchmarks.metadata import measure
from benchmarks.peers.environments import DYNAMO, Missing, python_of
from benchmarks.peers.index_load import Prefixes, prefixes
from benchmarks.peers.lines import Child, Failed
from shared.blocks import KEY, split_keys
from shared.index import DRAM, code
from shared.index.entry import unpack
from shared.index.mirror import Mirror
from shared.index.mirroring import MOST_ENTRIES, PORTION, portions
from shared.index.prefix import PrefixIndex
from shared.index.publisher import Publisher
from shared.index.twin import OK

LIMIT = 600.0
"""Seconds of a part."""

LOOKUPS = 200
"""Of one length in a round."""

FEW = 4

AGENTS = 16
"""That commit in turn: none goes on where the entry before ended."""


def rate(work: Callable[[], int]) -> float:
    """Blocks a CPU second."""
    begin = clock()
    blocks = work()
    return blocks / (clock() - begin)


# -- parts -------------------------------------------------------------------------------------------------------


def store_all(index: PrefixIndex, column: int, chains: Sequence[bytes]) -> int:
    """In messages; returns the blocks."""
    for parent, keys in messages(chains):
        index.store(column, keys, parent)
    return CHAIN * len(chains)


def remove_all(index: PrefixIndex, column: int, chains: Sequence[bytes]) -> int:
    """Leaves first, as an agent evicts; in messages. Returns the blocks."""
    for chain in chains:
        for at in range(len(chain) - MESSAGE * KEY, -1, -MESSAGE * KEY):
            index.remove(column, chain[at : at + MESSAGE * KEY])
    return CHAIN * len(chains)


def tree(blocks: int, rounds: int) -> list[report.Row]:
    """The tree of prefixes without the wire: new, known and evicted blocks; bytes of a block's first and next place."""
    rates: dict[str, list[float]] = {"new": [], "known": [], "evicted": []}
    chains = random_chains(blocks)
    count = CHAIN * len(chains)
    first = further = 0.0
    collections = list[float]()
    for turn in range(rounds):
        index = PrefixIndex()
        one, two = index.add_column(), index.add_column()
        gc.collect()
        before = resident()
        rates["new"].append(rate(partial(store_all, index, one, chains)))
        middle = resident()
        begin = clock()
        gc.collect()
        collections.append(1000 * (clock() - begin))
        rates["known"].append(rate(partial(store_all, index, two, chains)))
        if turn == 0:  # later rounds reuse what earlier ones gave back
            first, further = (middle - before) / count, (resident() - middle) / count
        rates["evicted"].append(rate(partial(remove_all, index, two, chains)))
        rates["evicted"].append(rate(partial(remove_all, index, one, chains)))
    rows = [
        report.row(f"tree: {what} blocks, {MESSAGE} a call", "mooncake", s, "blocks/s") for what, s in rates.items()
    ]
    note = f"{count} blocks"
    rows.append(report.row("conductor: a full garbage collection", "mooncake", collections, "ms", note=note).most(5))
    rows.append(report.row("conductor: bytes of a block's first place", "mooncake", [first], "B", note=note).most(200))
    return [*rows, report.row("conductor: bytes of each further place", "mooncake", [further], "B").most(16)]


def entries(chains: Sequence[bytes], at_once: int, agent: bytes) -> list[tuple[int, bytes]]:
    """The stream of an agent that commits ``at_once`` blocks between two sendings: (id, entry)."""
    publisher = Publisher(agent, 1)
    out: list[tuple[int, bytes]] = []
    for parent, keys in messages(chains, at_once):
        publisher.committed(parent, split_keys(keys), DRAM)
        while flights := publisher.take():
            for shard, some in flights.items():
                out += [(len(out) + at, entry) for at, entry in enumerate(some, 1)]
                publisher.answered(shard, [(OK, unpack(entry).state) for entry in some])
    return out


def in_turn(blocks: int, seed: int) -> list[tuple[int, bytes]]:
    """The stream of :data:`AGENTS` agents that commit :data:`MESSAGE` blocks each, one after the other."""
    streams = [
        entries(random_chains(blocks // AGENTS, seed * AGENTS + agent), MESSAGE, code(agent + 1))
        for agent in range(AGENTS)
    ]
    mixed = (entry for together in zip(*streams, strict=True) for _, entry in together)
    return list(enumerate(mixed, 1))


def empty_mirror() -> Mirror:
    """Follows the only shard, in which nothing is yet."""
    core = Mirror(1)
    core.begin(0, 0, {})
    for _ in core.finish(0, 0, 0.0):
        pass
    core.living([code(agent + 1) for agent in range(AGENTS)], 0.0)
    return core


def mirror(blocks: int, rounds: int) -> list[report.Row]:
    """Applied as they come from the stream, decoding included, by how much a commit holds and whose it is."""
    streams: dict[str, Callable[[int], list[tuple[int, bytes]]]] = {
        f"{MESSAGE} committed at a time": lambda turn: entries(random_chains(blocks // 8, turn), MESSAGE, code(1)),
        f"{MESSAGE} at a time, {AGENTS} agents in turn": lambda turn: in_turn(blocks // 8, turn),
        f"{CHAIN} committed at a time": lambda turn: entries(random_chains(blocks // 8, turn), CHAIN, code(1)),
    }
    rows: list[report.Row] = []
    for what, stream in streams.items():
        results = [applied(stream(turn)) for turn in range(rounds)]
        note = "unpacked, put together, stored, digested"
        row = report.row(f"mirror: blocks applied, {what}", "mooncake", [r[0] for r in results], "blocks/s", note=note)
        pauses = report.row(f"mirror: {what}: longest portion", "mooncake", [r[1] for r in results], "ms").most(5)
        rows += [row.least(2e6) if what.startswith(str(MESSAGE)) else row, pauses]
    return rows


def applied(sent: Sequence[tuple[int, bytes]]) -> tuple[float, float]:
    """(blocks a CPU second, milliseconds of the longest portion), read and cut as the shell does."""
    core, longest, spent = empty_mirror(), 0.0, 0.0
    gc.collect()
    for at in range(0, len(sent), MOST_ENTRIES):
        for portion in portions({0: sent[at : at + MOST_ENTRIES]}, PORTION):
            begin = clock()
            core.apply(portion, 0.0)
            took = clock() - begin
            spent, longest = spent + took, max(longest, took)
    if core.differences.keys() - {"new"}:
        raise SystemExit(f"the mirror differs: {core.differences}")
    return core.applied / spent, 1000 * longest


def lookups(blocks: int, rounds: int) -> list[report.Row]:
    """``match`` by instances and length, beside a peer's compiled tree on the same load: prefixes that fork, some with
    holes (benchmarks/peers/index_load.py). The answers are compared. Ours: thread CPU time."""
    rows: list[report.Row] = []
    with peer_tree() as (peer, why):
        for instances in (8, 64, 256, 1000):
            same = prefixes(instances)
            index, chains = loaded(same)
            if peer is not None:
                peer.ask(do="build", workers=instances)
                compare(index, chains, peer)
            for length in (32, 128, 512, 2048):
                ours, theirs = list[float](), list[float]()
                for _ in range(rounds):
                    ours += match_times(index, [chain[: length * KEY] for chain in chains])
                    if peer is not None:
                        theirs += peer.ask(do="times", length=length, count=LOOKUPS)["us"]
                what = f"match: {length} blocks, {instances} instances"
                rows += [
                    report.row(what, "mooncake", ours, "us"),
                    report.row(what, DYNAMO.name, theirs, "us", note=why),
                ]
                if theirs:
                    ratio = statistics.median(theirs) / statistics.median(ours)
                    rows.append(report.row(f"{what}: dynamo / mooncake", "mooncake", [ratio], "x").least(3.0))
    return rows


@contextmanager
def peer_tree() -> Iterator[tuple[Child | None, str]]:
    """Dynamo's tree in a process of its own, or why there is none."""
    with tempfile.TemporaryDirectory() as logs:
        try:
            argv = [str(python_of(DYNAMO)), "-m", "benchmarks.peers.dynamo_index"]
            child = Child(argv, {"DYN_LOG": "error"}, Path(logs) / "dynamo.log")
        except (Missing, Failed) as e:
            yield None, f"not run: {e}"
            return
        try:
            yield child, ""
        finally:
            child.close()


def loaded(given: Prefixes) -> tuple[PrefixIndex, list[bytes]]:
    """The load in an index whose columns are the workers, and the documents as chains."""
    keys = {block: block.to_bytes(8, "little") * 2 for document in given.documents for block in document}
    index = PrefixIndex()
    for _ in given.held:
        index.add_column()
    for worker, before, some in given.stores():
        parent = b"" if before is None else keys[before]
        index.store(worker, b"".join(keys[block] for block in some), parent)
    for worker, block in given.removals():
        index.remove(worker, keys[block])
    index.places.flush(1)
    return index, [b"".join(keys[block] for block in document) for document in given.documents]


def match_times(index: PrefixIndex, chains: Sequence[bytes]) -> list[float]:
    """Microseconds of CPU time of :data:`LOOKUPS` lookups, one document after the other; :data:`FEW` at a time, for to
    ask this clock is a system call."""
    out = []
    for turn in range(0, LOOKUPS, FEW):
        some = [chains[at % len(chains)] for at in range(turn, turn + FEW)]
        begin = clock()
        for chain in some:
            index.match(chain)
        out.append(1e6 * (clock() - begin) / FEW)
    return out


def compare(index: PrefixIndex, chains: Sequence[bytes], peer: Child) -> None:
    """Both say the same of every document, or the benchmark ends here."""
    for number, chain in enumerate(chains):
        for length in (32, 2048):
            found = index.match(chain[: length * KEY])
            ours = {str(worker): int(found[worker]) for worker in found.nonzero()[0].tolist()}
            theirs = peer.ask(do="scores", document=number, length=length)["scores"]
            if ours != {worker: blocks for worker, blocks in theirs.items() if blocks}:
                raise SystemExit(f"answers differ: document {number}, {length} blocks")


def stored(blocks: int, rounds: int) -> list[report.Row]:
    """Indexed through Redis, read anew by a cold mirror, published anew: once, it takes a minute."""
    rows = measure(blocks)
    most = {
        "resync by a cold mirror: seconds": 5.0,
        "resync by a cold mirror: longest pause of its loop": 5.0,
        "conductor: bytes of a block in the mirror": 200.0,
    }
    return [row.most(most[row.what]) if row.what in most else row for row in rows]


PARTS = {"tree": tree, "mirror": mirror, "lookups": lookups, "decisions": decisions, "stored": stored}


def run(part: str, blocks: int, rounds: int) -> list[report.Row]:
    """In a process of its own, which may have left others when it is given up: they end with it."""
    flags = ["--blocks", str(blocks), "--rounds", str(rounds), "--part", part]
    argv = [sys.executable, "-m", "benchmarks.index", *flags]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return [report.Row(part, "mooncake", None, "", note=f"not run: it took more than {LIMIT:g} s")]
    return [report.Row(**fields) for fields in json.loads(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=2_000_000, help="indexed (default 2,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each rate (default 3)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps([asdict(row) for row in PARTS[options.part](options.blocks, options.rounds)]))
        return
    rows: list[report.Row] = []
    for part in PARTS:
        begin = time.monotonic()
        rows += run(part, options.blocks, options.rounds)
        print(f"{part}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    report.write("conductor", rows)


if __name__ == "__main__":
    main()
