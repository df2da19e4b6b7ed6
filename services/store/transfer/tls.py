"""TLS 1.3 under the data port's handshake: both sides show a certificate of one authority, and keep it current.

Names in certificates are not compared with addresses: agents move. Who a peer is, the handshake proves; ``binding``
ties its proofs to this connection, so that no holder of another certificate can sit in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from services.store.transfer.sockets import RECORD
from services.store.transfer.wire import MAGIC, Kind, pack, pack_fault
from shared.errors import ConfigError, DeadlineExceeded, MooncakeError, PeerGone, PeerRefused
from shared.telemetry import log

PARTING = 1.0
"""Seconds in which a peer that was refused has to hang up."""
END = "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class Files:
    """Paths of PEM files: the certificate (its chain behind it), its key, the authorities whose certificates count."""

    cert: str
    key: str
    ca: str


class Context(ssl.SSLContext):
    """``digest``: SHA-256 of the certificate that it shows."""

    digest = b""


class Sides(NamedTuple):
    initiator: Context
    target: Context


class Tls:
    """Both sides of an agent's connections. Files that were replaced are read again before the next connection; while
    they cannot be used, the old ones stay."""

    def __init__(self, files: Files) -> None:
        """Raises ConfigError, which names the setting that is wrong."""
        self._files = files
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._sides = _sides(files)

    @staticmethod
    def configured(cert: str, key: str, ca: str) -> Tls | None:
        """None where no certificate is set. Raises ConfigError."""
        return Tls(Files(cert, key, ca)) if cert else None

    def initiate(self, sock: socket.socket, timeout: float) -> ssl.SSLSocket:
        """The initiator's side, within ``timeout`` seconds. ``sock`` is used up, also where it raises PeerRefused,
        PeerGone or DeadlineExceeded."""
        return _shake(self._current().initiator, sock, timeout, target=False)

    def respond(self, sock: socket.socket, timeout: float) -> ssl.SSLSocket:
        """The target's side, as ``initiate``."""
        deadline = time.monotonic() + timeout
        _expect_tls(sock, timeout)
        return _shake(self._current().target, sock, max(0.001, deadline - time.monotonic()), target=True)

    def _current(self) -> Sides:
        with self._lock:
            if (stamp := _stamp(self._files)) != self._stamp:
                self._stamp = stamp
                try:
                    self._sides = _sides(self._files)
                except ConfigError as e:
                    log("transfer").error("new TLS files cannot be used, the old ones stay", error=e.message)
            return self._sides


def binding(sock: socket.socket) -> bytes:
    """A digest of the target's certificate (RFC 5929, tls-server-end-point), equal at both ends of a connection.
    Empty without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return b""
    if sock.server_side:
        assert isinstance(sock.context, Context)
        return sock.context.digest
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def explain(error: ssl.SSLError) -> MooncakeError:
    """What a peer that breaks TLS off, or never speaks it, is to the transfer engine."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return PeerRefused(f"the peer's certificate is not accepted: {error.verify_message}")
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if reason == "wrong version number":
        return PeerRefused("the peer does not speak TLS: data_tls_* are set here and not there")
    if "alert" in reason:
        return PeerRefused(f"the peer ended the TLS handshake: {reason}")
    return PeerGone(f"TLS failed: {reason}")


def _expect_tls(sock: socket.socket, timeout: float) -> None:
    """Tell an initiator without TLS, in its own words, what is wrong with it."""
    sock.settimeout(timeout)
    try:
        plain = sock.recv(1, socket.MSG_PEEK) == MAGIC[:1]
        if plain:
            why = PeerRefused("this agent speaks TLS: data_tls_* are set here and not there")
            sock.sendall(pack(Kind.REFUSED, 0, pack_fault(why)))
            _part(sock)
            raise why
    except OSError as e:
        raise _failure(e) from e


def _shake(context: Context, sock: socket.socket, timeout: float, target: bool) -> ssl.SSLSocket:
    sock.settimeout(timeout)
    secured: socket.socket = sock
    try:
        secured = wrapped = context.wrap_socket(sock, server_side=target, do_handshake_on_connect=False)
        wrapped.do_handshake()
    except BaseException as e:
        if target:
            _part(secured)
        secured.close()
        raise _failure(e) from e
    return wrapped


def _part(sock: socket.socket) -> None:
    """Let the other side hear why, before the end: closing with bytes unread would cut that off."""
    deadline = time.monotonic() + PARTING
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, RECORD):
                return


def _failure(error: BaseException) -> BaseException:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("no TLS handshake within the deadline")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return explain(error)
    if isinstance(error, OSError):
        return PeerGone(f"the connection broke during the TLS handshake, does the peer speak TLS? {error}")
    return error


# -- reading the files ---------------------------------------------------------------------------------------------


def _stamp(files: Files) -> tuple[tuple[int, int], ...]:
    """Changes with the files. One that is missing for the moment has a stamp too."""
    return tuple(_seen(path) for path in (files.cert, files.key, files.ca))


def _seen(path: str) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def _sides(files: Files) -> Sides:
    digest = _digest(files)
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = Context(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        _load(context, files)
        context.digest = digest
        contexts.append(context)
    contexts[1].num_tickets = 0  # nothing comes after the handshake but what was sent
    return Sides(*contexts)


def _digest(files: Files) -> bytes:
    text = _read(files.cert, "data_tls_cert")
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[: text.index(END) + len(END)].lstrip())).digest()
    except ValueError as e:
        raise ConfigError(f"{files.cert} holds no certificate: {e}", field="data_tls_cert") from e


def _load(context: ssl.SSLContext, files: Files) -> None:
    _read(files.key, "data_tls_key")
    _read(files.ca, "data_tls_ca")
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as e:
        why = f"{files.key} is no key for {files.cert}: {_reason(e)}"
        raise ConfigError(why, field="data_tls_key") from e
    try:
        context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError) as e:
        raise ConfigError(f"{files.ca} holds no certificates: {_reason(e)}", field="data_tls_ca") from e


def _no_password() -> str:
    raise ValueError("keys with a password are not supported")


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return (reason or str(error)).lower().replace("_", " ")


def _read(path: str, setting: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", field=setting) from None
