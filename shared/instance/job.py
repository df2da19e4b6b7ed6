"""One attempt at work on an instance: a task, what describes it, and what it holds."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from opentelemetry import trace

from shared.blocks import KEY, Tokens, split_keys, unpack_tokens
from shared.engines.base import KVStore, Owner
from shared.engines.sampling import finish_reason
from shared.errors import DeadlineExceeded, InternalError, InvalidInput, MooncakeError, Unavailable
from shared.instance.attempts import Key
from shared.instance.holds import Holds
from shared.messages import Admission, Ref

INDEX_WAIT_S = 0.25
"""How long a last token is held back for the index: some 5 ms as a rule, this long where Redis is gone."""


class Prompt:
    """An admission, unpacked: ``tokens`` (prompt and outputs delivered before), ``keys`` of its full blocks, and
    ``first``: the index of the first output to draw."""

    def __init__(self, admission: Admission, block_size: int) -> None:
        self.tokens: Tokens = unpack_tokens(admission.tokens)
        self.keys = split_keys(admission.keys)
        self.root = admission.root
        self.block_size = block_size
        self.prompt_tokens = admission.prompt_tokens
        self.first = len(self.tokens) - admission.prompt_tokens
        self.sampling = admission.sampling
        self.tenant = admission.tenant
        self._check()

    def _check(self) -> None:
        if not len(self.tokens):
            raise InvalidInput("the prompt is empty", field="tokens")
        if self.first < 0 or self.first >= self.sampling.max_tokens:
            raise InvalidInput(f"nothing is left to draw after {self.first} outputs", field="max_tokens")
        if len(self.keys) != self.full or len(self.root) != KEY:
            raise InvalidInput(f"{len(self.keys)} keys for {self.full} full blocks", field="keys")
        if self.sampling.choices != 1:
            raise InvalidInput("an attempt draws one choice", field="choices")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def full(self) -> int:
        """Blocks that are full, and so have a key."""
        return len(self.tokens) // self.block_size

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // self.block_size)

    def finish(self, token: int, index: int, context: int) -> str:
        """Why the output ends with ``token`` at ``index``; "" when it goes on. ``context``: the model's length."""
        full = self.prompt_tokens + index + 1 >= context
        return finish_reason(self.sampling, token, index) or ("length" if full else "")

    def parent(self, block: int) -> bytes:
        """Key before ``block``'s."""
        return self.keys[block - 1] if block else self.root


class Job(ABC):
    """Work on one attempt. ``born`` is when the *request* arrived (monotonic seconds here): its age orders."""

    def __init__(self, key: Key, gateway: Ref, prompt: Prompt, store: KVStore, role: str, born: float) -> None:
        self.key = key
        self.gateway = gateway
        self.prompt = prompt
        self.store = store
        self.holds = Holds(store, role)
        self.born = born
        self.owner = Owner(f"{key[0]}/{key[1]}", born, prompt.tenant)
        self.task: asyncio.Task[None] | None = None
        self.span = trace.get_current_span()
        """The one that the message came with: of the request, wherever the attempt is spoken of."""

    @abstractmethod
    async def run(self) -> None:
        """To the end in good order. Cancelled when dropped; raises MooncakeError to give the attempt up."""

    @abstractmethod
    def closed(self) -> None:
        """The task has ended, perhaps before it began: let go of what was taken before it was launched. Idempotent."""

    async def settle_index(self, commits: Iterable[asyncio.Task[None]] = ()) -> None:
        """Wait until the block index has what was committed, and first for ``commits`` under way. Not for long: the
        index may be gone."""
        with contextlib.suppress(TimeoutError, Unavailable, DeadlineExceeded):
            async with asyncio.timeout(INDEX_WAIT_S):
                await asyncio.gather(*(asyncio.shield(task) for task in commits))
                await self.store.commit([], b"", [], indexed=True)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def cause(error: BaseException) -> MooncakeError:
    """The one error to tell the gateway of a (perhaps grouped) exception."""
    found = list(leaves(error))
    ours = [e for e in found if isinstance(e, MooncakeError)]
    return ours[0] if ours else InternalError(f"{type(found[0]).__name__}: {found[0]}")
