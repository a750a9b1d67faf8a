"""What becomes of attempts: merged when the kernel asked twice, settled when their end is known."""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from gpuwarden.probes.events import HeldDescriptor, OpenEvent, OpenReturn

TWICE_WITHIN_NS = 1_000_000
"""On overlayfs the two questions about one open are some microseconds apart."""
PENDING_LIMIT = 8192
REFUSALS = (errno.EPERM, errno.EACCES)

_Asked = tuple[int | None, int, int, str, int | None]
_Holder = tuple[int, int, int, int]


class Twins:
    """Drops the second of two hits that are one open: same thread, device and call within 1 ms.

    Only for processes whose root is on overlayfs, and as cgroup/dev sees them; elsewhere each hit
    is an open of its own. A hit takes at most one other with it, so that of a flood no more than
    half is merged.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[_Asked, int] = OrderedDict()
        self.merged = 0

    def is_second(self, event: OpenEvent) -> bool:
        """Whether this hit belongs to the one before it."""
        if event.source != "cgroup/dev" or not event.process.overlay_root or event.how == "mknod":
            return False
        key = (event.thread_id, event.major, event.minor, event.how, event.system_call)
        before = self._last.pop(key, None)
        if before is not None and 0 <= event.since_boot_ns - before <= TWICE_WITHIN_NS:
            self.merged += 1
            return True
        self._last[key] = event.since_boot_ns
        if len(self._last) > PENDING_LIMIT:
            self._last.popitem(last=False)
        return False


def ended(event: OpenEvent, how: OpenReturn) -> OpenEvent:
    """The event with the state that its system call's result gives it."""
    if event.state == "denied":
        return event
    if how.result >= 0:
        return replace(
            event,
            state="opened",
            open_flags=how.open_flags,
            path=how.path or event.path,
            path_is_claimed=how.path is None,
        )
    error = -how.result
    return replace(event, state="denied" if error in REFUSALS else "attempted", error=error)


class Attempts:
    """Opens whose end is not known yet, oldest first, at most ``PENDING_LIMIT``.

    An attempt is settled by its return value or by a descriptor that the process holds. One that
    is not within ``wait_ns`` stays what it was, ``attempted``; with return values on it becomes
    ``unknown``, since its own was lost.
    """

    def __init__(self, *, return_values: bool = False, wait_ns: int = 2_000_000_000) -> None:
        self._return_values = return_values
        self._wait_ns = wait_ns
        self._pending: OrderedDict[tuple[int, int | None], OpenEvent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, event: OpenEvent) -> list[OpenEvent]:
        """Remembers an attempt; gives those that it pushed out, as they stand."""
        if event.how in ("mknod", "access") or event.state != "attempted":
            return []
        self._pending[(event.since_boot_ns, event.thread_id)] = event
        pushed = []
        while len(self._pending) > PENDING_LIMIT:
            pushed.append(self._given_up(self._pending.popitem(last=False)[1]))
        return pushed

    def returned(self, how: OpenReturn) -> OpenEvent | None:
        """The attempt that this was the end of, settled; None if it is not remembered."""
        event = self._pending.pop((how.attempt_since_boot_ns, how.thread_id), None)
        return None if event is None else ended(event, how)

    def held(self, descriptors: Iterable[HeldDescriptor]) -> list[OpenEvent]:
        """The attempts whose process now holds that device, as ``opened``."""
        holders: set[_Holder] = {
            (one.pid, one.start_time_ns, one.major, one.minor) for one in descriptors
        }
        found = []
        for key, event in list(self._pending.items()):
            process = event.process
            if (process.pid, process.start_time_ns, event.major, event.minor) in holders:
                del self._pending[key]
                found.append(replace(event, state="opened"))
        return found

    def expired(self, since_boot_ns: int) -> list[OpenEvent]:
        """Attempts older than ``wait_ns``, given up."""
        found = []
        while self._pending:
            key, event = next(iter(self._pending.items()))
            if since_boot_ns - event.since_boot_ns < self._wait_ns:
                break
            del self._pending[key]
            found.append(self._given_up(event))
        return found

    def _given_up(self, event: OpenEvent) -> OpenEvent:
        if self._return_values and not event.io_uring and event.how == "open":
            return replace(event, state="unknown")
        return event
