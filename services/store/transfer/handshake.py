"""How two agents convince each other that they know the secret, before anything else is read.

    initiator                                  target
    HELLO(version, role, refs, nonce)   ->
                                        <-     CHALLENGE(nonce)
    PROOF(hmac over both)               ->
                                        <-     WELCOME(hmac over both and the live grants) | REFUSED(error)

Neither proof can be reflected: each names its side. Neither can be replayed: each covers a nonce of the other side.
The secret authenticates membership in the mesh; it does not encrypt. Under TLS both proofs cover the target's
certificate too.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec

from services.store.transfer.sockets import receive_body, receive_header
from services.store.transfer.tls import binding, explain
from services.store.transfer.wire import VERSION, Kind, pack, pack_fault, parse_fault
from shared.errors import (
    MALFORMED,
    DeadlineExceeded,
    MooncakeError,
    PeerGone,
    PeerRefused,
    ProtocolError,
    StaleIncarnation,
)
from shared.messages import Ref

NONCE = 32
T = TypeVar("T")


class Role(IntEnum):
    """What a connection is for."""

    DATA = 0
    CONTROL = 1
    SHARE = 2


class Hello(msgspec.Struct, frozen=True):
    """``stream`` names this connection among all of its initiator's. ``shm`` and ``host_id`` say where the target may
    map the initiator's segments."""

    version: int
    role: Role
    me: Ref
    target: Ref
    nonce: bytes
    stream: int = 0
    host_id: str = ""
    shm: str = ""


class Challenge(msgspec.Struct, frozen=True):
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True):
    """``grants``: the WRITE grants live for the initiator; None where grants mean nothing."""

    grants: list[int] | None = None


class Proven(msgspec.Struct, frozen=True):
    """A Welcome with the target's proof over it."""

    proof: bytes
    welcome: msgspec.Raw


def hello(role: Role, me: Ref, target: Ref, stream: int = 0, host_id: str = "", shm: str = "") -> Hello:
    return Hello(VERSION, role, me, target, secrets.token_bytes(NONCE), stream, host_id, shm)


def prove(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over side and parts, lengths included, so that no two transcripts look alike."""
    mac = hmac.new(secret, side, hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()


def initiate(sock: socket.socket, secret: bytes, greeting: Hello, timeout: float) -> Welcome:
    """The initiator's side. Raises PeerRefused, StaleIncarnation, ProtocolError, DeadlineExceeded, PeerGone."""
    talk = _Talk(sock, timeout)
    first = msgspec.msgpack.encode(greeting)
    talk.say(Kind.HELLO, first)
    second = talk.hear(Kind.CHALLENGE)
    _decode(second, Challenge)
    bound = binding(sock)
    talk.say(Kind.PROOF, prove(secret, b"initiator", first, second, bound))
    proven = _decode(talk.hear(Kind.WELCOME), Proven)
    if not hmac.compare_digest(proven.proof, prove(secret, b"target", first, second, bound, bytes(proven.welcome))):
        raise PeerRefused("the peer does not know the secret")
    return _decode(bytes(proven.welcome), Welcome)


def respond(
    sock: socket.socket,
    secret: bytes,
    me: Ref,
    timeout: float,
    admit: Callable[[Hello], Sequence[int] | None],
) -> Hello:
    """The target's side. ``admit`` is asked, once the initiator has proven itself, for the live grants; it may raise a
    MooncakeError, which the initiator gets. Raises what ended the handshake."""
    talk, bound = _Talk(sock, timeout), binding(sock)
    first = talk.hear(Kind.HELLO)
    second = msgspec.msgpack.encode(Challenge(secrets.token_bytes(NONCE)))
    try:
        greeting = _greeting(first)
        talk.say(Kind.CHALLENGE, second)
        if not hmac.compare_digest(talk.hear(Kind.PROOF), prove(secret, b"initiator", first, second, bound)):
            raise PeerRefused("the secret is not ours")
        if greeting.target != me:
            raise StaleIncarnation(f"this is {me.id} incarnation {me.incarnation:x}, not the one meant")
        grants = admit(greeting)
    except MooncakeError as e:
        talk.say(Kind.REFUSED, pack_fault(e))
        raise
    welcome = msgspec.msgpack.encode(Welcome(None if grants is None else list(grants)))
    proof = prove(secret, b"target", first, second, bound, welcome)
    talk.say(Kind.WELCOME, msgspec.msgpack.encode(Proven(proof, msgspec.Raw(welcome))))
    return greeting


def _greeting(body: bytes) -> Hello:
    greeting = _decode(body, Hello)
    if greeting.version != VERSION:
        raise ProtocolError(f"peer speaks version {greeting.version}, this agent {VERSION}", field="version")
    if len(greeting.nonce) != NONCE:
        raise ProtocolError(f"a nonce has {NONCE} bytes", field="nonce")
    return greeting


class _Talk:
    """Frames on a socket, all within one deadline."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._deadline = time.monotonic() + timeout

    def say(self, kind: Kind, body: bytes) -> None:
        self._within(lambda: self._sock.sendall(pack(kind, 0, body)))

    def hear(self, kind: Kind) -> bytes:
        sock = _Deadlined(self._sock, self._deadline)
        header = self._within(lambda: receive_header(sock))
        if header.kind not in (kind, Kind.REFUSED):  # before its length is believed
            raise ProtocolError(f"{header.kind.name} where {kind.name} belongs")
        body = self._within(lambda: receive_body(sock, header))
        if header.kind is Kind.REFUSED:
            raise parse_fault(body)
        return body

    def _within(self, act: Callable[[], T]) -> T:
        try:
            self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            return act()
        except TimeoutError:
            raise DeadlineExceeded("no handshake within the deadline") from None
        except ssl.SSLError as e:  # a target that does not accept our certificate says so after TLS's handshake
            raise explain(e) from e
        except OSError as e:
            raise PeerGone(f"the connection broke during the handshake: {e}") from e


class _Deadlined:
    """A socket whose reads share one deadline, so that a byte now and then does not keep it open."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer, nbytes)


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as e:
        raise ProtocolError(f"malformed handshake: {e}") from None
