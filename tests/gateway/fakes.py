"""The gateway over a dispatcher that does what a test tells it, behind a real socket."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from services.conductor.gateway.gateway import Gateway
from services.conductor.gateway.http import Deadlines
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.server import GatewayServer, Listen
from services.conductor.gateway.tenants import Tenants
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.traces import Traces
from services.conductor.generation import Generation, Readiness, Token
from shared.blocks import Namespace
from shared.errors import MooncakeError
from shared.messages import Logprob, Output, Usage

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog.", "What is the capital of France? Paris.", "stop word STOP"]
NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_size=16
)
MODEL = "tiny"


def write_tokenizer(folder: Path) -> Path:
    """A byte-level BPE tokenizer with a chat template, as a model folder has it."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[EOS], "bos_token": SPECIAL[1], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


@dataclass
class Script:
    """What a fake generation does: ``ids`` one by one, ``delay`` seconds before each, then ``error`` or a finish.

    The last id carries ``finish``; ids stop early at ``max_tokens`` and at a stop id, as an engine's do. ``endless``
    repeats the ids until something else ends it; nothing comes before ``gate`` is open.
    """

    ids: list[int]
    delay: float = 0.0
    finish: str = "length"
    error: Exception | None = None
    cached: int = 0
    endless: bool = False
    gate: asyncio.Event | None = None


@dataclass
class FakeDispatcher:
    """Answers from ``script``; what it was asked and what is still open lies in plain sight."""

    script: Script
    namespace_: Namespace = NAMESPACE
    context: int = 512
    state: Readiness = field(default_factory=lambda: Readiness(True))
    refuse: MooncakeError | None = None
    asked: list[Generation] = field(default_factory=list)
    considered: list[int] = field(default_factory=list)
    open: int = 0
    closed: int = 0
    produced: int = 0
    completed: int = 0
    scripts: Callable[[Generation], Script] | None = None

    @property
    def namespace(self) -> Namespace:
        return self.namespace_

    @property
    def context_length(self) -> int:
        return self.context

    def readiness(self) -> Readiness:
        return self.state

    def consider(
        self, prompt_bytes: int, slo_ttft_ms: int = 0, ticket: int = 0, prompt_tokens: int = 0, priority: int = 0
    ) -> None:
        self.considered.append(ticket)
        if self.refuse is not None:
            raise self.refuse

    def cluster(self) -> dict[str, Any]:
        return {"instances": []}

    async def generate(self, generation: Generation) -> AsyncIterator[Token]:
        self.asked.append(generation)
        script = self.scripts(generation) if self.scripts else self.script
        self.open += 1
        try:
            async for token in self._play(generation, script):
                self.produced += 1
                yield token
            if script.error is not None:
                raise script.error
            self.completed += 1
        finally:
            self.open -= 1
            self.closed += 1

    async def _play(self, generation: Generation, script: Script) -> AsyncIterator[Token]:
        index = 0
        if script.gate is not None:
            await script.gate.wait()
        while True:
            for at, id in enumerate(script.ids):
                await asyncio.sleep(script.delay)
                last = at + 1 == len(script.ids) and script.error is None and not script.endless
                finish = self._finish(generation, id, index) or (script.finish if last else "")
                usage = Usage(cached_tokens=script.cached) if index == 0 else None
                yield Token(_output(generation, index, id, finish), usage)
                if finish:
                    return
                index += 1
            if not script.endless:
                return

    @staticmethod
    def _finish(generation: Generation, id: int, index: int) -> str:
        if id in generation.sampling.stop_ids and index >= generation.sampling.min_tokens:
            return "stop"
        return "length" if index + 1 >= generation.sampling.max_tokens else ""


def _output(generation: Generation, index: int, id: int, finish: str) -> Output:
    """With log-probabilities where they are asked for: token ``id`` has -id / 100, those behind it less."""
    if (count := generation.sampling.logprobs) < 0:
        return Output(index, id, finish)
    top = [Logprob(one, -one / 100) for one in range(id, id + count)]
    return Output(index, id, finish, 0, -id / 100, top)


@dataclass
class Api:
    """A running gateway and a client to it."""

    dispatcher: FakeDispatcher
    gateway: Gateway
    server: GatewayServer
    http: aiohttp.ClientSession
    tokenizer: Tokenizer

    def says(self, text: str, **more: Any) -> None:
        """Let the model answer ``text``, then EOS."""
        self.dispatcher.script = Script([*self.ids(text), EOS], **({"finish": "stop"} | more))

    def ids(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer.text(text)]

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any, Any]:
        """Status, decoded body, headers."""
        async with self.http.post(self.server.url + path, json=body, **more) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, **more: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/chat/completions", CHAT | more)

    async def complete(self, **more: Any) -> tuple[int, Any, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "hello"} | more)

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of all events of a stream."""
        async with self.http.post(self.server.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        assert text.endswith("\n\n")
        lines = text.split("\n\n")[:-1]
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    async def chat_events(self, **more: Any) -> list[str]:
        return await self.events("/v1/chat/completions", CHAT | more)


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
DEADLINES = Deadlines(head=30, body=30, stall=30, idle=30)

StartApi = Callable[..., Awaitable[Api]]


@asynccontextmanager
async def running(
    tokenizer: Tokenizer,
    dispatcher: FakeDispatcher | None = None,
    tenants: Tenants | None = None,
    options: GatewayOptions | None = None,
    deadlines: Deadlines = DEADLINES,
    offload: Offload | None = None,
    traces: Traces | None = None,
) -> AsyncIterator[Api]:
    offload = offload or Offload(2, 4096, 2**26)
    fake = dispatcher or FakeDispatcher(Script([EOS], finish="stop"))
    tenants = tenants or Tenants(None, time.monotonic)
    gateway = Gateway(fake, tokenizer, tenants, offload, options or GatewayOptions(model=MODEL), traces)
    async with (
        GatewayServer(gateway, Listen("127.0.0.1", 0, deadlines)) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        yield Api(fake, gateway, server, http, tokenizer)
    offload.close()


async def until(condition: Callable[[], bool], timeout: float = 100.0) -> None:
    """Wait for ``condition``; the deadline only ends a test that has failed."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)


def assert_envelope(answer: Any, headers: Any) -> dict[str, Any]:
    """OpenAI's error envelope, whole, and a request id beside it. Returns the error."""
    more = {"reason"} if answer["error"]["type"] in ("rate_limit_error", "server_error") else set()
    more |= {"predicted_ms", "limit_ms"} if answer["error"]["type"] == "rate_limit_error" else set()
    assert set(answer["error"]) - more == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert headers["X-Request-Id"]
    assert headers["Content-Type"] == "application/json"
    error: dict[str, Any] = answer["error"]
    return error
