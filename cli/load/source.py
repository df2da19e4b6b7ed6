"""What a load sends: a trace or a generator, cut and scaled, and its requests as bodies of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import msgspec

from shared.errors import InvalidInput
from shared.workload.arrivals import at_rate, compressed, cut, shortened, spread
from shared.workload.generators import Chat, HotPrefix, Unshared, chat, hot_prefix, unshared
from shared.workload.tokens import ANY, Vocabulary, prompt_tokens
from shared.workload.trace import BLOCK, TraceRequest, read_trace

Shape = Chat | HotPrefix | Unshared
SHAPES: dict[str, type[Shape]] = {"chat": Chat, "hot-prefix": HotPrefix, "random": Unshared}
USUAL_REQUESTS = 100
"""Of a generator where nobody says when to end."""

_COMMON = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
education
"""

WORDS = tuple(_COMMON.split())
"""Words that are one token, with the space before them, for about every tokenizer."""


@dataclass(frozen=True)
class Source:
    """``trace`` XOR ``generator``. ``rate``: requests per second in the mean, None: the trace's own, or the
    generator's. ``compress``: so many times as fast. ``shorten``: all lengths divided. ``parameters``: of the
    generator, ``{"turns": "4", "first.mean": "300"}``."""

    trace: str = ""
    generator: str = ""
    requests: int | None = None
    duration_s: float | None = None
    rate: float | None = None
    compress: float = 1.0
    shorten: int = 1
    seed: int = 0
    spread: bool = True
    parameters: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.trace or self.generator

    @property
    def block(self) -> int:
        """Tokens that an id of a request stands for."""
        return BLOCK // self.shorten

    def load(self) -> list[TraceRequest]:
        """Requests by arrival. Raises InvalidInput, naming what is wrong."""
        try:
            return list(shortened(self._replayed() if self.trace else self._generated(), self.shorten))
        except ValueError as error:
            raise InvalidInput(str(error)) from None

    def _replayed(self) -> Iterator[TraceRequest]:
        """The first requests of the trace; the duration is of the load, so it counts after scaling."""
        requests = _from_zero(cut(read_trace(self.trace), self.requests))
        if self.spread:
            requests = spread(requests, self.seed)
        if self.rate is not None:
            requests = iter(at_rate(requests, self.rate))
        return cut(compressed(requests, self.compress), duration_s=self.duration_s)

    def _generated(self) -> Iterator[TraceRequest]:
        shape = shaped(SHAPES[self.generator](), self.parameters)
        if self.rate is not None:
            shape = replace(shape, rate=self.rate)
        bounded = self.requests is not None or self.duration_s is not None
        count = self.requests if bounded else USUAL_REQUESTS
        return cut(compressed(made(shape, self.seed), self.compress), count, self.duration_s)


def made(shape: Shape, seed: int) -> Iterator[TraceRequest]:
    match shape:
        case Chat():
            return chat(shape, seed)
        case HotPrefix():
            return hot_prefix(shape, seed)
    return unshared(shape, seed)


def shaped(shape: Shape, parameters: Sequence[tuple[str, str]]) -> Shape:
    """``shape`` with the named parameters changed. Raises InvalidInput for a name or value that is none."""
    for name, text in parameters:
        shape = _changed(shape, name.split("."), text, name)
    return shape


def names(shape: Any) -> list[str]:
    """Parameters of a shape as they are written: ``turns=2.5``, ``first.mean=8000``."""
    return [
        f"{field.name}.{inner}" if is_dataclass(value) else f"{field.name}={value}"
        for field in fields(shape)
        for value in [getattr(shape, field.name)]
        for inner in (names(value) if is_dataclass(value) else [""])
    ]


def _changed(shape: Any, path: list[str], text: str, name: str) -> Any:
    first, *rest = path
    known = {field.name for field in fields(shape)}
    if first not in known or is_dataclass(getattr(shape, first)) != bool(rest):
        raise InvalidInput(f"no parameter {name!r}; there are {', '.join(names(shape))}", field="set")
    old = getattr(shape, first)
    try:
        value = _changed(old, rest, text, name) if rest else type(old)(text)
        return replace(shape, **{first: value})
    except ValueError as error:
        raise InvalidInput(f"{name}={text}: {error}", field="set") from None


@dataclass(frozen=True)
class Bodies:
    """Requests as JSON. ``prompt``: ``ids`` and ``text`` go to /v1/completions, ``chat`` to /v1/chat/completions; of
    text there is about a token for each id. ``salt``: another one makes other prompts."""

    model: str
    prompt: str = "ids"
    vocabulary: Vocabulary = ANY
    block: int = BLOCK
    salt: int = 0
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt == "chat" else "/v1/completions"

    def __call__(self, request: TraceRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, **self._prompt(request)}
        body |= {"max_tokens": max(1, request.output_tokens), "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        return msgspec.json.encode(body | ({"ignore_eos": True} if self.ignore_eos else {}))

    def _prompt(self, request: TraceRequest) -> dict[str, Any]:
        if self.prompt == "ids":
            return {"prompt": prompt_tokens(request, self.vocabulary, self.block, self.salt).tolist()}
        drawn = prompt_tokens(request, Vocabulary(0, len(WORDS)), self.block, self.salt)
        text = " ".join(WORDS[word] for word in drawn.tolist())
        return {"prompt": text} if self.prompt == "text" else {"messages": [{"role": "user", "content": text}]}


def parse_vocabulary(text: str) -> Vocabulary:
    """``1000:30000``. Raises InvalidInput."""
    found = re.fullmatch(r"(\d{1,10}):(\d{1,10})", text)
    if found is None or not int(found[1]) < int(found[2]) <= 1 << 32:
        raise InvalidInput(f"{text!r} is no range of token ids, as 1000:30000 is", field="vocabulary")
    return Vocabulary(int(found[1]), int(found[2]))


def _from_zero(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    """The first one's tick is 0: a piece cut out of a trace is a load of its own."""
    first: float | None = None
    for request in requests:
        first = request.arrival if first is None else first
        yield request._replace(arrival=request.arrival - first)
