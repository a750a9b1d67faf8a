"""Turns the records of the probes into events; any bytes give an event or Malformed."""

from __future__ import annotations

from gpuwarden.errors import Malformed
from gpuwarden.probes import layouts
from gpuwarden.probes.events import (
    HOWS,
    LOGINUID_UNSET,
    Denial,
    Event,
    ExecEvent,
    ExitEvent,
    GroupEvent,
    HeldDescriptor,
    OpenEvent,
    OpenReturn,
    ProcessIdentity,
    Source,
    State,
)

NO_LOGIN = 0xFFFFFFFF
READ, WRITE = 2, 4
"""BPF_DEVCG_ACC_READ and _WRITE of linux/bpf.h."""
KIND_OPEN, KIND_RETURN, KIND_EXEC, KIND_EXIT, KIND_GROUP = 1, 2, 3, 4, 5
_IO_URING = 4
_DENIALS: tuple[Denial, ...] = ("", "denied", "would deny")
_OVERLAY_ROOT, _EXE_CUT, _CGROUP_CUT = 1, 2, 4

_OPEN_HEAD = layouts.packed("open_record", until="process")
_OPEN_PROCESS = layouts.offset("open_record", "process")
_OPEN_PATH = layouts.offset("open_record", "path")
_IDENTITY_HEAD = layouts.packed("identity", until="argv")
_ARGV = layouts.offset("identity", "argv")
_EXE = layouts.offset("identity", "exe")
_CGROUP = layouts.offset("identity", "cgroup")
_LENGTH_BYTES = 4
_RETURN_HEAD = layouts.packed("return_record", until="path")
_RETURN_PATH = layouts.offset("return_record", "path")
_EXEC_HEAD = layouts.packed("exec_record", until="process")
_EXEC_PROCESS = layouts.offset("exec_record", "process")
_EXEC_TOOL = layouts.offset("exec_record", "tool_name")
_EXIT = layouts.packed("exit_record")
_GROUP = layouts.packed("group_record")
_HOLDER = layouts.packed("holder_record")
_SIZES = {
    KIND_OPEN: layouts.size("open_record"),
    KIND_RETURN: layouts.size("return_record"),
    KIND_EXEC: layouts.size("exec_record"),
    KIND_EXIT: layouts.size("exit_record"),
    KIND_GROUP: layouts.size("group_record"),
}
_KIND_AT = {
    KIND_OPEN: layouts.offset("open_record", "kind"),
    KIND_RETURN: layouts.offset("return_record", "kind"),
    KIND_EXEC: layouts.offset("exec_record", "kind"),
    KIND_EXIT: layouts.offset("exit_record", "kind"),
    KIND_GROUP: layouts.offset("group_record", "kind"),
}
_KINDS_BY_SIZE = {length: kind for kind, length in _SIZES.items()}
_CACHE_LIMIT = 4096


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _path(data: bytes, *, cut: bool) -> str:
    """A path whose parts are there innermost first, each ended by NUL."""
    parts = data.split(b"\0")[:-1][::-1]
    path = b"/".join(parts).decode("utf-8", "backslashreplace")
    return path if cut else "/" + path


def _device(number: int) -> str:
    """A device number of the kernel's own kind (20 bits of minor) as ``major:minor``."""
    return f"{number >> 20}:{number & 0xFFFFF}"


class Decoder:
    """Turns records into events; ``boot_offset_ns`` is wall clock minus boot clock.

    A process that comes again byte for byte is not decoded again.
    """

    def __init__(self, boot_offset_ns: int = 0, source: Source = "cgroup/dev") -> None:
        self.boot_offset_ns = boot_offset_ns
        self._source: Source = source
        self._identities: dict[bytes, ProcessIdentity] = {}

    def decode(self, record: bytes) -> Event:
        """The event in one record of the ring buffer. Errors: Malformed, whatever the bytes."""
        kind = _KINDS_BY_SIZE.get(len(record))
        if kind is None:
            raise Malformed(f"an event of {len(record)} bytes, which none has")
        at = _KIND_AT[kind]
        if int.from_bytes(record[at : at + 4], "little") != kind:
            raise Malformed(f"an event of {len(record)} bytes that says it is of another kind")
        if kind == KIND_OPEN:
            return self._open(record)
        if kind == KIND_RETURN:
            return self._return(record)
        if kind == KIND_EXEC:
            return self._exec(record)
        if kind == KIND_EXIT:
            return self._exit(record)
        return self._group(record)

    def _exec(self, record: bytes) -> ExecEvent:
        time_ns, _, touched, tool, _ = _EXEC_HEAD.unpack_from(record)
        process, _ = self.identity(record, _EXEC_PROCESS)
        name = _text(record[_EXEC_TOOL:]) if tool else ""
        return ExecEvent(
            at_ns=time_ns + self.boot_offset_ns,
            touched=bool(touched),
            process=process,
            tool=name or None,
        )

    def _exit(self, record: bytes) -> ExitEvent:
        time_ns, start_ns, _, tgid, exit_code, _, comm = _EXIT.unpack(record)
        return ExitEvent(
            at_ns=time_ns + self.boot_offset_ns,
            pid=tgid,
            start_time_ns=start_ns,
            exit_code=exit_code,
            comm=_text(comm),
        )

    def _group(self, record: bytes) -> GroupEvent:
        time_ns, cgroup_id, _, hierarchy, length, _, path = _GROUP.unpack(record)
        if length > layouts.GROUP_PATH_BYTES:
            raise Malformed(f"a control group whose path has {length} bytes")
        return GroupEvent(
            at_ns=time_ns + self.boot_offset_ns,
            cgroup_id=cgroup_id,
            hierarchy=hierarchy,
            path=_text(path[: max(length, 0)]),
            path_cut=length in (layouts.GROUP_PATH_BYTES, 0) or length < 0,
        )

    def _open(self, record: bytes) -> OpenEvent:
        values = _OPEN_HEAD.unpack_from(record)
        time_ns, hits, _, major, minor, access, how, denial, call, path_length = values[:10]
        opened, _, flags = values[10:]
        if how >= len(HOWS) or denial >= len(_DENIALS):
            raise Malformed(f"an open of a kind ({how}) or a denial ({denial}) that is unknown")
        if path_length > layouts.PATH_BYTES:
            raise Malformed(f"an open whose path has {path_length} bytes")
        process, thread_id = self.identity(record, _OPEN_PROCESS)
        path: str | None = None
        unread: dict[str, str] = {}
        if path_length > 0:
            path = _text(record[_OPEN_PATH : _OPEN_PATH + path_length])
        elif path_length < 0:
            unread["path"] = "the process's memory was not there to read"
        denied = _DENIALS[denial]
        state: State = "opened" if opened else "attempted"
        return OpenEvent(
            at_ns=time_ns + self.boot_offset_ns,
            since_boot_ns=time_ns,
            source=self._source,
            major=major,
            minor=minor,
            how=HOWS[how],
            state="denied" if denied == "denied" else state,
            process=process,
            thread_id=thread_id,
            io_uring=how == _IO_URING,
            reads=bool(access & READ),
            writes=bool(access & WRITE),
            open_flags=flags if how == 1 else None,
            system_call=None if how == _IO_URING else call,
            path=path,
            denial=denied,
            hits=hits or None,
            unread=unread,
        )

    def _return(self, record: bytes) -> OpenReturn:
        (time_ns, attempt_ns, start_ns, _, pid, tgid, major, minor, result, flags) = (
            _RETURN_HEAD.unpack_from(record)
        )
        raw = _buffer(record, _RETURN_PATH, layouts.EXE_BYTES)
        return OpenReturn(
            at_ns=time_ns + self.boot_offset_ns,
            attempt_since_boot_ns=attempt_ns,
            pid=tgid,
            thread_id=pid,
            start_time_ns=start_ns,
            major=major,
            minor=minor,
            result=result,
            open_flags=flags,
            path=_path(raw, cut=False) if raw else None,
        )

    def identity(self, record: bytes, at: int) -> tuple[ProcessIdentity, int]:
        """The process whose ``struct identity`` is at ``at``, and its thread. Errors: Malformed.

        All of it must be there.
        """
        head = record[at : at + _ARGV]
        values = _IDENTITY_HEAD.unpack(head)
        argv_read = values[19]
        if argv_read > layouts.ARGV_BYTES:
            raise Malformed(f"an event with {argv_read} bytes of argv")
        argv = record[at + _ARGV : at + _ARGV + argv_read]
        exe = _buffer(record, at + _EXE, layouts.EXE_BYTES)
        cgroup = _buffer(record, at + _CGROUP, layouts.CGROUP_BYTES)
        key = b"".join((head, argv, exe, cgroup))
        process = self._identities.get(key)
        if process is None:
            process = _new_identity(values, argv, exe, cgroup)
            if len(self._identities) >= _CACHE_LIMIT:
                self._identities.clear()
            self._identities[key] = process
        return process, values[4]


def _buffer(record: bytes, at: int, most: int) -> bytes:
    length = int.from_bytes(record[at : at + _LENGTH_BYTES], "little")
    if length > most:
        raise Malformed(f"an event with {length} bytes where {most} fit")
    return record[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length]


def _new_identity(
    values: tuple[int | bytes, ...], argv: bytes, exe: bytes, cgroup: bytes
) -> ProcessIdentity:
    numbers: list[int] = [value for value in values[:20] if isinstance(value, int)]
    comm, parent_comm, tty = (_text(value) for value in values[20:] if isinstance(value, bytes))
    (start_ns, exe_inode, cgroup_id, v1_id, _, tgid, ppid, uid, gid, loginuid) = numbers[:10]
    (mount, pids, users, inner, exe_device, v1_hierarchy, hierarchy, traits) = numbers[10:18]
    argv_bytes, argv_read = numbers[18:]
    unread: dict[str, str] = {}
    words: tuple[str, ...] | None = ()
    if argv_bytes and not argv_read:
        words = None
        unread["argv"] = "the process's memory was not there to read"
    elif argv:
        whole = argv.removesuffix(b"\0")
        words = tuple(word.decode("utf-8", "backslashreplace") for word in whole.split(b"\0"))
    if not exe_inode:
        unread["exe"] = "a thread of the kernel, or a process without a binary"
    exe_cut, cgroup_cut = bool(traits & _EXE_CUT), bool(traits & _CGROUP_CUT)
    return ProcessIdentity(
        pid=tgid,
        start_time_ns=start_ns,
        ppid=ppid,
        uid=uid,
        gid=gid,
        loginuid=LOGINUID_UNSET if loginuid == NO_LOGIN else loginuid,
        comm=comm,
        parent_comm=parent_comm,
        tty=tty or None,
        argv=words,
        argv_truncated=argv_bytes > argv_read > 0,
        exe_path=_path(exe, cut=exe_cut) if exe_inode else None,
        exe_path_cut=exe_cut,
        exe_device=_device(exe_device) if exe_inode else None,
        exe_inode=exe_inode or None,
        cgroup_id=cgroup_id or None,
        cgroup_v1_id=v1_id or None,
        cgroup_v1_hierarchy=v1_hierarchy or None,
        cgroup_path=_path(cgroup, cut=cgroup_cut),
        cgroup_path_hierarchy=hierarchy,
        cgroup_path_cut=cgroup_cut,
        mount_namespace=mount or None,
        pid_namespace=pids or None,
        user_namespace=users or None,
        pid_in_namespace=inner or None,
        overlay_root=bool(traits & _OVERLAY_ROOT),
        unread=unread,
    )


def parse_holders(data: bytes, *, once: bool = False) -> list[HeldDescriptor]:
    """The descriptors in what the iterator over open files wrote. Errors: Malformed.

    ``once``: the first one of each process and device number only; a client has dozens.
    """
    if len(data) % _HOLDER.size:
        raise Malformed(f"{len(data)} bytes of held descriptors, not a multiple of {_HOLDER.size}")
    found = []
    seen: set[tuple[int, int, int, int]] = set()
    for (
        start_ns,
        inode,
        tgid,
        pid,
        descriptor,
        major,
        minor,
        flags,
        uid,
        _,
        comm,
    ) in _HOLDER.iter_unpack(data):
        if once:
            key = (start_ns, tgid, major, minor)
            if key in seen:
                continue
            seen.add(key)
        found.append(
            HeldDescriptor(
                pid=tgid,
                start_time_ns=start_ns,
                thread_id=pid,
                descriptor=descriptor,
                major=major,
                minor=minor,
                inode=inode,
                open_flags=flags,
                uid=uid,
                comm=_text(comm),
            )
        )
    return found
