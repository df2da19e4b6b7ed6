"""What every bus does around a handler: turn its exceptions into answers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from shared.bus import Handler
from shared.errors import InternalError, MooncakeError
from shared.messages import AnyMessage, AttemptMessage, RefusedReply

log = logging.getLogger(__name__)


async def answer(handler: Handler, message: AnyMessage) -> AnyMessage | None:
    """The handler's answer; a MooncakeError about an attempt becomes a RefusedReply, anything else is logged too."""
    try:
        return await handler(message)
    except MooncakeError as e:
        if not isinstance(message, AttemptMessage):
            log.warning("handler of %s failed: %s: %s", type(message).__name__, e.code, e)
            return None
        return refused(message, e)
    except Exception as e:
        log.exception("handler of %s failed", type(message).__name__)
        return refused(message, InternalError(type(e).__name__)) if isinstance(message, AttemptMessage) else None


def refused(message: AttemptMessage, error: MooncakeError) -> RefusedReply:
    """The refusal of ``message``, from whom it was meant for to whom it came from."""
    return RefusedReply(
        sender=message.target,
        target=message.sender,
        request=message.request,
        attempt=message.attempt,
        error=error.to_wire(),
    )


def forget(reply: asyncio.Future[Any]) -> None:
    """Nobody awaits ``reply`` any more: an exception set meanwhile counts as seen."""
    if not reply.cancel() and not reply.cancelled():
        reply.exception()
