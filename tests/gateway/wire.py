"""Bytes as hostile or clumsy clients send them, for a gateway alone and for a whole mesh."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable

Raw = tuple[int, dict[str, str], bytes]

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

# What is sent, and the status that it gets; the connection is closed after each.
BROKEN: dict[str, tuple[bytes, int]] = {
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no HTTP": (b"GARBAGE\r\n\r\n", 400),
    "another version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "an unknown method": (b"FROB /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a path of raw bytes": ("GET /ü HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400),
    "a target that is no URL": (b"GET http://[::1/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a long target": (b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a long query": (b"GET /health?" + b"a" * 5_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "a long header": (HEALTH + b"X-Big: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    "a long header name": (HEALTH + b"X" * 20_000 + b": a\r\n\r\n", 431),
    "many headers": (HEALTH + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n", 431),
    "a NUL": (HEALTH + b"X-Request-Id: a\0b\r\n\r\n", 400),
    "a DEL": (HEALTH + b"X-Request-Id: a\x7fb\r\n\r\n", 400),
    "a bare newline": (HEALTH + b"X-Request-Id: a\nb\r\n\r\n", 400),
    "a folded header": (HEALTH + b"X-Request-Id: a\r\n b\r\n\r\n", 400),
    "a header without a name": (HEALTH + b": empty\r\n\r\n", 400),
    "a negative length": (POST + b"Content-Length: -5\r\n\r\n", 400),
    "a length past all numbers": (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "a length and chunks": (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "a transfer coding besides chunks": (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", 400),
    "a chunk size that is no number": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", 400),
    "a chunk longer than it says": (CHUNKED + b"2\r\n{}xx\r\n0\r\n\r\n", 400),
}

# Values of a header that are nobody's good id, and must never be echoed.
HOSTILE_IDS = [
    *("", "x" * 129, "x" * 10_240, "../../etc/passwd", "a b", "<script>", "ü", "a\tb", "%0d%0aX-Evil:1", "a;b"),
    *("${jndi:ldap://x}", "'; DROP TABLE x; --", "\u0085", "{{7*7}}"),
]


async def raw(port: int, data: bytes, within: float = 100.0) -> Raw:
    """Send bytes as they are; status, headers (lower case) and body of the first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(within):
            return await answer(reader, body=not data.startswith(b"HEAD "))
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader, body: bool = True) -> Raw:
    """The next answer of a connection; of one without a length only the head."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
    length = int(headers.get("content-length", 0)) if body else 0
    return int(lines[0].split()[1]), headers, await reader.readexactly(length)


def assert_raw_envelope(got: Raw, status: int | Iterable[int]) -> dict[str, object]:
    """An error in OpenAI's form, with an id of the request that is safe to log. Returns the error."""
    assert got[0] in ({status} if isinstance(status, int) else set(status)), got
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", got[1]["x-request-id"])
    assert got[1]["content-type"] == "application/json"
    error: dict[str, object] = json.loads(got[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
