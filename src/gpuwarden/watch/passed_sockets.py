"""Sockets that systemd opened for us: a daemon without a network of its own can be scraped so.

Source: sd_listen_fds(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

FIRST_DESCRIPTOR = 3
SOCKETS_LIMIT = 64
METRICS = "metrics"
_WORDS = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def passed_sockets(environment: Mapping[str, str] | None = None) -> dict[str, socket.socket]:
    """Listening stream sockets by the name that their unit gives them (``FileDescriptorName``).

    Empty when they were meant for another process. ``environment`` defaults to this process's own,
    from which the words are taken out: a child must not take the sockets for its own.
    """
    given = dict(os.environ) if environment is None else environment
    if environment is None:
        for name in _WORDS:
            os.environ.pop(name, None)
    meant, count, names = (given.get(word, "") for word in _WORDS)
    if meant != str(os.getpid()) or not (count.isdecimal() and len(count) < 4):
        return {}
    found: dict[str, socket.socket] = {}
    called = names.split(":")
    for index in range(min(int(count), SOCKETS_LIMIT)):
        descriptor = FIRST_DESCRIPTOR + index
        try:
            os.set_inheritable(descriptor, False)
            one = socket.socket(fileno=descriptor)
        except OSError:
            continue  # a descriptor that is no socket is not one of ours
        name = called[index] if index < len(called) else ""
        if one.type == socket.SOCK_STREAM and one.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            found[name] = one
        else:
            one.close()
    return found
