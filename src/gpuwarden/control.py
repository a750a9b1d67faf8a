"""What a command asks of the daemon on this node: the words on its root-only socket.

One request and one answer a connection, JSON, each at most ``MESSAGE_LIMIT_BYTES``.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

SOCKET = "/run/gpuwarden/control.sock"
STATE_DIRECTORY = "/var/lib/gpuwarden"
MESSAGE_LIMIT_BYTES = 64 << 10
ANSWER_SECONDS = 10.0


def socket_of(state_directory: str) -> str:
    """Where the daemon with that state directory listens: two daemons have two sockets."""
    if os.path.normpath(state_directory) == STATE_DIRECTORY:
        return SOCKET
    return os.path.join(state_directory, os.path.basename(SOCKET))


class GroupName(msgspec.Struct, frozen=True):
    """A control group as the kernel knows it; ``hierarchy`` 0 is version 2."""

    hierarchy: int
    id: int


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``deny`` and ``allow`` device opens of control groups; ``status`` tells what is denied."""

    action: Literal["deny", "allow", "status"]
    groups: tuple[GroupName, ...] = ()
    name: str = ""
    """Of what is denied, for a person: the container's id or the group's path."""
    reason: str = ""


class Denied(msgspec.Struct, frozen=True):
    """A group that is denied because somebody asked for it."""

    group: GroupName
    name: str
    reason: str
    since_ns: int


class Answer(msgspec.Struct, frozen=True):
    """``done`` False with the reason in ``error``."""

    done: bool
    error: str = ""
    denied: tuple[Denied, ...] = ()
