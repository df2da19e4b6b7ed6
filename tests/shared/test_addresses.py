"""What is shown of an address holds no password."""

from __future__ import annotations

import pytest

from shared.addresses import shown


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
