"""Asks the daemon on its root-only socket: one request, one answer, within a deadline."""

from __future__ import annotations

import os
import socket
import struct
import time

import msgspec

from gpuwarden.control import ANSWER_SECONDS, MESSAGE_LIMIT_BYTES, Answer, Request
from gpuwarden.errors import Denied, Malformed, TimedOut, Unavailable

_PEER = struct.Struct("=iII")  # struct ucred of linux/socket.h


def ask(path: str, request: Request, *, seconds: float = ANSWER_SECONDS) -> Answer | None:
    """The daemon's answer; None when no daemon listens there.

    Errors: Denied (not root, or who listens is not), TimedOut, Malformed, Unavailable.
    """
    until = time.monotonic() + seconds
    try:
        connection = _connected(path, seconds)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise Denied(f"{path}: only root may ask the daemon", remedy="run as root") from error
    except TimeoutError as error:
        raise TimedOut(f"{path}: the daemon does not answer") from error
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    with connection:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != 0:
            raise Denied(f"{path}: who listens there is not root's")
        try:
            connection.sendall(msgspec.json.encode(request))
            connection.shutdown(socket.SHUT_WR)
            body = _received(connection, until)
        except TimeoutError as error:
            raise TimedOut(
                f"{path}: the daemon did not answer within {seconds:g} s; whether it acted is not "
                "known",
                remedy="gpuwarden respond --denied",
            ) from error
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(body, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Malformed(f"{path}: no answer of a gpuwarden daemon") from error


def _connected(path: str, seconds: float) -> socket.socket:
    directory, name = os.path.split(os.path.abspath(path))
    # By the directory's descriptor: a socket's name has 107 bytes at most.
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(f"/proc/self/fd/{descriptor}/{name}")
        except BaseException:
            connection.close()
            raise
    finally:
        os.close(descriptor)
    return connection


def _received(connection: socket.socket, until: float) -> bytes:
    data = b""
    while len(data) <= MESSAGE_LIMIT_BYTES * 16:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(64 << 10)
        if not chunk:
            return data
        data += chunk
    raise OSError(0, "an answer without end")
