"""Loads device_open.bpf.o through libbpf, attaches all of it or nothing, and reads what it tells.

Needs kernel 5.8 with BTF, and CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN (or root). From 5.15 on, how and
by which path a device was opened is known as well. Everything ends with the process that loaded it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable, UsageError
from gpuwarden.host import Host
from gpuwarden.probes import btf, cgroup2, layouts
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
from gpuwarden.probes.libbpf import RING_CALLBACK, Libbpf, library
from gpuwarden.probes.settings import Counters, Number, Settings

OBJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "device_open.bpf.o")
KERNEL_TYPES = "/sys/kernel/btf/vmlinux"
TRACEFS = ("/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events")
ANY_MINOR = 0xFFFFF
NULL_DEVICE = (1, 3)
BATCH = 8192
"""Records taken in one ``poll``, so that a flood does not keep it from returning."""
ITERATOR_READ_BYTES = 1 << 16
HELD_LIMIT_BYTES = 16 << 20
COUNTS_LIMIT = 1 << 17
NOT_LOADED = "the eBPF probe is not loaded, or no longer"

_ATTACHED = ("process_fork", "process_exec", "process_exit")
_RETURNS = ("returned_openat", "returned_openat2", "returned_open")
_DENY, _WOULD_DENY = 1, 2
_COUNTERS = (
    "hits",
    "limited",
    "denied",
    "limiter_full",
    "dropped_opens",
    "dropped_returns",
    "dropped_execs",
    "dropped_exits",
    "dropped_groups",
)
_DEVICE_KEY = layouts.packed("device_key")
_CGROUP_KEY = layouts.packed("cgroup_key")
_SETTINGS = layouts.packed("settings")
_COUNT_KEY = layouts.packed("count_key")
_COUNT = layouts.packed("count")
RIGHTS = (
    "run as root, or with CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN and CAP_SYS_ADMIN, on a kernel that "
    "is not locked down"
)
SAID_LINES = 4


class DeviceOpenProbe:
    """The probe, attached between ``with`` and its end.

    Errors on entering: Unavailable (no libbpf, no object, kernel too old), Denied, Malformed (the
    object and this program differ); nothing stays loaded then.
    """

    def __init__(
        self,
        devices: Iterable[Number],
        settings: Settings | None = None,
        *,
        host: Host | None = None,
        object_path: str = OBJECT,
    ) -> None:
        self.settings = settings or Settings()
        self._host = host or Host()
        self._object_path = object_path
        self._devices: set[Number] = set()
        self._wanted = set(devices)
        self._stack = ExitStack()
        self._records: list[bytes] = []
        self._maps: dict[str, int] = {}
        self._denials: dict[GroupKey, int] = {}
        self._malformed = 0
        self._ring = 0
        self._iterator = 0
        self._decoder = Decoder(boot_offset_ns())
        self._callback = RING_CALLBACK(self._take)

    # ---------------------------------------------------------------- life

    def __enter__(self) -> DeviceOpenProbe:
        self._check_needs()
        with library() as bpf:
            self._bpf = bpf
            try:
                with ExitStack() as stack:
                    self._load(bpf, stack)
                    self._stack = stack.pop_all()
            except OSError as error:
                raise self._explained(bpf, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detaches and unloads; denials end here. A second time does nothing.

        Not while another thread is in ``poll``.
        """
        self._ring = self._iterator = 0
        self._stack.close()

    def _check_needs(self) -> None:
        if not os.path.exists(KERNEL_TYPES):
            raise Unavailable(
                "this kernel does not describe its types (BTF): the probe cannot be fitted to it",
                remedy="a kernel of 5.8 or later with CONFIG_DEBUG_INFO_BTF",
            )
        if self.settings.return_values and not any(map(os.path.isdir, TRACEFS)):
            raise Unavailable(
                "return values need tracefs, and it is not mounted",
                remedy="mount -t tracefs tracefs /sys/kernel/tracing",
            )
        try:
            with open(self._object_path, "rb") as file:
                layouts.check(btf.structures(file.read()))
        except FileNotFoundError as error:
            raise Unavailable(
                "the eBPF probe was not built with this installation",
                remedy="scripts/build_probes in a checkout, or a wheel for this machine",
            ) from error

    def _load(self, bpf: Libbpf, stack: ExitStack) -> None:
        loaded = bpf.pointer("bpf_object__open_file", self._object_path.encode(), None)
        stack.callback(bpf.call, "bpf_object__close", loaded)

        def program(name: str) -> int:
            found = bpf.pointer("bpf_object__find_program_by_name", loaded, name.encode())
            bpf.checked("bpf_program__set_autoload", found, True)
            return found

        attached = [program(name) for name in _ATTACHED]
        if self.settings.groups:
            attached.append(program("group_made"))
        if self.settings.return_values:
            names = _RETURNS if os.uname().machine == "x86_64" else _RETURNS[:2]
            attached += [program(name) for name in names]
        access, holders = program("device_access"), program("holders")
        ring = bpf.pointer("bpf_object__find_map_by_name", loaded, b"records")
        bpf.checked("bpf_map__set_max_entries", ring, self.settings.ring_bytes)
        bpf.checked("bpf_object__load", loaded)

        for name in ("records", "watched_devices", "counts", "denied_cgroups", "counters"):
            found = bpf.pointer("bpf_object__find_map_by_name", loaded, name.encode())
            self._maps[name] = bpf.checked("bpf_map__fd", found)
        found = bpf.pointer("bpf_object__find_map_by_name", loaded, b"settings_map")
        self._maps["settings"] = bpf.checked("bpf_map__fd", found)
        stack.callback(self._maps.clear)
        self._write_settings()
        self.watch(self._wanted)

        self._ring = bpf.pointer("ring_buffer__new", self._maps["records"], self._callback, 0, None)
        stack.callback(bpf.call, "ring_buffer__free", self._ring)
        for pointer in attached:
            self._keep(bpf, stack, bpf.pointer("bpf_program__attach", pointer))
        self._iterator = bpf.pointer("bpf_program__attach_iter", holders, None)
        self._keep(bpf, stack, self._iterator)
        root = cgroup2.open_root(self._host)
        try:
            # By a link: it lives beside the programs of runc and systemd and ends with us.
            self._keep(bpf, stack, bpf.pointer("bpf_program__attach_cgroup", access, root))
        finally:
            os.close(root)

    @staticmethod
    def _keep(bpf: Libbpf, stack: ExitStack, link: int) -> None:
        stack.callback(bpf.call, "bpf_link__destroy", link)

    @staticmethod
    def _explained(bpf: Libbpf, error: OSError) -> GpuwardenError:
        """What libbpf and the verifier said goes into the message where rights are not the cause,
        and into the error's notes in any case."""
        message = f"the eBPF probe was not loaded: {error.strerror or error}"
        found: GpuwardenError
        if error.errno in (errno.EPERM, errno.EACCES):
            found = Denied(message, remedy=RIGHTS)
        else:
            said = " / ".join(bpf.said[-SAID_LINES:])
            found = Unavailable(
                f"{message} ({said})" if said else message,
                remedy="a kernel of 5.8 or later with cgroup and BPF support",
            )
        for line in bpf.said:
            found.add_note(line)
        return found

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
            self._put("watched_devices", self._device_key(number), b"\1\0\0\0")
        for number in self._devices - wanted:
            self._delete("watched_devices", self._device_key(number))
        self._devices = wanted

    @staticmethod
    def _device_key(number: Number) -> bytes:
        return _DEVICE_KEY.pack(number[0], ANY_MINOR if number[1] is None else number[1])

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
        self._bpf.call("ring_buffer__poll", self._ring, timeout_ms)
        records, self._records = self._records, []
        return records

    def _take(self, context: int | None, data: int, size: int) -> int:
        self._records.append(ctypes.string_at(data, size))
        return -errno.EAGAIN if len(self._records) >= BATCH else 0

    def resynchronise(self) -> None:
        """Takes the wall clock anew, after it was set."""
        self._decoder.boot_offset_ns = boot_offset_ns()

    def counters(self) -> Counters:
        """Events seen and dropped, by cause."""
        cpus = self._bpf.checked("libbpf_num_possible_cpus")
        values = (ctypes.c_uint64 * cpus)()
        found = {}
        for index, name in enumerate(_COUNTERS):
            key = ctypes.c_uint32(index)
            self._bpf.checked(
                "bpf_map_lookup_elem",
                self._map("counters"),
                ctypes.byref(key),
                ctypes.byref(values),
            )
            found[name] = sum(values)
        return Counters(malformed=self._malformed, **found)

    def counts(self) -> list[OpenCount]:
        """How often each process was here for each device, by ``how``; none with the limiter off.

        Those of processes that have ended stay until ``forget``.
        """
        found = []
        value = ctypes.create_string_buffer(_COUNT.size)
        for key in self._count_keys():
            start_ns, tgid, major, minor, how = _COUNT_KEY.unpack(key)
            if self._bpf.call("bpf_map_lookup_elem", self._map("counts"), key, value) == 0:
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
                        key = _COUNT_KEY.pack(start_time_ns, pid, major, minor, number)
                        self._delete("counts", key)
            return
        for key in list(self._count_keys()):
            if _COUNT_KEY.unpack(key)[:2] == (start_time_ns, pid):
                self._delete("counts", key)

    def _count_keys(self) -> Iterator[bytes]:
        key: bytes | None = None
        following = ctypes.create_string_buffer(_COUNT_KEY.size)
        for _ in range(COUNTS_LIMIT):
            counts = self._map("counts")
            if self._bpf.call("bpf_map_get_next_key", counts, key, following) != 0:
                return
            key = following.raw
            yield key

    def holders(self) -> list[HeldDescriptor]:
        """Every descriptor on a watched device, by the kernel's own list of open files.

        Not in it: mappings whose descriptor was closed, descriptors in flight in a socket.
        """
        if not self._iterator:
            raise Unavailable(NOT_LOADED)
        try:
            link = self._bpf.checked("bpf_link__fd", self._iterator)
            descriptor = self._bpf.checked("bpf_iter_create", link)
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
        return parse_holders(b"".join(chunks))

    # ---------------------------------------------------------------- denials

    def deny(self, directory: str, *, dry_run: bool = False) -> GroupKey:
        """Denies watched devices to a control group and those below it, until ``allow`` or close.

        A dry run only says so in the events. Errors: UsageError, Unavailable, Denied.
        """
        key = cgroup2.group_key(self._host, directory)
        self.deny_group(key, dry_run=dry_run)
        return key

    def deny_group(self, key: GroupKey, *, dry_run: bool = False) -> None:
        """As ``deny``, for a group known by number. Errors: UsageError for a root group."""
        if key.id <= cgroup2.ROOT_INODE:
            raise UsageError("the root group holds every process of the machine")
        verdict = _WOULD_DENY if dry_run else _DENY
        self._put(
            "denied_cgroups",
            _CGROUP_KEY.pack(key.id, key.hierarchy, 0),
            verdict.to_bytes(4, "little"),
        )
        self._denials[key] = verdict
        self._write_settings()

    def allow(self, key: GroupKey) -> None:
        """Takes a denial back."""
        self._delete("denied_cgroups", _CGROUP_KEY.pack(key.id, key.hierarchy, 0))
        self._denials.pop(key, None)
        self._write_settings()

    # ---------------------------------------------------------------- maps

    def _write_settings(self) -> None:
        values = _SETTINGS.pack(
            int(self.settings.limit_window_seconds * 1e9),
            self.settings.limit_events,
            self.settings.return_values,
            self.settings.every_exec,
            bool(self._denials),
        )
        self._put("settings", bytes(4), values)

    def _map(self, name: str) -> int:
        if name not in self._maps:
            raise Unavailable(NOT_LOADED)
        return self._maps[name]

    def _put(self, name: str, key: bytes, value: bytes) -> None:
        self._bpf.checked("bpf_map_update_elem", self._map(name), key, value, 0)

    def _delete(self, name: str, key: bytes) -> None:
        self._bpf.call("bpf_map_delete_elem", self._map(name), key)
