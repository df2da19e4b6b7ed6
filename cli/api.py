"""The conductor's HTTP API as the command uses it: synchronous, one connection a call, standard library only."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.errors import MooncakeError

DEFAULT_URL = "http://127.0.0.1:8000"
ENDED_EARLY = "the stream ended before the answer did"


class ApiError(MooncakeError):
    """The API is not reachable, or refused the request; the message is for people. ``status`` 0: not reachable."""

    code = "api"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Usage(NamedTuple):
    """Tokens of an answer, ``cached`` of the prompt's among them."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True)
class Delta:
    """One event of a streamed answer. ``usage`` comes with the last."""

    text: str = ""
    finish: str = ""
    usage: Usage | None = None


class Api:
    """``url`` as in ``http://127.0.0.1:8000``, with or without OpenAI's ``/v1``. ``timeout``: seconds without a byte
    before giving up."""

    def __init__(self, url: str = DEFAULT_URL, key: str = "", timeout: float = 300.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """JSON of a GET. Raises ApiError."""
        with self._open(path, None) as response:
            try:
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise ApiError(f"{self.url}{path} ended early: {_plain(error)}", 502) from None
        return _decoded(body)

    def get_any(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET, errors of the server included. Raises ApiError when it is not reachable."""
        try:
            return 200, self.get(path)
        except ApiError as error:
            if not error.status:
                raise
            return error.status, {"error": error.message}

    def models(self) -> dict[str, dict[str, Any]]:
        """Served models by id. Raises ApiError."""
        try:
            return {str(model["id"]): dict(model) for model in self.get("/v1/models")["data"] or ()}
        except (LookupError, TypeError, ValueError):
            raise ApiError(f"{self.url}/v1/models lists no models as OpenAI's API does", 502) from None

    def chat(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Stream a chat completion. Raises ApiError, also for an error event inside the stream."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._open("/v1/chat/completions", body) as response:
            for data in _events(response):
                if data == "[DONE]":
                    return
                yield _delta(_decoded(data.encode()))
        raise ApiError(ENDED_EARLY)

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            if request.type not in ("http", "https"):
                raise ValueError(request.type)
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise ApiError(_reason(error), error.code) from None
        except ValueError:
            raise ApiError(f"{self.url!r} is no address of a conductor; write it as {DEFAULT_URL}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{self.url} is not reachable: {_plain(error)}") from None
        return response


def hinted(error: ApiError) -> str:
    """Its message, and what somebody who typed a command can do about it."""
    if not error.status and "is not reachable" in error.message:
        return f"{error.message} (`mooncake up` starts a mesh; --url or MOONCAKE_URL names one that runs elsewhere)"
    return f"{error.message} (--api-key or MOONCAKE_API_KEY gives one)" if error.status == 401 else error.message


def _plain(error: Exception) -> str:
    """``Connection refused`` rather than ``[Errno 111] Connection refused``."""
    reason = getattr(error, "reason", None) or error
    return " ".join(str(getattr(reason, "strerror", None) or reason).split())


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, as it comes."""
    data: list[str] = []
    for raw in _lines(response):
        line = raw.decode(errors="replace").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"{ENDED_EARLY}: {_plain(error)}") from None


def _delta(event: Any) -> Delta:
    try:
        error = event.get("error")
        choices = event.get("choices") or [{}]
        text = (choices[0].get("delta") or {}).get("content") or ""
        usage = event.get("usage")
        delta = Delta(str(text), str(choices[0].get("finish_reason") or ""), None if usage is None else _counts(usage))
    except (AttributeError, TypeError, LookupError, ValueError):
        raise ApiError("an event that is none of OpenAI's; is this a Mooncake conductor?", 502) from None
    if error:
        raise ApiError(str(error.get("message", error) if isinstance(error, dict) else error), 500)
    return delta


def _counts(usage: Any) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Usage(*(int(count or 0) for count in (usage.get("prompt_tokens"), cached, usage.get("completion_tokens"))))


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError("the answer is no JSON; is this a Mooncake conductor?", 502) from None


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own sentence where it sent OpenAI's envelope."""
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError, OSError, http.client.HTTPException):
        message = error.reason
    retry = error.headers.get("Retry-After")
    return f"{error.code}: {message}" + (f" (retry after {retry} s)" if retry else "")
