"""One request of a load: sent to an OpenAI-compatible server, its stream read as cheaply as can be, and timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from cli.load.events import Events, Told, error_text
from cli.load.outcome import End, Outcome
from shared.errors import MALFORMED
from shared.workload.measures import worst_tenth

Clock = Callable[[], float]

LONGEST_WAIT = 600.0
"""Seconds that a ``Retry-After`` may ask for; more is taken as that."""


@dataclass(frozen=True)
class Manners:
    """How the server is treated. ``retries``: 429s of one request whose ``Retry-After`` is obeyed; 0: none is.
    ``timeout``: seconds that one attempt may take."""

    url: str
    headers: dict[str, str]
    retries: int = 0
    timeout: float = 600.0


class Client:
    """Sends to one URL. ``session``: the caller's. ``clock``: seconds since the load began."""

    def __init__(self, session: aiohttp.ClientSession, manners: Manners, clock: Clock = time.perf_counter) -> None:
        self._session, self._manners, self._clock = session, manners, clock

    async def ask(self, body: bytes, outcome: Outcome) -> None:
        """Writes what happens into ``outcome``, which says UNFINISHED as long as this has not returned. Raises nothing
        but CancelledError."""
        begun = outcome.due
        while True:
            outcome.tries, outcome.end = outcome.tries + 1, End.UNFINISHED
            wait = await self._attempt(body, outcome, begun)
            if wait is None or outcome.tries > self._manners.retries:
                break
            outcome.end = End.UNFINISHED  # whoever stops the load stops it, too
            await asyncio.sleep(wait)
            begun = self._clock()
        outcome.ended = self._clock()

    async def _attempt(self, body: bytes, outcome: Outcome, begun: float) -> float | None:
        """Seconds until it may be tried again after a 429, None where that is no question."""
        try:
            async with asyncio.timeout(self._manners.timeout):
                return await self._exchange(body, outcome, begun)
        except TimeoutError:
            _fail(outcome, "timeout")
        except aiohttp.ClientConnectorError:
            _fail(outcome, "connection refused")
        except aiohttp.ClientResponseError:
            _fail(outcome, "an answer that is no HTTP")
        except (aiohttp.ClientError, OSError) as error:
            _fail(outcome, f"connection lost ({type(error).__name__})")
        except ValueError as error:
            _fail(outcome, str(error))
        return None

    async def _exchange(self, body: bytes, outcome: Outcome, begun: float) -> float | None:
        manners = self._manners
        async with self._session.post(
            manners.url, data=body, headers=manners.headers, allow_redirects=False
        ) as response:
            if response.status == 200:
                await self._read(response, outcome, begun)
                return None
            told = await response.content.read(65536)
            if response.status == 429:
                outcome.end = End.REJECTED
                outcome.refusals = (*outcome.refusals, self._clock() - begun)
                return retry_after(response.headers.get("Retry-After-Ms"), response.headers.get("Retry-After"))
            _fail(outcome, f"{response.status} {reason(told)}")
            return None

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome, begun: float) -> None:
        events, gaps, last, tokens = Events(), list[float](), 0.0, 0
        async for piece in response.content.iter_any():
            now, told = self._clock(), events.feed(piece)
            if told.tokens:
                if outcome.ttft is None:
                    outcome.ttft = now - begun
                else:
                    gaps.append(now - last)
                gaps += [0.0] * (told.tokens - 1)
                last, tokens = now, tokens + told.tokens
            if self._ended(told, outcome):
                break
        outcome.completion_tokens = outcome.completion_tokens or tokens  # where the server counts none
        outcome.tbt = worst_tenth(gaps)
        outcome.mean_gap = sum(gaps) / len(gaps) if gaps else None
        if outcome.end is End.UNFINISHED:
            _fail(outcome, "the stream ended early" if events.any else f"no events, but {response.content_type}")

    @staticmethod
    def _ended(told: Told, outcome: Outcome) -> bool:
        if told.usage:
            outcome.prompt_tokens, outcome.cached_tokens, outcome.completion_tokens = told.usage
        if told.error:
            _fail(outcome, f"error event: {told.error[:80]}")
        elif told.done and outcome.ttft is None:
            _fail(outcome, "an answer without tokens")
        elif told.done:
            outcome.end = End.OK
        return told.done or bool(told.error)


def retry_after(milliseconds: str | None, seconds: str | None) -> float:
    """Seconds to wait: ``Retry-After-Ms`` where a server sends that, else ``Retry-After``, else 1."""
    for text, unit in ((milliseconds, 1000.0), (seconds, 1.0)):
        try:
            value = float(text or "") / unit
        except ValueError:  # a date, maybe
            continue
        if value >= 0:
            return min(value, LONGEST_WAIT)
    return 1.0


def reason(body: bytes) -> str:
    """What an error's body says: the code of OpenAI's envelope, else the beginning of whatever it is."""
    try:
        document: Any = msgspec.json.decode(body)
        error = document["error"]
        return str(error.get("code") or error_text(error)[:80]) if isinstance(error, dict) else str(error)[:80]
    except (*MALFORMED, LookupError, TypeError):
        return body[:80].decode(errors="replace").strip()


def _fail(outcome: Outcome, why: str) -> None:
    outcome.end, outcome.error = End.ERROR, why
