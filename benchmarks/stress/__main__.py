"""``make stress``: writers, readers, evictors and killers over several agents; every byte that is read is checked."""

from __future__ import annotations

import argparse
import sys

from benchmarks.stress.fleet import Options
from benchmarks.stress.run import Outcome, stress

SHOWN = 20


def say(outcome: Outcome) -> None:
    """Everything found, faults by kind, and the line that scripts read, last."""
    for name in ("mismatches", "leaks", "crashes"):
        found = getattr(outcome, name)
        for words in found[:SHOWN]:
            print(f"{name}: {words}")
        if len(found) > SHOWN:
            print(f"{name}: and {len(found) - SHOWN} more")
    print(f"refused or failed calls: {outcome.errors}")
    print("faults: " + (", ".join(f"{kind} {count}" for kind, count in sorted(outcome.faults.items())) or "none"))
    print(outcome.line(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make stress", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of work under faults (default 60)")
    parser.add_argument("--interval", type=float, default=1.5, help="seconds between two faults, about (default 1.5)")
    parser.add_argument("--agents", type=int, default=3, help="store agents; transports take turns (default 3)")
    parser.add_argument("--clients", type=int, default=1, help="multiplies the processes of each role (default 1)")
    parser.add_argument("--keys", type=int, default=1024, help="size of the working set in blocks (default 1024)")
    parser.add_argument("--slots", type=int, default=96, help="blocks in each agent's pool (default 96)")
    parser.add_argument("--ssd", action="store_true", help="give each agent an SSD tier of four times its pool")
    parser.add_argument("--seed", type=int, default=0, help="of the draws of faults and keys (default 0)")
    chosen = parser.parse_args()
    if chosen.agents < 2 or chosen.seconds <= 0 or chosen.interval <= 0 or chosen.clients < 1:
        parser.error("at least 2 agents, 1 client a role, and more than 0 seconds")
    n = chosen.clients
    options = Options(
        agents=chosen.agents,
        writers=2 * n,
        readers=2 * n,
        holders=n,
        evictors=n,
        landers=n,
        keys=chosen.keys,
        slots=chosen.slots,
        ssd=chosen.ssd,
        seed=chosen.seed,
    )
    outcome = stress(options, chosen.seconds, chosen.interval)
    say(outcome)
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
