"""What is shown of an address holds no password; what others are told can be reached."""

from __future__ import annotations

import pytest

from shared.addresses import reachable, shown


@pytest.mark.parametrize(
    ("urls", "seen"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("redis://:p@ss@there:6379/0", "there:6379/0"),
        ("nats://me:pw@a:1, nats://me:pw@b:2,nats://c:3", "a:1, b:2, nats://c:3"),
    ],
)
def test_passwords_are_not_shown(urls: str, seen: str) -> None:
    assert shown(urls) == seen


@pytest.mark.parametrize(
    ("host", "server", "told"),
    [
        ("0.0.0.0", "redis://:secret@127.0.0.1:6379/0", "127.0.0.1"),
        ("0.0.0.0", "redis://127.0.0.2:1,redis://127.0.0.3:2", "127.0.0.1"),
        ("::", "redis://[::1]:6379", "::1"),
        ("0.0.0.0", "redis://no-such-host.invalid:6379", "0.0.0.0"),
        ("0.0.0.0", "nonsense", "0.0.0.0"),
        ("10.1.2.3", "redis://127.0.0.1:6379", "10.1.2.3"),
        ("node-7.example", "redis://127.0.0.1:6379", "node-7.example"),
    ],
)
def test_a_wildcard_is_told_as_the_address_on_the_way_to_the_server(host: str, server: str, told: str) -> None:
    assert reachable(host, server) == told
