"""The probe: loads one way of seeing device opens, and reads what it tells.

Needs kernel 5.8 with BTF, and CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN (or root). From 5.15 on, how and
by which path a device was opened is known as well. Everything ends with the process that loaded it,
unless it was pinned (pinning.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

from gpuwarden.errors import Malformed, Unavailable, UsageError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2, layouts, pinning, proof, tables, ways
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.decoder import Decoder, parse_holders
from gpuwarden.probes.events import (
    HOWS,
    Event,
    HeldDescriptor,
    How,
    OpenCount,
    boot_offset_ns,
)
from gpuwarden.probes.layouts import PATH_BYTES
from gpuwarden.probes.libbpf import RING_CALLBACK, Libbpf, library
from gpuwarden.probes.loading import NOT_LOADED, LoadedObject, check_needs, explained
from gpuwarden.probes.settings import Counters, Number, Settings
from gpuwarden.probes.skim import HEAD, PATH_AT, RECORD_BYTES, Skim

FOLDER = os.path.dirname(os.path.abspath(__file__))
WAYS = tuple(ways.BY_NAME)
"""The ways of seeing opens by eBPF, best first."""
NULL_DEVICE = (1, 3)
BATCH = 1024
"""Records taken in one ``poll``, so that a flood does not keep it from returning."""
SKIMMED = 1 << 16
"""Records that only were looked at in one ``poll``."""
ITERATOR_READ_BYTES = 1 << 16
HELD_LIMIT_BYTES = 16 << 20

_DENY, _WOULD_DENY = 1, 2
_CGROUP_KEY = layouts.packed("cgroup_key")
_SETTINGS = layouts.packed("settings")
_COUNT = layouts.packed("count")
_TOUCHED = layouts.packed("touched_process")


class DeviceOpenProbe:
    """The probe, attached between ``with`` and its end, by one of ``WAYS``.

    Errors on entering: Unavailable (no libbpf, no object, kernel too old), Denied, Malformed (the
    object and this program differ); nothing stays loaded then.
    """

    def __init__(
        self,
        devices: Iterable[Number],
        settings: Settings | None = None,
        *,
        host: Host | None = None,
        way: str = "cgroup/dev",
        object_path: str | None = None,
    ) -> None:
        if way not in ways.BY_NAME:
            raise UsageError(f"{way}: none of the ways {', '.join(WAYS)}")
        self.way = ways.BY_NAME[way]
        self.settings = settings or Settings()
        self._host = host or Host()
        self._object_path = object_path or os.path.join(FOLDER, self.way.object_name)
        self._devices: set[Number] = set()
        self._wanted = set(devices)
        self._stack = ExitStack()
        self._records: list[bytes] = []
        self._denials: dict[GroupKey, int] = {}
        self._malformed = 0
        self._ring = 0
        self._object: LoadedObject | None = None
        self._decoder = Decoder(boot_offset_ns(), self.way.name)
        self.skim: Skim | None = None
        """Asked of each open before it is copied; what it takes is not told of by ``poll``."""
        self._skimmed = 0
        self.taken = 0
        """Records of the ring so far, those that only were looked at included."""
        self._callback = RING_CALLBACK(self._take)

    # ---------------------------------------------------------------- life

    def __enter__(self) -> DeviceOpenProbe:
        check_needs(self.settings, self.way, self._object_path)
        with library() as bpf:
            self._bpf = bpf
            *others, last = self.way.hooks
            for hooks in others:
                try:
                    self._enter(bpf, hooks)
                    return self
                except (OSError, Unavailable):
                    continue  # this kernel may have the function of the next ones
            try:
                self._enter(bpf, last)
            except OSError as error:
                raise explained(bpf, error) from error
        return self

    def _enter(self, bpf: Libbpf, hooks: tuple[str, ...]) -> None:
        with ExitStack() as stack:
            stack.callback(self._left)
            self._load(bpf, stack, hooks)
            self._stack = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detaches and unloads; denials end here, if they were not pinned. Twice does nothing.

        Not while another thread is in ``poll``.
        """
        self._ring = 0
        self._stack.close()

    def _left(self) -> None:
        self._ring = 0
        self._object = None
        self._devices = set()

    def _load(self, bpf: Libbpf, stack: ExitStack, hooks: tuple[str, ...]) -> None:
        loaded = LoadedObject(bpf, self.way, self.settings)
        loaded.load(stack, self._object_path, hooks)
        self._object = loaded
        self._write_settings()
        ring = loaded.map("records")
        self._ring = bpf.pointer("ring_buffer__new", ring, self._callback, 0, None)
        stack.callback(bpf.call, "ring_buffer__free", self._ring)
        loaded.attach(stack, self._host)
        proof.prove(bpf, loaded, self._discard)
        self.watch(self._wanted)

    def _discard(self) -> None:
        self._bpf.call("ring_buffer__poll", self._ring, 0)
        self._records.clear()

    @property
    def _loaded(self) -> LoadedObject:
        if self._object is None:
            raise Unavailable(NOT_LOADED)
        return self._object

    # ---------------------------------------------------------------- what is watched

    def watch(self, devices: Iterable[Number]) -> None:
        """Watches these device numbers and no others; for when majors change.

        Errors: UsageError for (1, 3), which is /dev/null.
        """
        wanted = set(devices)
        for major, minor in wanted:
            if (major, minor) == NULL_DEVICE or (major, minor) == (NULL_DEVICE[0], None):
                raise UsageError(f"{major}:{minor or '*'} is memory's and null's: not watched")
        for number in wanted - self._devices:
            self._loaded.put("watched_devices", tables.device_key(number), b"\1\0\0\0")
        for number in self._devices - wanted:
            self._loaded.delete("watched_devices", tables.device_key(number))
        self._devices = wanted

    # ---------------------------------------------------------------- what is told

    def fileno(self) -> int:
        """A descriptor that is readable when there are events, for an own poll loop."""
        if not self._ring:
            raise Unavailable(NOT_LOADED)
        return self._bpf.checked("ring_buffer__epoll_fd", self._ring)

    def poll(self, timeout_ms: int = 0) -> list[Event]:
        """The events there are, at most ``BATCH``; waits up to ``timeout_ms`` for the first."""
        events: list[Event] = []
        for record in self.poll_raw(timeout_ms):
            try:
                events.append(self._decoder.decode(record))
            except Malformed:
                self._malformed += 1
        return events

    def poll_raw(self, timeout_ms: int = 0) -> list[bytes]:
        """As ``poll``, not decoded."""
        if not self._ring:
            raise Unavailable(NOT_LOADED)
        self._skimmed = 0
        self._bpf.call("ring_buffer__poll", self._ring, timeout_ms)
        records, self._records = self._records, []
        return records

    def _take(self, context: int | None, data: int, size: int) -> int:
        self.taken += 1
        if (
            self.skim is not None
            and size == RECORD_BYTES
            and self.skim(
                HEAD.unpack(ctypes.string_at(data, HEAD.size)),
                ctypes.string_at(data + PATH_AT, PATH_BYTES),
            )
        ):
            self._skimmed += 1
            return -errno.EAGAIN if self._skimmed >= SKIMMED else 0
        self._records.append(ctypes.string_at(data, size))
        return -errno.EAGAIN if len(self._records) >= BATCH else 0

    def resynchronise(self) -> None:
        """Takes the wall clock anew, after it was set."""
        self._decoder.boot_offset_ns = boot_offset_ns()

    def counters(self) -> Counters:
        """Events seen and dropped, by cause."""
        found = tables.counters(self._bpf, self._loaded)
        return Counters(malformed=self._malformed, **found)

    def counts(self) -> list[OpenCount]:
        """How often each process was here for each device, by ``how``; none with the limiter off.

        Those of processes that have ended stay until ``forget``.
        """
        found = []
        value = ctypes.create_string_buffer(_COUNT.size)
        for key in tables.count_keys(self._bpf, self._loaded):
            start_ns, tgid, major, minor, how = tables.COUNT_KEY.unpack(key)
            if self._bpf.call("bpf_map_lookup_elem", self._loaded.map("counts"), key, value) == 0:
                hits, _, _ = _COUNT.unpack(value.raw)
                found.append(
                    OpenCount(
                        pid=tgid,
                        start_time_ns=start_ns,
                        major=major,
                        minor=minor,
                        how=HOWS[how],
                        hits=hits,
                    )
                )
        return found

    def forget(
        self,
        pid: int,
        start_time_ns: int,
        keys: Iterable[tuple[int, int, How]] | None = None,
    ) -> None:
        """Makes room in the limiter's table once a process has ended and its counts were read.

        ``keys``: the (major, minor, how) of its events; without them the whole table is walked.
        """
        if keys is not None:
            for major, minor, how in keys:
                for number, name in enumerate(HOWS):
                    if name == how:
                        key = tables.COUNT_KEY.pack(start_time_ns, pid, major, minor, number)
                        self._loaded.delete("counts", key)
            return
        for key in list(tables.count_keys(self._bpf, self._loaded)):
            if tables.COUNT_KEY.unpack(key)[:2] == (start_time_ns, pid):
                self._loaded.delete("counts", key)

    def opener(self, pid: int, start_time_ns: int) -> tuple[int, int] | None:
        """(pid, start time) of who used a watched device first in this process's line of forks.

        The process itself if it did; None when neither it nor a forebear did while watched.
        """
        value = ctypes.create_string_buffer(_TOUCHED.size)
        key = pid.to_bytes(4, "little")
        touched = self._loaded.map("touched_processes")
        if self._bpf.call("bpf_map_lookup_elem", touched, key, value) != 0:
            return None
        start_ns, opener_start_ns, opener, _ = _TOUCHED.unpack(value.raw)
        return (opener, opener_start_ns) if start_ns == start_time_ns else None

    def follow(self, pid: int, start_time_ns: int) -> None:
        """Takes a process for one that was seen to use a device: its end is told."""
        value = _TOUCHED.pack(start_time_ns, start_time_ns, pid, 0)
        self._loaded.put("touched_processes", pid.to_bytes(4, "little"), value)

    def holders(self, *, once: bool = False) -> list[HeldDescriptor]:
        """Every descriptor on a watched device, by the kernel's own list of open files.

        ``once``: one of each process and device.
        Not in it: mappings whose descriptor was closed, descriptors in flight in a socket.
        """
        try:
            descriptor = self._loaded.holders_iterator()
        except OSError as error:
            raise Unavailable(f"the list of open files: {error}") from error
        chunks: list[bytes] = []
        total = 0
        try:
            while total < HELD_LIMIT_BYTES:
                chunk = os.read(descriptor, ITERATOR_READ_BYTES)
                if not chunk:
                    break
                chunks.append(chunk)
                total += len(chunk)
        finally:
            os.close(descriptor)
        return parse_holders(b"".join(chunks), once=once)

    # ---------------------------------------------------------------- denials

    def deny(self, directory: str, *, dry_run: bool = False) -> GroupKey:
        """Denies watched devices to a control group and those below it, until ``allow`` or close.

        A dry run only says so in the events. Errors: UsageError, Unavailable, Denied.
        """
        self._check_denies(dry_run)
        key = cgroup2.group_key(self._host, directory)
        self.deny_group(key, dry_run=dry_run)
        return key

    def deny_group(self, key: GroupKey, *, dry_run: bool = False) -> None:
        """As ``deny``, for a group known by number. Errors: UsageError for a root group, and
        where the way in use cannot deny."""
        self._check_denies(dry_run)
        if key.id <= cgroup2.ROOT_INODE:
            raise UsageError("the root group holds every process of the machine")
        verdict = _WOULD_DENY if dry_run else _DENY
        self._loaded.put(
            "denied_cgroups",
            _CGROUP_KEY.pack(key.id, key.hierarchy, 0),
            verdict.to_bytes(4, "little"),
        )
        self._denials[key] = verdict
        self._write_settings()

    def _check_denies(self, dry_run: bool) -> None:
        if not (dry_run or self.way.can_deny):
            raise UsageError(f"{self.way.name} cannot deny: it only sees")

    def allow(self, key: GroupKey) -> None:
        """Takes a denial back."""
        self._loaded.delete("denied_cgroups", _CGROUP_KEY.pack(key.id, key.hierarchy, 0))
        self._denials.pop(key, None)
        self._write_settings()

    def pin(self, directory: str = pinning.DIRECTORY) -> tuple[str, ...]:
        """Makes the denials, those of now and of later, outlive this process; see ``pinning``.

        What was pinned there before is replaced by this, without a moment of neither: deny first,
        then pin. ``pinning.unpin`` ends it. Errors: UsageError, Denied, Unavailable.
        """
        if not self.way.can_deny:
            raise UsageError(f"{self.way.name} cannot deny: there is nothing to pin")
        programs = [name for hooks in self.way.hooks for name in hooks]
        return pinning.pin(self._bpf, self._loaded, programs, directory)

    def _write_settings(self) -> None:
        values = _SETTINGS.pack(
            int(self.settings.limit_window_seconds * 1e9),
            self.settings.limit_events,
            self.settings.return_values,
            self.settings.every_exec,
            bool(self._denials),
        )
        self._loaded.put("settings", bytes(4), values)
