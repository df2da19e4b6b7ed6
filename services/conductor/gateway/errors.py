"""The one table from the error tree to HTTP, and OpenAI's error envelope."""

from __future__ import annotations

import math

import msgspec

from shared import errors as tree
from shared.errors import MooncakeError


class HttpError(MooncakeError):
    """The request was refused by HTTP's own rules, before anything of the mesh was asked."""

    code = "http"

    def __init__(
        self, status: int, code: str, message: str, *, field: str = "", allow: str = "", accept_encoding: str = ""
    ) -> None:
        super().__init__(message, field=field)
        self.status = status
        self.http_code = code
        named = {"Allow": allow, "Accept-Encoding": accept_encoding}
        self.headers = {name: value for name, value in named.items() if value}


class Fault(msgspec.Struct, frozen=True):
    """An error as HTTP shows it. ``code`` is what clients branch on; it is a bounded set, and a metric label.
    ``details`` stand beside it: why a retry may help."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int = 0
    more: dict[str, str] = {}
    details: dict[str, str | int] = {}

    def envelope(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error | self.details})

    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, and the same in milliseconds for clients that know that header."""
        headers = dict(self.more)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_ms:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_ms / 1000)))
            headers["Retry-After-Ms"] = str(self.retry_after_ms)
        return headers


INVALID, SERVER, BUSY = "invalid_request_error", "server_error", "rate_limit_error"
DEFAULT_RETRY_MS = 1000

# The first class that an error is an instance of counts: special before general. The last column renames the code.
TABLE: tuple[tuple[type[MooncakeError], int, str, str], ...] = (
    (tree.ModelNotFound, 404, INVALID, ""),
    (tree.Unauthorized, 401, INVALID, "invalid_api_key"),
    (tree.InvalidInput, 400, INVALID, ""),
    (tree.DoesNotFit, 400, INVALID, ""),
    (tree.Contended, 429, BUSY, ""),
    (tree.Unavailable, 503, SERVER, ""),
    (tree.Refused, 503, SERVER, ""),
    (tree.DeadlineExceeded, 504, SERVER, ""),
    (tree.AttemptFailed, 502, SERVER, ""),
    (tree.StoreError, 502, SERVER, ""),
    (tree.TransferError, 502, SERVER, ""),
)
RETRIED = frozenset({429, 503})


def details(error: MooncakeError, status: int) -> dict[str, str | int]:
    """What is short, or who is missing; and the figures where an objective would be missed."""
    if status not in RETRIED:
        return {}
    reason: dict[str, str | int] = {"reason": error.field or error.code}
    if isinstance(error, tree.Contended) and error.limit_ms:
        reason |= {"predicted_ms": error.predicted_ms, "limit_ms": error.limit_ms}
    return reason


def fault_of(error: BaseException) -> Fault:
    """What the client is told. Of an exception nobody expected it learns only that there was one."""
    if isinstance(error, HttpError):
        kind = INVALID if error.status < 500 else SERVER
        return Fault(error.status, kind, error.http_code, error.message, error.field or None, 0, error.headers)
    for cls, status, kind, code in TABLE:
        if isinstance(error, cls):
            retry = (error.retry_after_ms or DEFAULT_RETRY_MS) if status in RETRIED else 0
            param = error.field or None if kind == INVALID else None
            return Fault(status, kind, code or error.code, error.message, param, retry, details=details(error, status))
    return Fault(500, SERVER, "internal", "The server had an error while processing the request.")
