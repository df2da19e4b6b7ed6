"""How a process attaches to its node's agent: the greeting, and the pool's descriptor that comes with the answer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass

import msgspec

from services.store.frames import MAX_GREETING, FrameReader, frame
from services.store.local_messages import VERSION, Bye, Challenge, Denied, Hello, Welcome, prove
from services.store.transfer.sockets import unix_address
from shared.blocks import Namespace
from shared.errors import AgentGone, MooncakeError, ProtocolError

RETRY = 0.1


@dataclass
class Attached:
    """A socket that speaks requests from now on, and the descriptors of pool and mailbox. All are the caller's to
    close."""

    sock: socket.socket
    fd: int
    mailbox: int
    welcome: Welcome

    def close(self) -> None:
        """Socket and descriptors. The agent is told: of a process that lives it would keep the connection for ever."""
        with contextlib.suppress(OSError):
            self.sock.send(frame(msgspec.msgpack.encode(Bye(0))))
        self.sock.close()
        os.close(self.fd)
        os.close(self.mailbox)


def attach(address: str, namespace: Namespace, name: str, secret: str, timeout: float) -> Attached:
    """Blocking. Waits for an agent that is not there yet. Raises AgentGone at the timeout, and what the agent refuses
    with: Unauthorized, ConfigError, InvalidInput, ProtocolError."""
    deadline = time.monotonic() + timeout
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            sock.connect(unix_address(address))
            return _greet(sock, namespace, name, secret)
        except (ConnectionRefusedError, FileNotFoundError, ConnectionResetError, EOFError) as e:
            sock.close()
            if time.monotonic() + RETRY >= deadline:
                raise AgentGone(f"no store agent at {address}: {e}", field="agent") from e
            time.sleep(RETRY)
        except TimeoutError as e:
            sock.close()
            raise AgentGone(f"the store agent at {address} does not answer", field="agent") from e
        except BaseException:
            sock.close()
            raise


class Attaching:
    """``attach`` on a thread, for somebody who may ``give_up`` at any moment: what comes then is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attached: Attached | None = None
        self._over = False

    def attach(self, address: str, namespace: Namespace, name: str, secret: str, timeout: float) -> Attached:
        """See :func:`attach`."""
        attached = attach(address, namespace, name, secret, timeout)
        with self._lock:
            self._attached, over = attached, self._over
        if over:
            attached.close()
        return attached

    def give_up(self) -> None:
        with self._lock:
            self._over, attached = True, self._attached
        if attached is not None:
            attached.close()


def _greet(sock: socket.socket, namespace: Namespace, name: str, secret: str) -> Attached:
    reader = FrameReader(MAX_GREETING)
    challenge = _receive(sock, reader, [])
    if not isinstance(challenge, Challenge) or challenge.version != VERSION:
        raise ProtocolError(f"the agent speaks another version than {VERSION}", field="version")
    _send_hello(sock, Hello(VERSION, name, prove(secret, challenge.nonce), namespace))
    fds: list[int] = []
    try:
        welcome = _receive(sock, reader, fds)
        if not isinstance(welcome, Welcome) or len(fds) != 2:
            raise ProtocolError("the agent did not send its pool and a mailbox")
        return Attached(sock, fds[0], fds[1], welcome)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _send_hello(sock: socket.socket, hello: Hello) -> None:
    """With a descriptor of this process, by which an agent in another process namespace sees its end."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        body = frame(msgspec.msgpack.encode(hello))
        if rest := body[socket.send_fds(sock, [body], [pidfd]) :]:  # the agent may have refused, and closed, already
            sock.sendall(rest)
    finally:
        os.close(pidfd)


def _receive(sock: socket.socket, reader: FrameReader, fds: list[int]) -> Challenge | Welcome:
    while True:
        data, more, _, _ = socket.recv_fds(sock, MAX_GREETING, 4, socket.MSG_CMSG_CLOEXEC)
        fds.extend(more)
        if not data:
            raise EOFError("closed during the greeting")
        for body in reader.feed(data):
            message: Challenge | Welcome | Denied = msgspec.msgpack.decode(body, type=Challenge | Welcome | Denied)
            if isinstance(message, Denied):
                raise MooncakeError.from_wire(message.error)
            return message
