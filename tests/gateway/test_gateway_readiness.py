"""Readiness as a load balancer sees it, draining, and the picture of the cluster."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec

from services.conductor.gateway.options import GatewayOptions
from services.conductor.generation import Readiness
from services.conductor.service import Stopping, drain
from services.conductor.settings import ConductorSettings
from shared.errors import Unavailable
from tests.gateway.fakes import CHAT, MODEL, NAMESPACE, Api, FakeDispatcher, Script, StartApi, assert_envelope, until


async def ready(api: Api) -> tuple[int, Any]:
    async with api.http.get(api.server.url + "/ready") as response:
        answer = await response.json()
        if response.status != 200:
            assert_envelope({"error": answer["error"]}, response.headers)
            assert response.headers["Retry-After"]
        return response.status, {k: answer[k] for k in ("ready", "reasons", "degraded")}


async def test_e3_ready_says_why_not_and_what_is_lost(api: Api) -> None:
    assert await ready(api) == (200, {"ready": True, "reasons": [], "degraded": []})
    api.dispatcher.state = Readiness(True, [], ["metadata_down"])
    assert await ready(api) == (200, {"ready": True, "reasons": [], "degraded": ["metadata_down"]})
    api.dispatcher.state = Readiness(False, ["no_prefill", "bus_down"])
    assert await ready(api) == (503, {"ready": False, "reasons": ["no_prefill", "bus_down"], "degraded": []})


async def test_health_stands_whatever_else_falls(api: Api) -> None:
    api.dispatcher.state = Readiness(False, ["bus_down"])
    async with api.http.get(api.server.url + "/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_another_tokenizer_than_the_instances_is_not_served(start: StartApi) -> None:
    api = await start(options=GatewayOptions(model=MODEL, tokenizer_print="mine"))
    assert (await ready(api))[1]["reasons"] == ["tokenizer_mismatch"]
    assert (await api.chat())[0] == 503
    api.dispatcher.namespace_ = msgspec.structs.replace(NAMESPACE, tokenizer="mine")
    assert (await ready(api))[0] == 200
    assert (await api.chat())[0] == 200


class Empty(FakeDispatcher):
    """A mesh without instances."""

    @property
    def namespace(self) -> Any:
        raise Unavailable("no instance is registered")

    @property
    def context_length(self) -> int:
        raise Unavailable("no instance is registered")


async def test_a_mesh_without_instances_answers_503_and_lists_its_model(start: StartApi) -> None:
    empty = Empty(Script([]), state=Readiness(False, ["no_prefill", "no_decode"]))
    api = await start(dispatcher=empty, options=GatewayOptions(model=MODEL, tokenizer_print="mine"))
    status, answer, headers = await api.chat()
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert headers["Retry-After"] == "1"
    assert (await ready(api))[1]["reasons"] == ["no_prefill", "no_decode"]
    async with api.http.get(api.server.url + "/v1/models") as response:
        assert "max_model_len" not in (await response.json())["data"][0]


async def test_cluster_is_the_dispatchers_picture_and_the_gateways_own(api: Api) -> None:
    async with api.http.get(api.server.url + "/cluster") as response:
        picture = await response.json()
    assert picture["instances"] == []
    assert picture["gateway"] == {"model": MODEL, "in_flight": 0, "ready": True, "reasons": [], "degraded": []}


async def test_a_drain_serves_its_streams_and_refuses_the_rest(api: Api) -> None:
    api.dispatcher.script = Script(api.ids("word ") * 10, delay=0.02)
    stream = asyncio.create_task(api.chat_events())
    await until(lambda: api.dispatcher.open == 1)
    drain = asyncio.create_task(api.server.drain(30))
    await asyncio.sleep(0)
    assert (await ready(api))[1]["reasons"] == ["draining"]
    status, answer, headers = await api.chat()
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert headers["Retry-After"]
    assert headers["Connection"] == "close"
    assert not drain.done()
    events = await stream
    assert events[-1] == "[DONE]"
    assert await drain is True


async def test_a_drain_without_work_is_over_at_once_and_one_that_lasts_is_cut(api: Api) -> None:
    assert await api.server.drain(30) is True
    api.gateway.draining = False
    api.dispatcher.script = Script(api.ids("word "), endless=True, delay=0.01)
    whole = asyncio.create_task(api.chat(max_tokens=400))
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
        await until(lambda: api.dispatcher.open == 2)
        assert await api.server.drain(0.05) is False
        await api.server.__aexit__()
        events = (await response.text()).split("\n\n")[:-1]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
    assert not any("[DONE]" in event for event in events)
    status, answer, headers = await whole
    assert (status, assert_envelope(answer, headers)["code"]) == (503, "unavailable")
    assert headers["Retry-After"]
    assert api.dispatcher.open == 0


async def test_a_cut_does_not_wait_for_a_reader(api: Api) -> None:
    """What is not read cannot be ended with an event; it is closed all the same."""
    api.dispatcher.script = Script(api.ids("word " * 200), endless=True)
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 400, "n": 100})
    _, writer = await asyncio.open_connection("127.0.0.1", api.server.port, limit=1)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await until(lambda: api.dispatcher.produced > 1000)
    async with asyncio.timeout(100):
        await api.server.__aexit__()
    await until(lambda: api.dispatcher.open == 0)
    writer.close()


async def test_a_second_signal_cuts_the_drain_short(api: Api) -> None:
    settings, stopping = ConductorSettings(drain_timeout_s=600, drain_delay_s=600), Stopping()
    api.dispatcher.script = Script(api.ids("word "), endless=True, delay=0.01)
    async with api.http.post(api.server.url + "/v1/chat/completions", json=CHAT | {"stream": True}):
        stopping.tell()
        assert stopping.drain.is_set() and not stopping.now.is_set()
        draining = asyncio.create_task(drain(api.server, settings, stopping))
        await until(lambda: api.gateway.draining)
        assert not draining.done()
        stopping.tell()
        await asyncio.wait_for(draining, 100)


async def test_a_drain_lasts_until_load_balancers_have_seen_it(api: Api) -> None:
    settings, stopping = ConductorSettings(drain_delay_s=0.2), Stopping()
    began = time.monotonic()
    await asyncio.wait_for(drain(api.server, settings, stopping), 100)
    assert time.monotonic() - began >= 0.2
