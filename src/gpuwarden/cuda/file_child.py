"""The child that reads files of other file systems: a server that hangs, hangs the child alone.

It is made when the first such file is met, and anew when it did not answer. It has no network and
keeps the rights to reach and read any file that is mapped.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import mmap
import os
import resource
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec
from msgspec import Struct

from gpuwarden.confinement.places import leave_network
from gpuwarden.confinement.rights import (
    default_signals,
    drop_rights,
    end_with,
    keep_descriptors,
    limit,
    unblock_signals,
)
from gpuwarden.cuda.driver_elf import LIBRARIES, DriverElf, examine
from gpuwarden.cuda.mapped_files import MappedFile, Status, open_mapped
from gpuwarden.errors import GpuwardenError, Unavailable

ANSWER_SECONDS = 3.0
"""After which the file that the child is on is given up, and the child ended."""
END_SECONDS = 0.5
ROOM = 16
"""Requests on their way."""
HANGING_LIMIT = 8
MESSAGE_LIMIT_BYTES = 1 << 18
DESCRIPTORS_LIMIT = 32
CAPABILITIES = (2, 19, 21, 40)
"""CAP_DAC_READ_SEARCH to read any file; to follow its link CAP_SYS_PTRACE, and CAP_SYS_ADMIN or
CAP_CHECKPOINT_RESTORE."""
MADV_POPULATE_READ = 22
# Documentation/admin-guide/mm/pagemap.rst: the frame is in the low 55 bits, present in bit 63.
_FRAME, _PRESENT, _ENTRY_BYTES = (1 << 55) - 1, 1 << 63, 8


class Request(Struct, frozen=True, array_like=True):
    """Examine the file behind ``link``, or of the first handle that comes with it.

    Or, with ``compare``, say which of the other handles is of the same file as the first.
    """

    number: int
    link: str = ""
    compare: bool = False
    known: dict[str, dict[str, int]] = {}
    device: tuple[int, int] = (0, 0)
    """Of the file: when one hangs, all requests for that file system are given up."""


class Answer(Struct, frozen=True, array_like=True):
    """What came of it: what the file is, or where among the others the same file is.

    With what is behind a link and a driver library comes a handle.
    """

    number: int
    elf: DriverElf | None = None
    status: Status | None = None
    same: int | None = None
    problem: str = ""
    gone: bool = False
    """Nothing is mapped there any more."""
    hung: bool = False


class FileChild:
    """Handles go out, answers come in; nothing here waits."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self._channel: socket.socket | None = None
        self._pid = 0
        self._ended: list[int] = []
        """Killed, and not gone yet: a process that waits in the kernel may take long."""
        self._waiting: dict[int, tuple[Request, tuple[int, ...]]] = {}
        self._moved_at = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Answer)

    def close(self) -> None:
        self._end()
        until = time.monotonic() + END_SECONDS
        while self._reap() and time.monotonic() < until:
            time.sleep(0.002)

    @property
    def pids(self) -> set[int]:
        """Our own processes."""
        return {self._pid, *self._ended} - {0}

    def fileno(self) -> int | None:
        """Readable when it has answered or ended; None while there is none."""
        return None if self._channel is None else self._channel.fileno()

    @property
    def has_room(self) -> bool:
        """Whether it may be given a request now."""
        return len(self._waiting) < ROOM

    def submit(self, request: Request, handles: Sequence[int]) -> None:
        """Takes the request; the handles stay open, and the caller's, until its answer.

        ``has_room`` is asked first. Errors: Unavailable when no process can be made.
        """
        if self._channel is None:
            self._start()
        if not self._waiting:
            self._moved_at = time.monotonic()
        self._waiting[request.number] = (request, tuple(handles[:DESCRIPTORS_LIMIT]))
        self._send(request.number)

    def take(self) -> list[tuple[Answer, int | None]]:
        """Answers by now with the handles that came; late ones have a problem instead.

        Who takes a handle closes it.
        """
        found: list[tuple[Answer, int | None]] = []
        self._reap()
        while (channel := self._channel) is not None:
            try:
                data, handles, _, _ = socket.recv_fds(channel, MESSAGE_LIMIT_BYTES, 1)
            except BlockingIOError:
                break
            except OSError:
                data, handles = b"", []
            try:
                answer = self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                close_all(handles)
                found += self._give_up("the process that reads it ended", hung=False)
                continue
            self._moved_at = time.monotonic()
            if self._waiting.pop(answer.number, None) is not None:
                found.append((answer, handles[0] if handles else None))
            else:
                close_all(handles)
        if self._waiting and time.monotonic() - self._moved_at > ANSWER_SECONDS:
            why = f"its file system did not answer in {ANSWER_SECONDS:g} s"
            found += self._give_up(why, hung=True)
        return found

    # ---------------------------------------------------------------- the process

    def _give_up(self, why: str, *, hung: bool) -> list[tuple[Answer, int | None]]:
        """Ends the child: what it was on has failed, other requests are sent again."""
        self._end()
        failed: list[tuple[Answer, int | None]] = []
        for number, (request, _) in list(self._waiting.items()):
            device = request.device if hung else None
            if not failed:
                first = device
            elif device is None or device != first:
                continue
            del self._waiting[number]
            failed.append((Answer(number, problem=why, hung=hung), None))
        if self._waiting:
            self._moved_at = time.monotonic()
            try:
                self._start()
            except Unavailable as error:
                failed += [(Answer(one, problem=str(error)), None) for one in self._waiting]
                self._waiting.clear()
            for one in self._waiting:
                self._send(one)
        return failed

    def _send(self, number: int) -> None:
        request, handles = self._waiting[number]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))]
        if self._channel is not None:
            # A child that is gone, or does not read, is ended when its time is over.
            with contextlib.suppress(OSError):
                self._channel.sendmsg([self._encoder.encode(request)], rights)

    def _start(self) -> None:
        parent = os.getpid()
        if len(self._ended) >= HANGING_LIMIT:
            raise Unavailable("the processes that read such files hang, and cannot be ended")
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
        except OSError as error:
            raise Unavailable(f"no process to read it in: {error.strerror}") from error
        if pid == 0:
            _serve(theirs, self._machine, parent)
        theirs.close()
        ours.setblocking(False)
        self._channel, self._pid = ours, pid

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._ended.append(self._pid)
            self._pid = 0

    def _reap(self) -> bool:
        """Whether there are some that are not gone yet."""
        for pid in list(self._ended):
            try:
                gone = os.waitpid(pid, os.WNOHANG)[0]
            except ChildProcessError:
                gone = pid
            if gone:
                self._ended.remove(pid)
        return bool(self._ended)


def _serve(end: socket.socket, machine: str, parent: int) -> NoReturn:
    # Nothing may leave but _exit: no handler, finaliser or buffer of the parent's.
    code = 1
    try:
        default_signals()
        unblock_signals()
        gc.freeze()
        frames = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        kept, frames = keep_descriptors([end.fileno(), frames])
        limit({resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 256})
        leave_network()
        drop_rights(nobody=False, capabilities=CAPABILITIES)
        if end_with(parent):
            _answer_all(socket.socket(fileno=kept), machine, frames)
            code = 0
    except BaseException:  # noqa: BLE001, S110 - the parent is gone, or hears of it by its end
        pass
    finally:
        os._exit(code)


def _answer_all(channel: socket.socket, machine: str, frames: int) -> None:
    decoder = msgspec.msgpack.Decoder(Request)
    encoder = msgspec.msgpack.Encoder()
    while True:
        data, handles, _, _ = socket.recv_fds(channel, MESSAGE_LIMIT_BYTES, DESCRIPTORS_LIMIT)
        if not data:
            return
        request = decoder.decode(data)
        try:
            if request.compare:
                answer = Answer(request.number, same=same_file(handles[0], handles[1:], frames))
            elif request.link:
                file = open_mapped(request.link)
                handles += [] if file is None else [file.handle]
                answer = _answer(request, file, machine)
            else:
                elf = examine_file(handles[0], machine, request.known)
                answer = Answer(request.number, elf)
        except OSError as error:
            answer = Answer(request.number, problem=error.strerror or str(error))
        except Unavailable:
            answer = Answer(request.number, gone=True)
        except GpuwardenError as error:
            answer = Answer(request.number, problem=str(error))
        wanted = request.link and answer.elf is not None and answer.elf.kind in LIBRARIES
        socket.send_fds(channel, [encoder.encode(answer)], handles if wanted else [])
        close_all(handles)


def _answer(request: Request, file: MappedFile | None, machine: str) -> Answer:
    if file is None:
        return Answer(request.number, DriverElf("none"))
    elf = examine_file(file.handle, machine, request.known)
    return Answer(request.number, elf, file.status)


# -------------------------------------------------------------------- reading


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def examine_file(handle: int, machine: str, known: dict[str, dict[str, int]]) -> DriverElf:
    """``examine`` of the file behind a handle. Errors: OSError."""
    descriptor = _opened(handle)
    try:
        size = os.fstat(descriptor).st_size
        return examine(lambda at, wanted: os.pread(descriptor, wanted, at), size, machine, known)
    finally:
        os.close(descriptor)


def same_file(handle: int, others: Sequence[int], frames: int) -> int | None:
    """Where among the others one has the same page of memory as its first, None if none has.

    A layered file system gives each of its mounts another number for a file that they share, and
    an attachment is to the file beneath. ``frames`` is a pagemap of this process that was opened
    with CAP_SYS_ADMIN; without that right no frame is told, and nothing is the same.
    """
    with _Page(handle) as page:
        frame = page.frame(frames)
        for index, other in enumerate(others if frame else ()):
            with contextlib.suppress(OSError), _Page(other) as compared:
                if compared.frame(frames) == frame:
                    return index
    return None


class _Page:
    """The first page of a file, mapped to be looked at by address only. Errors: OSError."""

    def __init__(self, handle: int) -> None:
        descriptor = _opened(handle)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            self._address = libc.mmap(
                None,
                ctypes.c_size_t(mmap.PAGESIZE),
                mmap.PROT_READ,
                mmap.MAP_SHARED,
                descriptor,
                ctypes.c_long(0),
            )
        finally:
            os.close(descriptor)
        if self._address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._libc = libc

    def __enter__(self) -> _Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._libc.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(mmap.PAGESIZE))

    def frame(self, frames: int) -> int:
        """Its frame of memory, 0 if that is not told."""
        # Asked for and not touched: a file that has just been cut short gives an error here.
        if self._libc.madvise(
            ctypes.c_void_p(self._address), ctypes.c_size_t(mmap.PAGESIZE), MADV_POPULATE_READ
        ):
            return 0
        at = self._address // mmap.PAGESIZE * _ENTRY_BYTES
        entry = int.from_bytes(os.pread(frames, _ENTRY_BYTES, at), "little")
        return entry & _FRAME if entry & _PRESENT else 0


def _opened(handle: int) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(f"/proc/self/fd/{handle}", flags)
