"""``mooncake load``: an open-loop replay of a trace, or of generated requests, against any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import sys
import urllib.parse
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec

from cli.api import DEFAULT_URL, Api, ApiError, hinted
from cli.console import err, out, print_json
from cli.load.client import Client, Manners
from cli.load.live import watched
from cli.load.outcome import Outcome
from cli.load.plots import check_plots, plot_load
from cli.load.report import Objective, report
from cli.load.run import Load
from cli.load.source import SHAPES, Bodies, Source, names, parse_vocabulary
from cli.load.table import load_table
from cli.plots import writable
from shared.errors import InvalidInput, MooncakeError
from shared.workload.measures import endless_hits
from shared.workload.trace import TraceRequest

INTERRUPTED = 130
MOST_RETRIES = 20

EPILOG = "Parameters for --set:\n\n" + "\n\n".join(
    f"\b\n{name}: {', '.join(names(shape()))}" for name, shape in SHAPES.items()
)


@dataclass(frozen=True)
class Target:
    """The server under load. ``context``: tokens that prompt and answer may have there, None where it does not say."""

    url: str
    key: str
    model: str
    context: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What is done with a source, and what is printed and written of it."""

    objective: Objective
    bodies: Bodies
    retries: int
    timeout: float
    records: str
    plot: str
    as_json: bool


@click.command(epilog=EPILOG, short_help="Replay a trace, or made requests, and say how it went.")
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", show_default=True, help="The server.")
@click.option("--model", default="", help="A served model; default: the first one.")
@click.option("--api-key", default="", envvar="MOONCAKE_API_KEY", help="Key, where the server asks for one.")
@click.option("--trace", default="", type=click.Path(dir_okay=False), help="JSONL in the paper's format.")
@click.option("--generate", type=click.Choice([*SHAPES]), default=None, help="Requests from a generator.  [chat]")
@click.option("--set", "parameters", multiple=True, metavar="NAME=VALUE", help="Parameter of the generator; see below.")
@click.option("--requests", type=click.IntRange(1), default=None, help="So many, the first ones.")
@click.option("--duration", type=click.FloatRange(0, min_open=True), default=None, help="Seconds of arrivals.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=None, help="Arrivals a second, in the mean.")
@click.option("--compress", type=click.FloatRange(0, min_open=True), default=1.0, help="So many times as fast.")
@click.option(
    "--shorten", type=click.Choice(["1", "2", "4", "8", "16", "32", "64"]), default="1", help="Divide all lengths."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals within ticks, and of the generator.")
@click.option("--no-spread", is_flag=True, help="Arrivals at the very instants of the trace, many at one.")
@click.option(
    "--prompt",
    type=click.Choice(["ids", "text", "chat"]),
    default="ids",
    show_default=True,
    help="Token ids or text for /v1/completions, or text as a chat.",
)
@click.option("--vocabulary", default="1000:30000", show_default=True, help="Range of token ids to draw from.")
@click.option("--salt", type=int, default=0, help="Another number makes other prompts: nothing of them is cached.")
@click.option("--eos/--ignore-eos", default=False, help="May answers end before their length?  [--ignore-eos]")
@click.option("--slo-ttft-ms", type=click.FloatRange(0, min_open=True), default=30_000.0, show_default=True)
@click.option("--slo-tbt-ms", type=click.FloatRange(0, min_open=True), default=200.0, show_default=True)
@click.option("--send-slo", is_flag=True, help="Tell the server these objectives, as x-slo-ttft-ms and x-slo-tbt-ms.")
@click.option("--obey-retry-after", is_flag=True, help=f"Come back after a 429, up to {MOST_RETRIES} times.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds of one request.")
@click.option("--allow-remote", is_flag=True, help="The server may be another machine.")
@click.option("--records", default="", type=click.Path(dir_okay=False), help="Write every request's outcome, JSONL.")
@click.option("--plot", default="", type=click.Path(dir_okay=False), help="Write plots, as PNG, SVG or PDF.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, nothing else.")
def load(
    url: str, model: str, api_key: str, allow_remote: bool, slo_ttft_ms: float, slo_tbt_ms: float, send_slo: bool,
    obey_retry_after: bool, prompt: str, vocabulary: str, salt: int, eos: bool, timeout: float, records: str,
    plot: str, as_json: bool, **chosen: Any,
) -> None:  # fmt: skip
    """Replay a trace or a generator's requests, and say how they were served.

    An open loop: requests are sent when they are due, and never wait for answers. Where the load generator itself is
    late, it says so. Times to first token count from when a request was due. TBT is the mean of the worst tenth of an
    answer's gaps between tokens. Ctrl-C ends the load and reports what was measured.
    """
    try:
        source = _source(chosen)
        check_plots(plot)
        writable(records, "records")
        _check_local(url, allow_remote)
        slo = {"x-slo-ttft-ms": str(round(slo_ttft_ms)), "x-slo-tbt-ms": str(round(slo_tbt_ms))} if send_slo else {}
        target = replace(found(Api(url, api_key, 30.0), api_key, model), headers=slo)
        bodies = Bodies(target.model, prompt, parse_vocabulary(vocabulary), source.block, salt, not eos)
        objective, retries = Objective(slo_ttft_ms / 1000, slo_tbt_ms / 1000), MOST_RETRIES * obey_retry_after
        interrupted = run(source, target, Options(objective, bodies, retries, timeout, records, plot, as_json))
    except ApiError as error:
        raise click.ClickException(hinted(error)) from None
    except (MooncakeError, OSError) as error:
        raise click.ClickException(getattr(error, "message", str(error))) from None
    sys.exit(INTERRUPTED if interrupted else 0)


def _source(chosen: dict[str, Any]) -> Source:
    if chosen["trace"] and chosen["generate"]:
        raise click.UsageError("--trace and --generate exclude each other")
    if chosen["parameters"] and chosen["trace"]:
        raise click.UsageError("--set is for generators; a trace has no parameters")
    pairs = [parameter.partition("=") for parameter in chosen["parameters"]]
    return Source(
        trace=chosen["trace"],
        generator="" if chosen["trace"] else chosen["generate"] or "chat",
        requests=chosen["requests"],
        duration_s=chosen["duration"],
        rate=chosen["rate"],
        compress=chosen["compress"],
        shorten=int(chosen["shorten"]),
        seed=chosen["seed"],
        spread=not chosen["no_spread"],
        parameters=tuple((name, value) for name, _, value in pairs),
    )


def _check_local(url: str, allow_remote: bool) -> None:
    """A load is an attack where nobody waits for it. Raises InvalidInput."""
    try:
        host = urllib.parse.urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise InvalidInput(f"{url!r} is no address of a server; write it as {DEFAULT_URL}", field="url")
    if allow_remote:
        return
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise InvalidInput(f"{host}: {getattr(error, 'strerror', None) or error}", field="url") from None
    if not all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses):
        raise InvalidInput(f"{host} is another machine; --allow-remote puts load on that, too", field="url")


def found(api: Api, key: str, model: str) -> Target:
    """The model to ask for, and how long its context is. Raises ApiError."""
    served = api.models()
    if not model and not served:
        raise ApiError("no model is served yet (`mooncake status` shows the instances)", 503)
    model = model or next(iter(served))
    context = served.get(model, {}).get("max_model_len")
    if context is not None and not (isinstance(context, int) and context > 0):
        raise ApiError(f"{api.url}/v1/models has the max_model_len {context!r}, which is no number of tokens", 502)
    return Target(api.url, key, model, context)


def run(source: Source, target: Target, options: Options) -> bool:
    """Replay and report; whether somebody stopped it. Raises InvalidInput."""
    every = source.load()
    requests = fitting(every, target.context)
    if not every:
        raise InvalidInput(f"{source.name} has no request within what was asked for")
    if not requests:
        raise InvalidInput(f"none of {len(every)} requests fits into the context of {target.context} tokens")
    load = Load(requests, options.bodies)
    if not options.as_json:
        seconds = requests[-1].arrival - requests[0].arrival
        said = f"{source.name}: {len(requests)} requests over {seconds:.0f} s to {target.url}"
        out.print(said, markup=False)
    asyncio.run(_driven(load, target, options))
    described = {"source": source.name, "model": target.model, "seed": source.seed, "interrupted": load.interrupted}
    described |= {"left_out": len(every) - len(requests), "hit_possible": endless_hits(requests, source.block)}
    figures = {**described, **report(load.outcomes, options.objective, load.seconds)}
    _shown(figures, load.outcomes, options)
    return load.interrupted


def fitting(requests: list[TraceRequest], context: int | None) -> list[TraceRequest]:
    """Those that a model with this context can answer."""
    if context is None:
        return requests
    return [request for request in requests if request.input_tokens + max(1, request.output_tokens) <= context]


async def _driven(load: Load, target: Target, options: Options) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, load.stop)
    headers = {"Content-Type": "application/json", **target.headers}
    headers |= {"Authorization": f"Bearer {target.key}"} if target.key else {}
    manners = Manners(target.url + options.bodies.path, headers, options.retries, options.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
        client = Client(session, manners, load.clock)
        async with watched(load, options.objective):
            await load.run(client.ask)


def _shown(figures: dict[str, Any], outcomes: list[Outcome], options: Options) -> None:
    """The figures first: what cannot be written must not take them along."""
    if options.as_json:
        print_json(figures)
    else:
        out.print(load_table(figures))
        for note in notes(figures):
            err.print(note, style="yellow")
    if options.records:
        lines = [msgspec.json.encode(asdict(outcome)) + b"\n" for outcome in outcomes]
        Path(options.records).write_bytes(b"".join(lines))
    if options.plot:
        plot_load(options.plot, outcomes, options.objective)


def notes(figures: dict[str, Any]) -> list[str]:
    """What has to be known to read the figures rightly."""
    said = []
    if figures["generator_late"]:
        late = f"p99 {figures['late_p99_s']:.3f} s, at most {figures['late_max_s']:.3f} s"
        said.append(f"This generator was late ({late}): part of the times to first token is its own.")
    if figures["left_out"]:
        said.append(f"{figures['left_out']} requests are longer than the model's context and were not sent.")
    if figures["interrupted"]:
        said.append(f"Stopped before its end: {figures['unfinished']} requests were under way, and are not counted.")
    if figures["uncounted"]:
        said.append(f"{figures['uncounted']} answers came without usage: their tokens are counted as they came.")
    if figures["completed"] and figures["hit_by_token"] is None:
        said.append("The server does not say how much of a prompt it had cached.")
    return said
