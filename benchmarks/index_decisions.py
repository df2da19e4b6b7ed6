"""A part of ``benchmarks.index``: hash, match and choose for one prompt, CPU time of the thread."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks import report
from benchmarks.index_load import CHAIN, clock, random_chains
from services.conductor.dispatch.matching import AgentTable
from services.conductor.gateway.chains import Chains
from services.conductor.scheduling import Ask, Ledger, Objectives, PolicyOptions, Scheduler, policy
from shared.blocks import KEY, Tokens, chain_keys
from shared.index import code
from shared.index.mirror import Mirror
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Load, Ref
from shared.records import AgentRecord

BLOCK = 256
AGENTS, PREFILLS = 100, 80
PROMPTS = 8
NEW = 2
"""Blocks that a turn of a chat adds to what was asked before."""

BUDGETS = {8 << 10: 0.15, 128 << 10: 1.2}
"""Milliseconds by tokens of the prompt."""

ROOT = bytes(KEY)

Hashing = Callable[[bytes, Tokens, int], bytes]


@dataclass
class Fleet:
    """Instances with an agent each, and what their agents hold."""

    core: Mirror = field(default_factory=Mirror)
    agents: AgentTable = field(default_factory=AgentTable)
    ledger: Ledger = field(default_factory=Ledger)
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(policy("global_cache", PolicyOptions())))

    def join(self, number: int) -> None:
        me, id = code(number + 1), f"a{number}"
        self.agents.put(
            AgentRecord(ref=Ref(id, number + 1), node="", code=me, host="", port=1, host_id=""),
        )
        self.ledger.put_agent(id, 1e9, 0.0, number < PREFILLS)
        self.core._column(me)
        if number < PREFILLS:
            self.ledger.put_prefill(f"p{number}", id, PrefillModel(0.01, 1e-4, 1e-9))
            self.ledger.report(f"p{number}", Load(queued=number % 7), 0.0)
        else:
            self.ledger.put_decode(f"d{number}", DecodeModel(0.02, 1e-4, 1e-8))

    def hold(self, blocks: int, asked: list[bytes]) -> None:
        """``blocks`` that nobody asks for, and of each chain that is asked for a prefix at every agent."""
        rng, columns, prefix = np.random.default_rng(3), list(self.core.columns.values()), self.core.prefix
        for number, chain in enumerate(random_chains(blocks)):
            prefix.store(columns[number % len(columns)], chain, b"")
        for column in columns:
            for chain in asked:
                prefix.store(column, chain[: int(rng.integers(0, CHAIN)) * KEY], b"")
        prefix.places.flush(1)

    def decide(self, tokens: Tokens, hashing: Hashing) -> list[float]:
        """Milliseconds to hash, to match, to choose, and in all."""
        times = [clock()]
        chain = hashing(ROOT, tokens, BLOCK)
        times.append(clock())
        lengths = self.agents.matches(*self.core.lengths(chain))
        times.append(clock())
        ask = Ask(len(tokens), len(chain) // KEY, BLOCK, BLOCK << 10, 256)
        self.scheduler.decide(ask, self.ledger.view(chain, lengths, 0.0, block_size=BLOCK), Objectives(1e9, 1e9))
        times.append(clock())
        return [1000 * (b - a) for a, b in zip([*times[:3], times[0]], [*times[1:], times[3]], strict=True)]


def decisions(blocks: int, rounds: int) -> list[report.Row]:
    """For 100 instances (80 prefill, 20 decode) and their agents; half of ``blocks`` indexed. A new prompt, and the
    next turn of a chat whose last turn was hashed here; plain sha256 of as many bytes in one piece beside it."""
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, 1 << 17, (PROMPTS, CHAIN * BLOCK), dtype=np.uint32)
    fleet = Fleet()
    for number in range(AGENTS):
        fleet.join(number)
    fleet.core.living([code(number + 1) for number in range(AGENTS)], 0.0)
    fleet.hold(blocks // 2, [chain_keys(ROOT, prompt, BLOCK) for prompt in prompts])
    gc.collect()
    gc.freeze()
    rows: list[report.Row] = []
    for count, budget in BUDGETS.items():
        plain, new, turns = list[float](), list[list[float]](), list[list[float]]()
        chains = Chains()
        for turn in range(100 * rounds):
            prompt = prompts[turn % PROMPTS][:count].copy()
            plain.append(hashed(prompt))
            new.append(fleet.decide(prompt, chain_keys))
            chains.keys(ROOT, prompt[: -NEW * BLOCK], BLOCK)
            prompt[-NEW * BLOCK :] = rng.integers(0, 1 << 17, NEW * BLOCK)  # nobody has asked this before
            turns.append(fleet.decide(prompt, chains.keys))
        what = f"decision, {count >> 10}k tokens"
        rows.append(report.row(f"{what}: plain sha256 of its tokens", "hashlib", plain, "ms"))
        for kind, samples in (("a new prompt", new), ("the next turn of a chat", turns)):
            for name, values in zip(("hash", "match", "choose", "all"), zip(*samples, strict=True), strict=True):
                row = report.row(f"{what}, {kind}: {name}", "mooncake", values, "ms")
                rows.append(row.most(budget) if name == "all" else row)
    return rows


def hashed(tokens: Tokens) -> float:
    """Milliseconds."""
    data = tokens.tobytes()
    begin = clock()
    hashlib.sha256(data).digest()
    return 1000 * (clock() - begin)
