"""The roots of all control messages, and who sends and gets them (see shared/messages.py)."""

from __future__ import annotations

import msgspec


class Ref(msgspec.Struct, frozen=True, gc=False):
    """A process: ``id`` is a UUID in hex that lives as long as its registration, ``incarnation`` 64 random bits."""

    id: str
    incarnation: int


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Root of all control messages. ``target.incarnation`` 0 means: whoever has that id (only replies use it)."""

    sender: Ref
    target: Ref


class AttemptMessage(Message, frozen=True, kw_only=True):
    """A message about one attempt. ``request`` is the gateway's unique request id, ``attempt`` counts from 1."""

    request: str
    attempt: int
