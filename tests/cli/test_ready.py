"""When a mesh counts as ready, and the words that a newcomer reads then."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cli.console import Lines, redis_option, typed
from cli.plan import Plan, Wiring
from cli.ready import QUESTION, Ready, url_of
from cli.settings import UpSettings
from shared.embedded import free_port
from tests.cli.fake_conductor import FakeConductor, fake_conductor


def ready_at(url: str, **settings: Any) -> Ready:
    port = urlsplit(url).port or 0
    wiring = Wiring("mark", "secret", "nats://127.0.0.1:1", "redis://127.0.0.1:2/0", "/models/it's", "it's", port)
    return Ready(Plan(UpSettings(**settings), wiring, {}))


@pytest.fixture
def conductor() -> Iterator[FakeConductor]:
    with fake_conductor() as server:
        yield server


def test_ready_is_when_a_request_would_be_served_and_all_instances_are_there(conductor: FakeConductor) -> None:
    conductor.answers["/ready"] = (503, {}, {"ready": False, "error": {"message": "no decode instance"}})
    ready = ready_at(conductor.url)
    assert not ready.look() and "no decode instance" in ready.reason
    conductor.answers["/ready"] = (200, {}, {"ready": True})
    assert ready.look() and not ready.reason
    more = ready_at(conductor.url, decode=2)
    assert not more.look() and more.reason == "not there yet: decode-1"


def test_where_keys_hide_the_cluster_ready_has_to_do(conductor: FakeConductor) -> None:
    conductor.answers["/ready"] = (200, {}, {"ready": True})
    conductor.answers["/cluster"] = (401, {}, {"error": {"message": "no"}})
    assert not ready_at(conductor.url).look()
    assert ready_at(conductor.url, api_keys="/keys").look()


def test_nobody_there_yet_is_a_reason_not_an_error() -> None:
    ready = ready_at(f"http://127.0.0.1:{free_port()}")
    assert not ready.look() and ready.reason == "the conductor does not answer yet"


def test_the_curl_is_one_that_a_shell_and_a_server_understand() -> None:
    words = shlex.split(ready_at("http://127.0.0.1:8000", api_keys="/keys").curl())
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's" and body["messages"][0]["content"] == QUESTION and body["stream"] is True
    assert body["temperature"] == 0 and body["max_tokens"] > 0
    assert any("Authorization" in word for word in words)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8"),
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
        ("::1", "http://[::1]:8"),
        ("box", "http://box:8"),
    ],
)
def test_the_url_works_on_this_machine(host: str, url: str) -> None:
    assert url_of(host, 8) == url


def test_what_is_said_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    ready_at("http://127.0.0.1:8000", prefill=2).say(8.25, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["url"] == "http://127.0.0.1:8000" and said["prefill"] == 2 and said["ready_s"] == 8.25
    ready_at("http://127.0.0.1:8000").say(8.25, as_json=False)
    text = capsys.readouterr().out
    assert "Ready after 8.2 s at http://127.0.0.1:8000" in text and "curl -N http://" in text
    assert "mooncake store ls --redis redis://127.0.0.1:2/0" in text


def test_commands_to_paste_work_where_they_are_pasted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is not on the path is called as it was; a mesh elsewhere, or of another name, is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "mooncake"), "up"])
    assert ready_at("http://127.0.0.1:8000").commands()[:2] == ["bin/mooncake chat", "bin/mooncake status"]
    elsewhere = ready_at("http://127.0.0.1:9", mesh="lab").commands()
    assert elsewhere[0] == "bin/mooncake chat --url http://127.0.0.1:9" and elsewhere[2].endswith("--mesh lab")
    monkeypatch.setattr(sys, "argv", [str(tmp_path.parent / "mooncake"), "up"])
    assert typed() == str(tmp_path.parent / "mooncake")
    (tmp_path / "mooncake").touch(0o755)
    assert typed() == "mooncake"
    assert redis_option("redis://:pw@there/0") == '--redis "$MOONCAKE_REDIS"'


def test_lines_carry_the_name_of_their_process_and_hidden_ones_only_what_happens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Lines(hidden=("nats",))
    lines.line("store-p0", "[bold]not markup[/bold] \x1b[31mred\x1b[0m")
    lines.line("nats", "chatter")
    lines.event("nats", "exited with code 1", bad=True)
    assert capsys.readouterr().err.splitlines() == [
        "store-p0     | [bold]not markup[/bold] red",
        "nats         | exited with code 1",
    ]
