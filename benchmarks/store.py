"""``make bench-store``: the transfer engine and the store beside the machine's limits and the peers, in one run.

Each round lets every contender do every case once, one after the other on the same cores, and begins with another one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report, store_rdma, store_tables
from benchmarks.peers.environments import NIXL, UPSTREAM, Missing, Peer, library_path, python_of
from benchmarks.peers.lines import Child, Failed
from benchmarks.store_budgets import (
    OURS_BYTES,
    OURS_NEAR,
    OURS_SHM,
    OURS_TCP,
    SUITES,
    UPSTREAM_BYTES,
    Case,
    Cell,
    Table,
    budget_rows,
    speed_rows,
)
from benchmarks.store_budgets import UPSTREAM as UPSTREAM_BUFFERS
from benchmarks.transfer import MIB

ROUNDS_OF_LARGE = 3
LARGE = 64 * MIB
"""Cases that move so much in a call are run in the first few rounds only."""

LONGEST = 4.0
"""Seconds of a call, guessed from the case before, beyond which a contender is spared a larger one."""


@dataclass(frozen=True)
class Contender:
    """``who`` it is among those that its process plays. ``only``: the operations it has."""

    name: str
    process: str
    who: str
    only: tuple[str, ...] = ("read", "write", "put", "get")


TRANSFER_CONTENDERS = (
    Contender("memcpy", "ours", "memcpy"),
    Contender("raw socket", "ours", "raw socket"),
    Contender("2 raw streams", "ours", "2 raw streams"),
    Contender("shm", "ours", "shm"),
    Contender("tcp", "ours", "tcp"),
    Contender("upstream tcp", "upstream", ""),
    Contender("NIXL tcp", "nixl tcp", ""),
    Contender("NIXL shm", "nixl shm", ""),
)
CONTENDERS = {
    "transfers": TRANSFER_CONTENDERS,
    "paper": TRANSFER_CONTENDERS,
    "store": (
        Contender(OURS_NEAR, "ours store", "near"),
        Contender(OURS_BYTES, "ours store", "bytes"),
        Contender(OURS_TCP, "ours store", "far", ("get",)),
        Contender(OURS_SHM, "ours store shm", "far", ("get",)),
        Contender(UPSTREAM_BUFFERS, "upstream store", "registered"),
        Contender(UPSTREAM_BYTES, "upstream store", "bytes"),
    ),
}

Start = tuple[Peer | None, list[str], dict[str, str]]
STARTS: dict[str, Start] = {
    "ours": (None, ["ours_transfer"], {}),
    "upstream": (UPSTREAM, ["upstream_transfer"], {}),
    "nixl tcp": (NIXL, ["nixl_transfer"], {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}),
    "nixl shm": (NIXL, ["nixl_transfer"], {"UCX_TLS": "posix,sysv,cma,self,tcp"}),
    "ours store": (None, ["ours_store", "tcp"], {}),
    "ours store shm": (None, ["ours_store", "shm"], {}),
    "upstream store": (UPSTREAM, ["upstream_store"], {}),
}


class Processes:
    """The contenders' processes of one suite, started on first use; why the others are not there."""

    def __init__(self, logs: Path, torch: str) -> None:
        self._logs = logs
        self._torch = torch
        self._running: dict[str, Child] = {}
        self.missing: dict[str, str] = {}

    def get(self, name: str) -> Child | None:
        if name not in self._running and name not in self.missing:
            try:
                self._running[name] = self._start(name)
            except (Missing, Failed) as e:
                self.missing[name] = f"not run: {e}"
        return self._running.get(name)

    def _start(self, name: str) -> Child:
        peer, module, env = STARTS[name]
        python = sys.executable if peer is None else str(python_of(peer, self._torch))
        if peer is UPSTREAM:
            env = env | library_path()
        argv = [python, "-m", f"benchmarks.peers.{module[0]}", *module[1:]]
        return Child(argv, env, self._logs / f"{name.replace(' ', '-')}.log")

    def broke(self, name: str, why: str) -> None:
        self._running.pop(name).close()
        self.missing[name] = why

    def threads(self) -> dict[str, int]:
        """Threads of each process's whole contender, now."""
        return {
            name: sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in child.ready["pids"])
            for name, child in self._running.items()
        }

    def close(self) -> None:
        for child in self._running.values():
            child.close()


def run_suite(suite: str, processes: Processes, rounds: int, seconds: float) -> Table:
    contenders = CONTENDERS[suite]
    table: Table = {case: {c.name: Cell() for c in contenders if case.op in c.only} for case in SUITES[suite]}
    for turn in range(rounds):
        first = turn % len(contenders)
        for case, cells in table.items():
            if case.bytes >= LARGE and turn >= ROUNDS_OF_LARGE:
                continue
            print(f"round {turn + 1} of {rounds}: {suite}, {case.label}", file=sys.stderr)
            for contender in contenders[first:] + contenders[:first]:
                if contender.name in cells:
                    cell = cells[contender.name]
                    cell.why = too_long(table, case, contender.name) if not cell.seconds else cell.why
                    if cell.why.startswith("not run: a call"):
                        continue
                    sample(processes, contender, case, cell, turn, seconds)
    return table


def too_long(table: Table, case: Case, name: str) -> str:
    """Why a contender is not asked: at its speed in the largest case of this kind so far, it would take for ever."""
    done = [c for c, cells in table.items() if (c.tasks, c.op) == (case.tasks, case.op) and name in cells]
    done = [c for c in done if c.bytes < case.bytes and table[c][name].seconds]
    if case.bytes < LARGE or not done:
        return ""
    largest = max(done, key=lambda c: c.bytes)
    guess = table[largest][name].seconds[-1] * case.bytes / largest.bytes
    return f"not run: a call would take about {guess:.0f} s" if guess > LONGEST else ""


def sample(processes: Processes, contender: Contender, case: Case, cell: Cell, turn: int, seconds: float) -> None:
    child = processes.get(contender.process)
    if child is None:
        cell.why = processes.missing[contender.process]
        return
    try:
        said = child.ask(
            who=contender.who, op=case.op, size=case.size, count=case.count, tasks=case.tasks, seconds=seconds
        )
    except Failed as e:
        processes.broke(contender.process, f"broke: {e}")
        cell.why = processes.missing[contender.process]
        return
    if "error" in said:
        cell.why = f"round {turn + 1}: {said['error']}"[:200]
        return
    cell.rounds.append(turn)
    cell.seconds.append(said["seconds"])
    cell.late.append(said["p99"])
    cell.cpu.append(said["cpu"])


def thread_rows(suite: str, processes: Processes) -> list[report.Row]:
    return [
        report.row(f"{suite}: threads of all its processes", name, [count], "")
        for name, count in processes.threads().items()
    ]


def measure(suites: Sequence[str], options: argparse.Namespace, logs: Path) -> list[report.Row]:
    """Saved after each suite: what was measured stays, whatever becomes of the next one."""
    table: Table = {}
    threads: list[report.Row] = []
    rdma: list[report.Row] = []
    rows: list[report.Row] = []
    for suite in suites:
        if suite == "rdma":
            rdma = store_rdma.measure()
        else:
            processes = Processes(logs, options.torch)
            try:
                table |= run_suite(suite, processes, options.rounds, options.seconds)
                threads += thread_rows(suite, processes)
            finally:
                processes.close()
        rows = [*budget_rows(table), *speed_rows(table), *threads, *rdma]
        report.save(options.name, rows)
    return rows


def main() -> None:
    known = [*SUITES, "rdma"]
    parser = argparse.ArgumentParser(prog="make bench-store", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each row (default 7)")
    parser.add_argument("--seconds", type=float, default=0.15, help="that a contender calls in each (default 0.15)")
    parser.add_argument("--cores", type=int, default=2, help="that all processes share (default 2)")
    parser.add_argument("--torch", default="", help="pip arguments for the torch of NIXL's environment")
    parser.add_argument("--name", default="store", help="of the file in benchmarks/results (default store)")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(known):
        parser.error(f"no such suite: {', '.join(sorted(unknown))} (of {', '.join(known)})")
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)  # and all children's
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory(prefix="bench-store-") as logs:
        rows = measure(options.suites or known, options, Path(logs))
    store_tables.show(rows)


if __name__ == "__main__":
    main()
