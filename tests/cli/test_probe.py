"""Who listens where."""

from __future__ import annotations

import socket

import pytest

from cli.probe import why_not_bindable, why_unreachable
from shared.embedded import NatsServer, RedisServer, free_port


def test_real_servers_are_told_apart() -> None:
    with NatsServer() as nats, RedisServer() as redis:
        assert why_unreachable(nats.url) == "" and why_unreachable(redis.url) == ""
        assert "no redis server" in why_unreachable(f"redis://127.0.0.1:{nats.port}")
        assert why_unreachable(f"nats://127.0.0.1:{free_port()},{nats.url}") == "", "one of several is enough"


@pytest.mark.parametrize("url", ["nats://", "nonsense", "nats://127.0.0.1:99999"])
def test_what_is_no_url_is_said_so(url: str) -> None:
    assert why_unreachable(url)


def test_nobody_there_is_refused_and_silence_has_a_deadline() -> None:
    assert "refused" in why_unreachable(f"nats://127.0.0.1:{free_port()}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "timed out" in why_unreachable(f"nats://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_taken_port_is_seen_before_it_is_needed(host: str, family: socket.AddressFamily) -> None:
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        assert "in use" in why_not_bindable(host, port)
    assert why_not_bindable(host, port) == ""
    assert why_not_bindable("no.such.host.invalid", 1)
