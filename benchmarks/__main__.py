"""``make bench``: the walking mesh with the real model, at one thread an engine. ``--rounds N`` samples a row.

``python -m benchmarks fidelity``, ``order``, ``prediction``, ``replay`` and ``simulator`` have options of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from importlib import import_module

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SUITES = ("conductors", "gateway", "keeper", "overload", "prefix", "split", "streams", "tracing")


ALONE = ("fidelity", "order", "prediction", "replay", "simulator")
"""Suites that are not part of ``make bench``: each wants the machine for minutes, and has its own options."""


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in ALONE:
        return run_alone(sys.argv[1], sys.argv[2:])
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each row (default 5)")
    parser.add_argument("--model", default="", help="folder or hub id; default: the default model")
    parser.add_argument("--streams", type=int, default=1000, help="of the suite streams, at once (default 1000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="each lasts; loads of overload a third of it (default 60)",
    )
    parser.add_argument("--rate", type=float, default=4.0, help="tokens a second of each of them (default 4)")
    parser.add_argument("--add", action="store_true", help="conductors, keeper: to the samples of earlier runs")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"no such suite: {', '.join(sorted(unknown))} (of {', '.join(SUITES)})")
    from shared.model import resolve_model, served_name

    path, model = str(resolve_model(options.model)), served_name(options.model)
    for suite in options.suites or SUITES:
        asyncio.run(run(suite, path, model, options))


def run_alone(suite: str, arguments: list[str]) -> None:
    import_module(f"benchmarks.{suite}").main(arguments)


async def run(suite: str, path: str, model: str, options: argparse.Namespace) -> None:
    from benchmarks import conductors, gateway, keeper, overload, prefix, report, split, streams, tracing
    from shared.model import served_name

    rounds: int = options.rounds

    if suite == "gateway":
        report.write("gateway", await gateway.measure(path, 40 * rounds))
    elif suite == "conductors":
        before = report.earlier("conductors") if options.add else {}
        report.write("conductors", await conductors.measure(path, max(1, rounds // 2), before))
    elif suite == "keeper":
        before = report.earlier("keeper") if options.add else {}
        report.write("keeper", await keeper.measure(path, max(1, rounds // 2), before))
    elif suite == "overload":
        report.write("overload", await overload.measure(path, served_name(path), options.seconds / 3))
    elif suite == "prefix":
        report.write("prefix", await prefix.measure(model, rounds))
    elif suite == "tracing":
        report.write("tracing", await tracing.measure(served_name(path), 2 * rounds))
    elif suite == "streams":
        found = await streams.measure(path, served_name(path), options.seconds, options.streams, options.rate)
        report.write("streams", found)
    else:
        report.write("split", await split.measure(model, path, rounds))


if __name__ == "__main__":
    main()
