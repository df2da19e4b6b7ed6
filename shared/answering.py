"""Does the process behind a port do anything? Asked without speaking its protocol, and without knowing its secret."""

from __future__ import annotations

import asyncio
from contextlib import suppress

NOTHING = bytes(16)
"""No server's greeting: who looks at it at all closes the connection, or complains."""


async def answers(host: str, port: int, timeout: float) -> bool:
    """True when it reacted within ``timeout`` seconds: by bytes, or by closing the connection. A stopped process does
    not, though its kernel still takes connections for it. Raises nothing."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    try:
        async with asyncio.timeout(timeout):
            writer.write(NOTHING)
            await reader.read(1)
        return True
    except TimeoutError:
        return False
    except OSError:
        return True  # it was reset: somebody closed it
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
