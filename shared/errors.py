"""Every error that crosses a module or process boundary, as one tree.

An error has a stable ``code``; it travels as :class:`WireError` and is raised again as the same class on
the other side. The gateway alone maps classes to HTTP (``services/conductor/gateway/errors.py``).
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, RecursionError)
"""What msgspec raises for bytes that are no message: the second for what is nested too deeply to be passed over."""


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error in transit: class code, sentence for people, and the field it is about ("" if none)."""

    code: str
    message: str
    field: str = ""
    retry_after_ms: int = 0


class MooncakeError(Exception):
    """Root of the tree. ``field`` names the offending input, where there is one."""

    code: ClassVar[str] = "internal"
    by_code: ClassVar[dict[str, type[MooncakeError]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__ and cls.__module__ == __name__:  # only what is defined here travels
            MooncakeError.by_code[cls.code] = cls

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def to_wire(self) -> WireError:
        return WireError(self.code, self.message, self.field, self.retry_after_ms)

    @staticmethod
    def from_wire(wire: WireError) -> MooncakeError:
        """The same class again; an unknown code (a newer peer) becomes the root class."""
        cls = MooncakeError.by_code.get(wire.code, MooncakeError)
        return cls(wire.message, field=wire.field, retry_after_ms=wire.retry_after_ms)


class InternalError(MooncakeError):
    """A bug, or an exception nobody expected."""

    code = "internal"


class ConfigError(MooncakeError):
    """A setting is wrong; the message names its source (flag, variable, file) and the limit."""

    code = "config"


class ProtocolError(MooncakeError):
    """A peer speaks another protocol version, or sent bytes that are no message."""

    code = "protocol"


# -- what a client did -------------------------------------------------------------------------------


class InvalidInput(MooncakeError):
    """The request is malformed; ``field`` and the message's limit say what to change."""

    code = "invalid_input"


class ContextLengthExceeded(InvalidInput):
    """Prompt, or prompt + max_tokens, is longer than the model's context."""

    code = "context_length_exceeded"


class Unauthorized(MooncakeError):
    """Missing or unknown API key."""

    code = "unauthorized"


class ModelNotFound(MooncakeError):
    """The named model is not served here."""

    code = "model_not_found"


# -- what the mesh cannot do now ----------------------------------------------------------------------


class Contended(MooncakeError):
    """Capacity is short; ``retry_after_ms`` predicts when the request would be accepted (HTTP 429). ``field``: what is
    short. Where an objective would be missed: ``predicted_ms``, and ``limit_ms``, which it exceeds; they do not
    travel."""

    code = "contended"

    def __init__(
        self, message: str, *, field: str = "", retry_after_ms: int = 0, predicted_ms: int = 0, limit_ms: int = 0
    ) -> None:
        super().__init__(message, field=field, retry_after_ms=retry_after_ms)
        self.predicted_ms = predicted_ms
        self.limit_ms = limit_ms


class Unavailable(MooncakeError):
    """No instance, no bus, or a peer that is gone (HTTP 503)."""

    code = "unavailable"


class BusDown(Unavailable):
    """The connection to NATS is lost."""

    code = "bus_down"


class NoResponders(Unavailable):
    """Nobody listens on that subject: the process died (seen at once)."""

    code = "no_responders"


class DeadlineExceeded(MooncakeError):
    """Something that waits reached its deadline."""

    code = "deadline_exceeded"


class AttemptFailed(MooncakeError):
    """An attempt, or the last of the bounded number of attempts, failed for a reason of ours."""

    code = "attempt_failed"


# -- refusals between processes: choose again ----------------------------------------------------------


class Refused(MooncakeError):
    """An instance does not take this attempt; choose another one."""

    code = "refused"


class StaleIncarnation(Refused):
    """The message was meant for another incarnation of this process."""

    code = "stale_incarnation"


class Tombstoned(Refused):
    """The attempt was dropped or cancelled here before; it never comes back."""

    code = "tombstoned"


class NoRoom(Refused):
    """The pool has no room for it now."""

    code = "no_room"


class Draining(Refused):
    """The instance is shutting down and takes no new work."""

    code = "draining"


class NamespaceMismatch(Refused):
    """Two sides disagree on block identity; ``field`` names the first differing namespace field."""

    code = "namespace_mismatch"


class UnknownAttempt(Refused):
    """The attempt is not held here."""

    code = "unknown_attempt"


# -- store ----------------------------------------------------------------------------------------------


class StoreError(MooncakeError):
    """Root of what the store raises."""

    code = "store"


class PoolFull(StoreError):
    """Nothing free and nothing evictable within the deadline."""

    code = "pool_full"


class DoesNotFit(StoreError):
    """More slots than the empty pool has; never waits."""

    code = "does_not_fit"


class PinLimit(StoreError):
    """Pins may not keep more than their share of the pool."""

    code = "pin_limit"


class QuotaExceeded(StoreError):
    """The tenant's cache is full of blocks in use: nothing of its own can make way, and nothing of others' does."""

    code = "quota_exceeded"


class StaleToken(StoreError):
    """A reservation, landing or hold token that is no longer valid."""

    code = "stale_token"


class StaleGeneration(StoreError):
    """The slot was reused since it was leased; the bytes read are somebody else's."""

    code = "stale_generation"


class LeaseExpired(StoreError):
    """The remote lease ended before the read completed; the bytes are discarded."""

    code = "lease_expired"


class ChecksumMismatch(StoreError):
    """A fetched copy does not have the checksum of its commit."""

    code = "checksum_mismatch"


class AgentGone(StoreError):
    """The node's store agent (or its incarnation) is gone; drain, remap, recompute."""

    code = "agent_gone"


class Fenced(StoreError):
    """The landing is fenced: nothing is written to it any more."""

    code = "fenced"


# -- transfer -------------------------------------------------------------------------------------------


class TransferError(MooncakeError):
    """Root of what the transfer engine reports for one request of a batch."""

    code = "transfer"


class OutOfRange(TransferError):
    """Offset and length leave the segment, overflow, or the length is zero."""

    code = "out_of_range"


class NotRegistered(TransferError):
    """No such segment at the peer, or the local buffer is not registered."""

    code = "not_registered"


class Overlap(TransferError):
    """A registration overlaps one that exists."""

    code = "overlap"


class NotPermitted(TransferError):
    """The segment does not allow this operation, or the grant does not cover the range."""

    code = "not_permitted"


class PeerGone(TransferError):
    """The peer closed the connection, died, or missed its deadline."""

    code = "peer_gone"


class PeerRefused(TransferError):
    """Authentication or handshake failed."""

    code = "peer_refused"


class NoTransport(TransferError):
    """The required transport cannot reach this peer (never a silent fallback)."""

    code = "no_transport"
