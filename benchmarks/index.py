"""The block index: applying, looking up, deciding (``python -m benchmarks.index``).

CPU seconds of the thread throughout, so that neighbours are not measured; each part runs in a process of its own.
What lies in Redis, and how long agents and mirrors take with it: ``benchmarks.metadata``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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

import numpy as np

from benchmarks import report
from benchmarks.peers.environments import DYNAMO, Missing, python_of
from benchmarks.peers.index_load import Prefixes, prefixes
from benchmarks.peers.lines import Child, Failed
from services.conductor.dispatch.matching import AgentTable
from services.conductor.scheduling import Ask, Ledger, Objectives, PolicyOptions, Scheduler, policy
from shared.blocks import KEY, chain_keys, split_keys
from shared.index import DRAM, code
from shared.index.entry import unpack
from shared.index.mirror import Mirror
from shared.index.mirroring import MOST_ENTRIES, PORTION, portions
from shared.index.prefix import PrefixIndex
from shared.index.publisher import Publisher
from shared.index.twin import OK
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load, Ref
from shared.records import AgentRecord

CHAIN = 512
"""Blocks of a chain: a prompt of 128k tokens at 256 a block."""

MESSAGE = 16
BLOCK = 256
LOOKUPS = 200
"""Of one length in a round."""

clock = time.thread_time


def random_chains(blocks: int, seed: int = 0) -> list[bytes]:
    """Chains of :data:`CHAIN` keys; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(CHAIN * KEY) for _ in range(-(-blocks // CHAIN))]


def messages(chains: Sequence[bytes], size: int = MESSAGE) -> Iterator[tuple[bytes, bytes]]:
    """(parent, keys), ``size`` keys at a time."""
    for chain in chains:
        for at in range(0, len(chain), size * KEY):
            yield chain[at - KEY : at] if at else b"", chain[at : at + size * KEY]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    for turn in range(rounds):
        index = PrefixIndex()
        one, two = index.add_column(), index.add_column()
        gc.collect()
        before = resident()
        rates["new"].append(rate(partial(store_all, index, one, chains)))
        middle = resident()
        rates["known"].append(rate(partial(store_all, index, two, chains)))
        if turn == 0:  # later rounds reuse what earlier ones gave back
            first, further = (middle - before) / count, (resident() - middle) / count
        rates["evicted"].append(rate(partial(remove_all, index, two, chains)))
        rates["evicted"].append(rate(partial(remove_all, index, one, chains)))
    rows = [
        report.row(f"tree: {what} blocks, {MESSAGE} a call", "mooncake", s, "blocks/s") for what, s in rates.items()
    ]
    rows.append(
        report.row("conductor: bytes of a block's first place", "mooncake", [first], "B", note=f"{count} blocks")
    )
    return [*rows, report.row("conductor: bytes of each further place", "mooncake", [further], "B")]


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


def empty_mirror() -> Mirror:
    """Follows the only shard, in which nothing is yet."""
    core = Mirror(1)
    core.begin(0, 0, {})
    for _ in core.finish(0, 0, 0.0):
        pass
    core.living([code(1)], 0.0)
    return core


def mirror(blocks: int, rounds: int) -> list[report.Row]:
    """Applied as they come from the stream, decoding included, by how much a commit holds; the longest that one portion
    took, as the shell cuts what it reads."""
    rows: list[report.Row] = []
    for at_once in (MESSAGE, CHAIN):
        rates, pauses = list[float](), list[float]()
        for turn in range(rounds):
            sent = entries(random_chains(blocks // 8, turn), at_once, code(1))
            reads = [sent[at : at + MOST_ENTRIES] for at in range(0, len(sent), MOST_ENTRIES)]
            core, begin, longest = empty_mirror(), clock(), 0.0
            for read in reads:
                for portion in portions({0: read}, PORTION):
                    before = clock()
                    core.apply(portion, 0.0)
                    longest = max(longest, clock() - before)
            rates.append(core.applied / (clock() - begin))
            pauses.append(1000 * longest)
            if core.differences.keys() - {"new"}:
                raise SystemExit(f"the mirror differs: {core.differences}")
        what, note = (
            f"mirror: blocks applied, {at_once} committed at a time",
            "unpacked, put together, stored, digested",
        )
        rows.append(report.row(what, "mooncake", rates, "blocks/s", note=note))
        rows.append(report.row(f"{what}: longest portion", "mooncake", pauses, "ms"))
    return rows


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
                    row = report.row(f"{what}: dynamo / mooncake", "mooncake", [ratio], "x")
                    row.budget, row.met = 3.0, ratio >= 3.0
                    rows.append(row)
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
    return index, [b"".join(keys[block] for block in document) for document in given.documents]


def match_times(index: PrefixIndex, chains: Sequence[bytes]) -> list[float]:
    """Microseconds of CPU time of :data:`LOOKUPS` lookups, one document after the other."""
    out = []
    for turn in range(LOOKUPS):
        chain = chains[turn % len(chains)]
        begin = clock()
        index.match(chain)
        out.append(1e6 * (clock() - begin))
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


def decisions(blocks: int, rounds: int) -> list[report.Row]:
    """Hash, match and choose for 100 instances (80 prefill, 20 decode) and their agents; half of ``blocks`` indexed."""
    core, agents, ledger = Mirror(), AgentTable(), Ledger()
    tokens = np.random.default_rng(2).integers(0, 1 << 17, (8, CHAIN * BLOCK), dtype=np.uint32)
    asked = [chain_keys(bytes(KEY), row, BLOCK) for row in tokens]
    columns = []
    for number in range(100):
        me = code(number + 1)
        record = AgentRecord(ref=Ref(f"a{number}", number + 1), node="", code=me, host="", port=1, host_id="")
        agents.put(record)
        ledger.put_agent(f"a{number}", 1e9, 0.0, number < 80)
        columns.append(core._column(me))
        if number < 80:
            ledger.put_prefill(f"p{number}", f"a{number}", PrefillModel(0.01, 1e-4, 1e-9))
            ledger.report(f"p{number}", Load(queued=number % 7), 0.0)
        else:
            ledger.put_decode(f"d{number}", DecodeModel(0.02, 1e-4, 1e-8))
    core.living([code(number + 1) for number in range(100)], 0.0)
    for number, chain in enumerate(random_chains(blocks // 2)):
        core.prefix.store(columns[number % 100], chain, b"")
    rng = np.random.default_rng(3)
    for column in columns:
        for chain in asked:
            core.prefix.store(column, chain[: int(rng.integers(0, CHAIN)) * KEY], b"")
    gc.collect()
    gc.freeze()
    scheduler, goals = Scheduler(policy("global_cache", PolicyOptions())), Objectives(1e9, 1e9)
    rows = []
    for count in (8 << 10, 128 << 10):
        parts: dict[str, list[float]] = {"hash": [], "match": [], "choose": [], "all": []}
        for turn in range(100 * rounds):
            prompt, times = tokens[turn % 8][:count], [clock()]
            chain = chain_keys(bytes(KEY), prompt, BLOCK)
            times.append(clock())
            lengths = agents.matches(*core.lengths(chain))
            times.append(clock())
            ask = Ask(count, len(chain) // KEY, BLOCK, BLOCK << 10, 256)
            scheduler.decide(ask, ledger.view(chain, lengths, 0.0, block_size=BLOCK), goals)
            times.append(clock())
            for name, seconds in zip(parts, np.diff([*times, times[0]]), strict=True):
                parts[name].append(1000 * abs(float(seconds)))
        rows += [
            report.row(f"decision, {count >> 10}k tokens: {name}", "mooncake", s, "ms") for name, s in parts.items()
        ]
    return rows


PARTS = {"tree": tree, "mirror": mirror, "lookups": lookups, "decisions": decisions}


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
        flags = ["--blocks", str(options.blocks), "--rounds", str(options.rounds), "--part", part]
        done = subprocess.run([sys.executable, "-m", "benchmarks.index", *flags], stdout=subprocess.PIPE, check=True)
        rows += [report.Row(**fields) for fields in json.loads(done.stdout)]
    report.write("conductor", rows)


if __name__ == "__main__":
    main()
