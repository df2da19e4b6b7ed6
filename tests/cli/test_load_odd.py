"""``mooncake load`` against servers that answer oddly: each answer is counted and named, and none ends the load."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cli.main import main

HEAD = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nConnection: close\r\n%s\r\n"
TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
TOKEN_OF_CHAT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
DEEP = 30_000 * b"["
RESET = b"(reset)"


def answer(body: bytes, status: bytes = b"200 OK", kind: bytes = b"text/event-stream", more: bytes = b"") -> bytes:
    return HEAD % (status, kind, more) + body


ANSWERS: Mapping[bytes, str] = {
    b"": "connection lost (ServerDisconnectedError)",
    RESET: "connection lost (ClientOSError)",
    answer(TOKEN) + RESET: "connection lost",
    b"220 smtp.example.com ESMTP\r\n\r\n": "an answer that is no HTTP",
    answer(b"", more=b"X-Long: " + 100_000 * b"x" + b"\r\n"): "an answer that is no HTTP",
    answer(b"<html>hello</html>", kind=b"text/html"): "no events, but text/html",
    answer(b'{"choices": [{"text": "a"}]}', kind=b"application/json"): "no events, but application/json",
    answer(b"null", kind=b"application/json"): "no events, but application/json",
    answer(TOKEN[:20]): "no events, but text/event-stream",
    answer(TOKEN + TOKEN[:20]): "the stream ended early",
    answer(TOKEN + USAGE): "the stream ended early",
    answer(TOKEN, more=b"Content-Length: 5000\r\n"): "connection lost (ClientPayloadError)",
    answer(b"zz\r\n" + TOKEN, more=b"Transfer-Encoding: chunked\r\n"): "no HTTP|ClientPayloadError|ended early",
    answer(b"no gzip at all", more=b"Content-Encoding: gzip\r\n"): "no HTTP|ClientPayloadError",
    answer(gzip.compress(TOKEN)[:-9], more=b"Content-Encoding: gzip\r\n"): "ended early|ClientPayloadError",
    answer(TOKEN + b"data: [1, 2]\n\n"): "an event that is none of OpenAI's",
    answer(TOKEN + b'data: {"choices": 7}\n\n'): "an event that is none of OpenAI's",
    answer(TOKEN + b'data: {"choices": [{"text": "\xff"}]}\n\n'): "an event that is none of OpenAI's",
    answer(TOKEN + b'data: {"usage": {"prompt_tokens": "many"}}\n\n'): "an event that is none of OpenAI's",
    answer(TOKEN + b'data: {"x": ' + DEEP + b"\n\n"): "an event that is none of OpenAI's",
    answer(TOKEN + b'data: {"error": ' + b'["broken"]}\n\n'): "error event: ['broken']",
    answer(2_000_000 * b"x"): "a line without end",
    answer(DONE): "an answer without tokens",
    answer(USAGE + DONE): "an answer without tokens",
    answer(b'{"error": {"code": "internal"}}', b"500 Oops"): "500 internal",
    answer(b"<html>\xff</html>", b"500 Oops"): "500 <html>",
    answer(b'{"error": ' + DEEP, b"500 Oops"): '500 {"error": [',
    answer(b"[]", b"502 Bad Gateway"): "502 []",
    answer(b"", b"204 No Content"): "204",
    answer(TOKEN + USAGE + DONE, b"201 Created"): "201 data:",
    answer(b"", b"307 Elsewhere", more=b"Location: http://192.0.2.1/\r\n"): "307",
}
"""What is sent -> how it is named, "|" where the parser may see the fault with the head or after it."""

FINE = answer(TOKEN + USAGE + DONE)
UNCOUNTED = [answer(TOKEN + TOKEN + DONE), answer(TOKEN + TOKEN + b'data: {"choices": [], "usage": null}\n\n' + DONE)]
REFUSED = [answer(b"later", b"429 Wait"), answer(DEEP, b"429 Wait", more=b"Retry-After: tomorrow\r\n")]
MODELS = answer(json.dumps({"data": [{"id": "m", "max_model_len": None}]}).encode(), kind=b"application/json")


class Odd(threading.Thread):
    """Answers GETs with ``models``, and each POST with the next of ``answers``."""

    def __init__(self, answers: list[bytes], models: bytes = MODELS) -> None:
        super().__init__()
        self._answers, self._models = iter(answers), models
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(100)
        said = _request(sock)
        if not said:  # the end
            return
        data = self._models if said.startswith(b"GET") else next(self._answers)
        sock.sendall(data.removesuffix(RESET))
        if data.endswith(RESET):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()


def _request(sock: socket.socket) -> bytes:
    """Head and body: who closes with something unread resets."""
    said = b""
    while b"\r\n\r\n" not in said:
        if not (some := sock.recv(1 << 16)):
            return b""
        said += some
    head, _, body = said.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0]) - len(body) if lengths else 0
    while left > 0 and (some := sock.recv(left)):
        left -= len(some)
    return head


@contextlib.contextmanager
def odd(answers: list[bytes], models: bytes = MODELS) -> Iterator[Odd]:
    server = Odd(answers, models)
    server.start()
    try:
        yield server
    finally:
        server.close()


def run(url: str, *argv: str) -> Result:
    done = CliRunner().invoke(main, ["load", "--url", url, "--generate", "random", "--set", "input.mean=20", *argv])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def loaded(answers: list[bytes], *argv: str) -> dict[str, Any]:
    with odd(answers) as server:
        done = run(server.url, "--requests", str(len(answers)), "--rate", "200", "--timeout", "100", "--json", *argv)
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_each_odd_answer_is_an_error_with_a_name(tmp_path: Any) -> None:
    records = tmp_path / "records.jsonl"
    figures = loaded([*ANSWERS, FINE], "--records", str(records))
    assert (figures["requests"], figures["errors"], figures["completed"]) == (len(ANSWERS) + 1, len(ANSWERS), 1)
    errors = [outcome["error"] for line in records.read_text().splitlines() for outcome in [json.loads(line)]]
    for error in ANSWERS.values():
        found = next((each for each in errors if any(name in each for name in error.split("|"))), None)
        assert found is not None, f"{error!r} is none of {errors}"
        errors.remove(found)
    assert errors == [""], "the fine one"


def test_tokens_without_usage_are_counted_as_they_came() -> None:
    figures = loaded([*UNCOUNTED, FINE])
    assert (figures["completed"], figures["uncounted"], figures["completion_tokens"]) == (3, 2, 2 + 2 + 3)
    with odd([*UNCOUNTED]) as server:
        assert "2 answers came without usage" in run(server.url, "--requests", "2", "--rate", "200").output


def test_refusals_of_any_form_are_refusals() -> None:
    figures = loaded(REFUSED)
    assert (figures["rejected"], figures["errors"]) == (2, 0)


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (b"", "not reachable"),
        (b"220 smtp.example.com ESMTP\r\n\r\n", "not reachable"),
        (RESET, "not reachable"),
        (answer(b"<html>"), "no JSON"),
        (answer(DEEP), "no JSON"),
        (answer(b"{", more=b"Content-Length: 500\r\n"), "ended early"),
        (answer(b"[]"), "lists no models"),
        (answer(b'{"data": {"a": 1}}'), "lists no models"),
        (answer(b'{"data": [7]}'), "lists no models"),
        (answer(b'{"data": null}'), "no model is served"),
        (answer(b'{"data": [{"id": "m", "max_model_len": "4k"}]}'), "max_model_len '4k'"),
        (answer(b'{"data": [{"id": "m", "max_model_len": -1}]}'), "max_model_len -1"),
        (answer(b"oops", b"500 Oops"), "500"),
        (answer(DEEP, b"500 Oops"), "500"),
    ],
)
def test_odd_models_are_told_in_one_sentence(models: bytes, says: str) -> None:
    with odd([], models) as server:
        done = run(server.url, "--requests", "1")
    assert done.exit_code == 1 and says in done.output and "Traceback" not in done.output
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    "stream",
    [
        *[b"data: " + data + b"\n\n" for data in (b"7", b"[]", b'"x"', b'{"choices": 7}', b'{"choices": [7]}', DEEP)],
        *[TOKEN_OF_CHAT + b'data: {"usage": ' + data + b"}\n\n" + DONE for data in (b"7", b'{"prompt_tokens": "x"}')],
        TOKEN[:20],
        TOKEN + RESET,
        b'data: {"error": ["broken"]}\n\n',
    ],
)
def test_odd_answers_to_a_chat_are_told_in_one_sentence(stream: bytes) -> None:
    with odd([answer(stream)]) as server:
        done = CliRunner().invoke(main, ["chat", "--url", server.url, "-m", "hello"])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 1, done.exc_info
