"""A confined child's life: rights and paths left behind, then one task after the other."""

from __future__ import annotations

import array
import gc
import os
import resource
import socket
import time
from typing import NoReturn

import msgspec

from gpuwarden.codescan.board import Board
from gpuwarden.codescan.contents import Examiner
from gpuwarden.codescan.tasks import (
    FRAME_LIMIT_BYTES,
    LENGTH,
    Answer,
    Assess,
    DocumentsTask,
    FileTask,
    LoadTask,
    MemoryTask,
    Ready,
    Settings,
    Task,
)
from gpuwarden.confinement.calls import refuse_calls
from gpuwarden.confinement.mappings import leave_kernel_mappings
from gpuwarden.confinement.places import leave_network, leave_paths, leave_root
from gpuwarden.confinement.rights import (
    default_signals,
    drop_rights,
    end_with,
    keep_descriptors,
    limit,
    unblock_signals,
)

OPEN_FILES_LIMIT = 64
THREADS_LIMIT = 512
"""Of all that run as the same user."""
MEMORY_FLOOR_BYTES = 768 << 20
SEND_BYTES = 1 << 16
SEND_SECONDS = 0.2


def serve(
    channel: socket.socket,
    board: Board,
    settings: Settings,
    assess: Assess | None,
    parent: int,
) -> NoReturn:
    """Runs in the forked child until the parent closes ``channel``; never returns.

    Nothing may leave but ``_exit``: no handler, finaliser or buffer of the parent's.
    """
    code = 1
    try:
        default_signals()
        unblock_signals()
        # A finaliser of the parent's would close a descriptor that is another here.
        gc.freeze()
        [kept] = keep_descriptors([channel.fileno()])
        unconfined = confine(settings)
        if end_with(parent):
            # Told what it is, since asking is refused.
            ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=kept)
            _Child(ours, board, settings, assess).run(unconfined)
            code = 0
    except BaseException:  # noqa: BLE001, S110
        pass
    finally:
        os._exit(code)


def confine(settings: Settings) -> tuple[str, ...]:
    """Leaves behind all that parsing does not need; what could not be left, in words."""
    shared = leave_kernel_mappings()
    is_root = os.geteuid() == 0
    network = leave_network() if is_root else "not root"
    root = leave_root() if is_root else "not root"
    limit(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_NOFILE: OPEN_FILES_LIMIT,
            resource.RLIMIT_NPROC: THREADS_LIMIT,
            resource.RLIMIT_DATA: 2 * settings.bounds.image_bytes + MEMORY_FLOOR_BYTES,
        }
    )
    drop_rights(nobody=True)
    paths = leave_paths()
    calls = refuse_calls()
    unconfined = []
    if os.geteuid() == 0:
        unconfined.append("user: it is root, without capabilities: its user could not be changed")
    if shared:
        unconfined.append(f"memory: what its parent shares with the kernel is here too ({shared})")
    # Either of two is enough: a call that is refused, or nothing that it could reach.
    if calls:
        unconfined.append(f"system calls: all are allowed ({calls})")
        if network:
            unconfined.append(f"network: it can be reached ({network})")
        if paths and root:
            unconfined.append(f"files: those of its user can be read ({paths}; {root})")
    return tuple(unconfined)


class _Child:
    def __init__(
        self,
        channel: socket.socket,
        board: Board,
        settings: Settings,
        assess: Assess | None,
    ) -> None:
        self._channel = channel
        self._board = board
        self._settings = settings
        self._assess = assess
        self._encoder = msgspec.msgpack.Encoder()
        self._tasks = msgspec.msgpack.Decoder(Task)  # type: msgspec.msgpack.Decoder[Task]
        self._unsent = bytearray()
        self._sent_at = 0.0

    def run(self, unconfined: tuple[str, ...]) -> None:
        self._send(Ready(unconfined=unconfined))
        self._flush()
        while (received := self._receive()) is not None:
            task, descriptor = received
            try:
                self._board.start(task.place)
                examiner = Examiner(self._settings, self._assess, self._send, self._board)
                if isinstance(task, FileTask):
                    examiner.file(task, descriptor)
                elif isinstance(task, DocumentsTask):
                    examiner.documents(task)
                elif isinstance(task, MemoryTask):
                    examiner.memory(task, descriptor)
                elif isinstance(task, LoadTask):
                    examiner.load(task, descriptor)
                else:
                    examiner.digest(task, descriptor)
            finally:
                os.close(descriptor)
            self._flush()

    def _receive(self) -> tuple[Task, int] | None:
        """The next task and its descriptor; None when the parent has closed its end."""
        room = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
        head, ancillary, _, _ = self._channel.recvmsg(LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
        if not head:
            return None
        [(_, _, raw)] = ancillary
        descriptor = array.array("i", raw)[0]
        head += self._exactly(LENGTH.size - len(head))
        return self._tasks.decode(self._exactly(LENGTH.unpack(head)[0])), descriptor

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = self._channel.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def _send(self, answer: Answer) -> None:
        frame = self._encoder.encode(answer)
        if len(frame) > FRAME_LIMIT_BYTES:
            raise OverflowError("an answer larger than a frame may be")
        self._unsent += LENGTH.pack(len(frame))
        self._unsent += frame
        now = time.monotonic()
        if len(self._unsent) >= SEND_BYTES or now - self._sent_at > SEND_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._channel.sendall(self._unsent)
        self._unsent.clear()
        self._sent_at = time.monotonic()
