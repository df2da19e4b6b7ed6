"""``mooncake load`` against servers: nobody waits for answers, refusals and errors are told apart, Ctrl-C reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from cli.load.client import Client, Manners
from cli.load.outcome import End, Outcome
from cli.load.run import Load
from cli.main import main
from shared.tasks import end
from shared.workload.trace import TraceRequest, read_trace, write_trace
from tests.cli.fake_conductor import FakeConductor, fake_conductor

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TEXT = [{"choices": [{"text": word, "finish_reason": None}]} for word in ("a", "b", "c")]
DETAILS = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 6}}
ENDING: list[Any] = [
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": DETAILS},
    "[DONE]",
]


@contextlib.asynccontextmanager
async def serving(handler: Handler, retries: int = 0, timeout: float = 100.0) -> AsyncIterator[Client]:
    """A client of a server that answers every POST so."""
    app = web.Application()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield Client(session, Manners(f"http://127.0.0.1:{port}/", {}, retries, timeout))
    finally:
        await runner.cleanup()


async def stream(request: web.Request, events: list[Any]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    return response


async def answer(request: web.Request) -> web.StreamResponse:
    return await stream(request, [*TEXT, *ENDING])


async def asked(handler: Handler, **options: Any) -> Outcome:
    outcome = Outcome(0, 0.0, 9, 3)
    async with serving(handler, **options) as client:
        await client.ask(b"{}", outcome)
    return outcome


def requests(count: int, apart: float) -> list[TraceRequest]:
    return [TraceRequest(5.0 + i * apart, 9, 3, (i,)) for i in range(count)]


async def test_an_answer_is_timed_and_counted() -> None:
    outcome = await asked(answer)
    assert outcome.end is End.OK and outcome.tries == 1 and not outcome.error
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens) == (9, 6, 3)
    assert outcome.ttft is not None and outcome.tbt is not None and outcome.ended >= outcome.ttft


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (TEXT, "the stream ended early"),
        ([*TEXT, {"error": {"message": "attempts used up"}}], "error event: attempts used up"),
        (["[DONE]"], "an answer without tokens"),
        (["<html>"], "none of OpenAI's"),
    ],
)
async def test_a_stream_that_is_no_answer_is_an_error(events: list[Any], error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, events)

    outcome = await asked(handler)
    assert outcome.end is End.ERROR and error in outcome.error


async def test_statuses_are_told_apart() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "contended"}}, status=429, headers={"Retry-After": "7"})

    async def fail(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "no_decode"}}, status=503)

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://example.com/")

    refused = await asked(refuse)
    assert (refused.end, refused.tries, len(refused.refusals)) == (End.REJECTED, 1, 1)
    assert (await asked(fail)).error == "503 no_decode"
    assert (await asked(elsewhere)).error.startswith("307"), "load goes where it was sent, and nowhere else"


async def test_retry_after_is_obeyed_when_asked_for() -> None:
    seen: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(asyncio.get_running_loop().time())
        if len(seen) < 3:
            return web.json_response({}, status=429, headers={"Retry-After": "9", "Retry-After-Ms": "50"})
        return await answer(request)

    outcome = await asked(handler, retries=5)
    assert (outcome.end, outcome.tries, len(outcome.refusals)) == (End.OK, 3, 2)
    assert all(later - before >= 0.05 for before, later in itertools.pairwise(seen))
    seen.clear()
    assert (await asked(handler, retries=1)).end is End.REJECTED and len(seen) == 2


async def test_who_waits_to_come_again_is_unfinished_when_all_is_stopped() -> None:
    refused, outcome = asyncio.Event(), Outcome(0, 0.0, 9, 3)

    async def handler(request: web.Request) -> web.StreamResponse:
        refused.set()
        return web.json_response({}, status=429, headers={"Retry-After": "600"})

    async with serving(handler, retries=5) as client:
        asking = asyncio.create_task(client.ask(b"{}", outcome))
        await refused.wait()
        while not outcome.refusals:
            await asyncio.sleep(0.01)
        await end(asking)
    assert (outcome.end, outcome.tries) == (End.UNFINISHED, 1)


async def test_who_does_not_answer_or_is_not_there_is_an_error() -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1000)
        return web.Response()

    assert (await asked(hang, timeout=0.05)).error == "timeout"
    outcome = Outcome(0, 0.0, 9, 3)
    async with aiohttp.ClientSession() as session:
        await Client(session, Manners("http://127.0.0.1:1/", {})).ask(b"{}", outcome)
    assert (outcome.end, outcome.error) == (End.ERROR, "connection refused")


async def test_arrivals_do_not_wait_for_answers() -> None:
    """An open loop: a server that answers nobody still gets all requests, in their order; stopping leaves them."""
    load, waiting = Load(requests(60, 0.002), lambda request: bytes(request.hash_ids)), list[int]()

    async def ask(body: bytes, outcome: Outcome) -> None:
        waiting.append(body[0])
        if len(waiting) == 60:
            load.stop()
        await asyncio.sleep(1000)

    await asyncio.wait_for(load.run(ask), 100)
    assert waiting == list(range(60)) and load.interrupted and not load.running
    assert {outcome.end for outcome in load.outcomes} == {End.UNFINISHED}
    assert load.outcomes[-1].due == pytest.approx(0.118), "the first is due at once"


async def test_a_busy_generator_counts_its_lateness() -> None:
    """What it could not send in time is not hidden: it is late, and the answer's time counts from when it was due."""

    def slowly(request: TraceRequest) -> bytes:
        time.sleep(0.03)
        return b""

    load = Load(requests(5, 0.001), slowly)

    async def ask(body: bytes, outcome: Outcome) -> None:
        outcome.end = End.OK

    await load.run(ask)
    assert [outcome.end for outcome in load.outcomes] == 5 * [End.OK]
    assert load.outcomes[-1].late > 0.1 and load.seconds > 0.14 and not load.interrupted


async def test_a_load_that_is_stopped_sends_no_more() -> None:
    load = Load(requests(3, 1000.0), lambda request: b"")

    async def ask(body: bytes, outcome: Outcome) -> None:
        outcome.end = End.OK
        load.stop()

    await asyncio.wait_for(load.run(ask), 100)
    assert len(load.outcomes) == 1


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def conductor() -> Iterator[FakeConductor]:
    with fake_conductor() as server:
        server.events = [*TEXT, *ENDING]
        server.answers["/v1/models"] = (200, {}, {"data": [{"id": "tiny", "max_model_len": 4000}]})
        yield server


def run(conductor: FakeConductor, *argv: str) -> Result:
    return CliRunner().invoke(main, ["load", "--url", conductor.url, *argv])


def test_a_trace_is_replayed_and_reported(conductor: FakeConductor, tmp_path: Path) -> None:
    trace, records, plot = (tmp_path / name for name in ("trace.jsonl", "records.jsonl", "plot.svg"))
    write_trace(
        trace,
        [TraceRequest(i / 100, 600, 3, (0, i + 1)) for i in range(8)] + [TraceRequest(1, 4000, 1, tuple(range(8)))],
    )
    done = run(conductor, "--trace", str(trace), "--json", "--records", str(records), "--plot", str(plot), "--send-slo")
    figures = json.loads(done.stdout)
    assert done.exit_code == 0 and figures["completed"] == figures["requests"] == 8 and figures["left_out"] == 1
    assert figures["hit_by_token"] == pytest.approx(2 / 3) and figures["effective"] == 1.0
    for name in ("ttft", "tbt"):
        assert all(figures[f"{name}_{point}_s"] is not None for point in ("mean", "p50", "p90", "p99"))
    assert [json.loads(line)["end"] for line in records.read_text().splitlines()] == 8 * ["ok"]
    assert b"<svg" in plot.read_bytes()
    path, headers, body = conductor.requests[-1]
    assert path == "/v1/completions" and len(body["prompt"]) == 600 and body["model"] == "tiny"
    assert headers["x-slo-ttft-ms"] == "30000" and headers["x-slo-tbt-ms"] == "200"
    assert next(iter(read_trace(trace))).hash_ids == (0, 1)


def test_people_get_a_table(conductor: FakeConductor) -> None:
    parameters = ("--generate", "random", "--set", "input.mean=50", "--requests", "5", "--rate", "100")
    done = run(conductor, *parameters, "--prompt", "chat", "--api-key", "k", "--slo-tbt-ms", "99000")
    assert done.exit_code == 0, done.output
    assert "random: 5 requests" in done.stdout and "5 after" in done.stdout and "66.7 % by token" in done.stdout
    assert conductor.requests[-1][0] == "/v1/chat/completions"
    assert conductor.requests[-1][1]["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--trace", "a", "--generate", "chat"], "exclude each other"),
        (["--trace", "a", "--set", "turns=2"], "for generators"),
        (["--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl: No such file"),
        (["--set", "turn=2"], "no parameter 'turn'"),
        (["--vocabulary", "9:3"], "no range of token ids"),
        (["--plot", "x.doc"], ".png, .svg, .pdf"),
        (["--url", "http://192.0.2.1"], "--allow-remote"),
        (["--url", "nonsense"], "no address"),
        (["--generate", "random", "--set", "input.mean=100000"], "fits into the context of 4000"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(conductor: FakeConductor, argv: list[str], says: str) -> None:
    done = run(conductor, *argv)
    assert done.exit_code != 0 and says in done.output
    assert not [path for path, _, _ in conductor.requests if path != "/v1/models"]
