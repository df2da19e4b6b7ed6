"""The control bus: typed messages between named processes, with deadlines.

Addressing is by process id (``Ref.id``); the bus checks no incarnation, the receiver does. Implementations:
``shared/nats_bus.py`` (production) and ``shared/memory_bus.py`` (the in-memory twin, which can lose, repeat,
delay and reorder on purpose).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from shared.messages import AnyMessage

Handler = Callable[[AnyMessage], Awaitable[AnyMessage | None]]
"""Handles one message; what it returns is the answer. An exception that is a MooncakeError is answered as
RefusedReply where the message is about an attempt, else logged."""


class Bus(Protocol):
    """A connection to the bus, owned by one process."""

    @property
    def connected(self) -> bool:
        """False while the connection is lost (reconnecting goes on by itself)."""

    def on_change(self, callback: Callable[[bool], None]) -> None:
        """Call back with True/False whenever the connection comes and goes."""

    async def serve(self, id: str, handler: Handler) -> None:
        """Receive what is addressed to ``id``. Each message is handled in a task of its own, started in order."""

    async def send(self, id: str, message: AnyMessage) -> None:
        """Fire and forget. Raises BusDown at once while disconnected; never buffers without bound."""

    async def request(self, id: str, message: AnyMessage, timeout: float) -> AnyMessage:
        """Ask and wait. Raises NoResponders (nobody serves that id), DeadlineExceeded, BusDown, ProtocolError.
        A RefusedReply comes back as a value, not as an exception."""

    async def close(self) -> None:
        """Drain what was sent, then disconnect."""
