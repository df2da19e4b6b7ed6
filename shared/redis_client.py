"""Connections to Redis that fail quickly: every error becomes Unavailable, scripts load themselves.

``redis+cluster://`` and ``rediss+cluster://`` addresses connect to a Redis Cluster, all others to one server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from shared.errors import ConfigError, Unavailable
from shared.redis_scripts import Script

CONNECT_TIMEOUT = 0.5
CALL_TIMEOUT = 2.0
CLUSTER = "+cluster://"

Argument = str | bytes | int | float
Call = tuple[Sequence[str], Sequence[Argument]]
"""Keys and arguments of a script."""


def _options(socket_timeout: float) -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_timeout": socket_timeout,
        "socket_keepalive": True,
        "decode_responses": False,
    }


@contextlib.contextmanager
def unavailable() -> Iterator[None]:
    """Map what the client raises. One retry inside the client hides a connection that died while idle."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as e:
        raise Unavailable(f"Redis: {type(e).__name__}: {e}", retry_after_ms=1000) from e


class RedisLink:
    """Asynchronous connection pool of one process and loop. Owned by who made it; close() ends it."""

    def __init__(self, url: str, *, timeout: float = CALL_TIMEOUT) -> None:
        retry = AsyncRetry(NoBackoff(), 1)
        self.client: Any
        try:
            if CLUSTER in url:
                url = url.replace(CLUSTER, "://")
                self.client = redis.asyncio.RedisCluster.from_url(url, retry=retry, **_options(timeout))
            else:
                self.client = redis.asyncio.Redis.from_url(url, retry=retry, **_options(timeout))
        except ValueError as e:
            raise ConfigError(f"not an address of Redis: {e}", field="redis") from e

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Result of the script. Raises Unavailable. A call whose answer is lost may have been executed, and the
        client repeats it once: scripts are idempotent or carry a sequence."""
        with unavailable():
            try:
                return await self.client.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                return await self.client.eval(script.source, len(keys), *keys, *args)

    async def run_many(self, script: Script, calls: Sequence[Call]) -> list[Any]:
        """The same for (keys, arguments) of many calls, in order and in one round trip."""
        commands = [("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
        answers = await self.commands(commands, keep=NoScriptError)
        missing = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        for at in missing:
            answers[at] = await self.run(script, *calls[at])
        return answers

    async def commands(
        self, commands: Sequence[Sequence[Argument]], *, keep: type[RedisError] | None = None
    ) -> list[Any]:
        """Answers of plain commands, pipelined. An error of one is raised, unless it is a ``keep``: then its answer."""
        if not commands:
            return []
        with unavailable():
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not (keep is not None and isinstance(answer, keep)):
                    raise answer
        return answers

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self.client.aclose()


class BlockingRedisLink:
    """The same for a thread of its own (see shared/heartbeat.py)."""

    def __init__(self, url: str, *, timeout: float = CALL_TIMEOUT) -> None:
        retry = Retry(NoBackoff(), 1)
        self.client: Any
        try:
            if CLUSTER in url:
                url = url.replace(CLUSTER, "://")
                self.client = redis.RedisCluster.from_url(url, retry=retry, **_options(timeout))
            else:
                self.client = redis.Redis.from_url(url, retry=retry, **_options(timeout))
        except ValueError as e:
            raise ConfigError(f"not an address of Redis: {e}", field="redis") from e

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        with unavailable():
            try:
                return self.client.evalsha(script.sha, len(keys), *keys, *args)
            except NoScriptError:
                return self.client.eval(script.source, len(keys), *keys, *args)

    def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            self.client.close()
