"""A model of the gateway: places, lists, retries and resumes attempts over a bus, and keeps what was delivered."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.blocks import Tokens, chain_keys, pack_tokens
from shared.errors import MooncakeError, Unavailable
from shared.messages import (
    Accepted,
    Admission,
    Admit,
    AnyMessage,
    Cancel,
    Gone,
    LiveList,
    LiveReply,
    Load,
    Output,
    Ref,
    RefusedReply,
    Sampling,
    Since,
    SinceReply,
    Source,
    Submit,
    TokenBatch,
    Usage,
)

if TYPE_CHECKING:
    from tests.instance.conftest import Mesh


class Left(Exception):
    """The attempt is over without an end: try another."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass
class Stream:
    """One attempt as the gateway sees it."""

    request: str
    attempt: int
    prefill: Ref
    decode: Ref
    delivered: list[Output]
    buffered: dict[int, Output] = field(default_factory=dict)
    usage: Usage | None = None
    accepted: set[str] = field(default_factory=set)
    decoding: bool = False
    error: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: Output, usage: Usage | None) -> None:
        if output.index >= len(self.delivered):
            self.buffered.setdefault(output.index, output)
        self.usage = self.usage or usage
        while (following := self.buffered.pop(len(self.delivered), None)) is not None:
            self.delivered.append(following)
        self.changed.set()

    def leave(self, why: str) -> None:
        self.error = self.error or why
        self.changed.set()

    @property
    def ended(self) -> bool:
        return bool(self.delivered) and bool(self.delivered[-1].finish)


@dataclass
class Answer:
    tokens: list[int]
    finish: str
    usage: Usage | None
    attempts: int
    errors: list[str]


class Gateway:
    """Follows the models' rules for a gateway; short, and for tests only."""

    def __init__(self, mesh: Mesh, name: str = "g") -> None:
        self.mesh, self.ref = mesh, Ref(name, 99)
        self.bus = mesh.net.join(name)
        self.streams: dict[tuple[str, int], Stream] = {}
        self.number = 0
        self.acked: list[tuple[str, int]] = []
        self.names = itertools.count(1)
        self.events: list[str] = []
        self.loads: dict[str, Load] = {}
        """Instance -> its load when it last accepted something."""

    async def start(self) -> None:
        await self.bus.serve(self.ref.id, self.handle)
        self.mesh.tasks.append(asyncio.ensure_future(self.list_forever()))

    async def handle(self, message: AnyMessage) -> None:
        if isinstance(message, TokenBatch):
            for entry in message.entries:
                if (stream := self.streams.get((entry.request, entry.attempt))) is not None:
                    stream.decoding |= message.sender == stream.decode
                    stream.take(entry.output, entry.usage)
        elif isinstance(message, Gone) and (stream := self.streams.get((message.request, message.attempt))):
            stream.leave(message.error.code)

    async def list_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.number += 1
            for ref in {r for s in [*self.streams.values(), *self.mesh.known()] for r in (s.prefill, s.decode)}:
                self.mesh.tasks.append(asyncio.ensure_future(self.send_list(ref)))

    async def send_list(self, ref: Ref) -> None:
        attempts = [
            (s.request, s.attempt, ref.id in s.accepted)
            for s in self.streams.values()
            if s.decode == ref or (s.prefill == ref and not s.decoding)
        ]
        message = LiveList(sender=self.ref, target=ref, number=self.number, attempts=attempts, acked=self.acked[-100:])
        with contextlib.suppress(MooncakeError):
            reply = await self.bus.request(ref.id, message, 1.0)
            if isinstance(reply, LiveReply):
                for key in reply.unknown:
                    if (stream := self.streams.get(key)) is not None and reply.sender == ref:
                        stream.leave("unknown")

    def admission(self, tokens: Tokens, prompt: int, sampling: Sampling, sources: Sequence[Source]) -> Admission:
        root = self.mesh.namespace.root()
        return Admission(
            gateway=self.ref,
            tokens=pack_tokens(tokens),
            prompt_tokens=prompt,
            root=root,
            keys=chain_keys(root, tokens, self.mesh.namespace.block_size),
            sampling=sampling,
            lists=self.number,
            sources=list(sources),
        )

    async def run(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        pairs: Sequence[tuple[int, int]] = ((0, 0),),
        fetch: int = 0,
        expected: int = 0,
        sources: Sequence[Source] = (),
        attempts: int = 30,
        name: str = "",
    ) -> Answer:
        """A whole request, migrating as often as it must; ``pairs`` are (prefill, decode) to use in turn;
        ``expected``: blocks that are said to be there."""
        request, delivered, errors = name or f"r{next(self.names)}", list[Output](), list[str]()
        usage: Usage | None = None
        for attempt in range(1, attempts + 1):
            p, d = pairs[(attempt - 1) % len(pairs)]
            prefill, decode = self.mesh.prefills[p].ref, self.mesh.decodes[d].ref
            stream = self.streams[request, attempt] = Stream(request, attempt, prefill, decode, delivered)
            sent = np.array([*tokens, *(o.token for o in delivered)], dtype=np.uint32)
            admission = self.admission(sent, len(tokens), sampling, sources)
            try:
                await self.attempt(stream, admission, fetch, expected)
                return Answer(
                    [o.token for o in delivered], delivered[-1].finish, stream.usage or usage, attempt, errors
                )
            except Left as e:
                errors.append(e.why)
                usage = usage or stream.usage
                await self.cancel(stream)
                await asyncio.sleep(0.05)
            finally:
                self.streams.pop((request, attempt), None)
                self.acked.append((request, attempt))
        raise AssertionError(f"{request} did not end: {errors}")

    def header(self, stream: Stream, target: Ref) -> dict[str, Any]:
        return {"sender": self.ref, "target": target, "request": stream.request, "attempt": stream.attempt}

    async def attempt(self, stream: Stream, admission: Admission, fetch: int, expected: int) -> None:
        admit = Admit(**self.header(stream, stream.decode), admission=admission, prefill=stream.prefill)
        submit = Submit(
            **self.header(stream, stream.prefill),
            admission=admission,
            decode=stream.decode,
            fetch_blocks=fetch,
            prefix_blocks=expected,
        )
        asks = [asyncio.ensure_future(self.ask(stream, m)) for m in (admit, submit)]
        try:
            await self.follow(stream)
        finally:
            for ask in asks:
                ask.cancel()

    async def ask(self, stream: Stream, message: Admit | Submit) -> None:
        while not stream.ended:
            try:
                answer = await self.bus.request(message.target.id, message, 1.0)
            except Unavailable:
                await asyncio.sleep(0.3)
                continue
            except MooncakeError:
                continue
            if isinstance(answer, Accepted):
                stream.accepted.add(message.target.id)
                if answer.load is not None:
                    self.loads[message.target.id] = answer.load
            elif isinstance(answer, RefusedReply):
                stream.leave(answer.error.code)
            return

    async def follow(self, stream: Stream) -> None:
        """Until the end; asks ``since`` on silence, and leaves after ten seconds of it."""
        silent = 0
        while not stream.ended:
            have = len(stream.delivered)
            stream.changed.clear()
            if stream.error:
                raise Left(stream.error)
            try:
                async with asyncio.timeout(2.0):
                    await stream.changed.wait()
            except TimeoutError:
                await self.since(stream, stream.decode, stream.prefill)
            if stream.buffered:
                await self.since(stream, stream.decode)
            silent = 0 if len(stream.delivered) > have else silent + 1
            if silent > 20:
                raise Left("silence")

    async def since(self, stream: Stream, *whom: Ref) -> None:
        for ref in whom:
            with contextlib.suppress(MooncakeError):
                question = Since(**self.header(stream, ref), index=len(stream.delivered))
                answer = await self.bus.request(ref.id, question, 1.0)
                if isinstance(answer, SinceReply):
                    for output in answer.outputs:
                        stream.take(output, answer.usage)
                elif isinstance(answer, RefusedReply) and ref.id in stream.accepted and ref == stream.decode:
                    stream.leave(answer.error.code)

    async def cancel(self, stream: Stream) -> None:
        for ref in (stream.prefill, stream.decode):
            with contextlib.suppress(MooncakeError):
                await self.bus.send(ref.id, Cancel(**self.header(stream, ref)))
