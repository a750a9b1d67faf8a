"""Xid events and lost GPUs in the kernel log: the ring, else the log files, else the journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, tzinfo

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, XidEvent
from gpuwarden.sensors.seen import Seen
from gpuwarden.sensors.xid_lines import parse_kmsg, parse_lines

LOG_FILES = ("/var/log/kern.log", "/var/log/messages")
BOOT_LOG = "/var/log/dmesg"
"""Holds only what was said up to the end of the boot."""
TAIL_LIMIT_BYTES = 2 << 20
JOURNAL_DEADLINE_SECONDS = 2.0
_JOURNAL_DIRECTORIES = ("/var/log/journal", "/run/log/journal")
_REMEDY = "run as root, or grant CAP_SYSLOG"


def read(host: Host, seen: Seen) -> Iterator[XidEvent | Gap]:
    """Yields the Xid events that this machine's kernel log still holds.

    Errors: Denied when there is a log and none of it may be read; Unavailable when there is none.
    """
    refused: list[Denied] = []
    ring: list[bytes] | None = None
    try:
        ring = list(host.kernel_ring_records())
    except Denied as error:
        refused.append(error)
    except GpuwardenError:
        pass
    if ring is not None:
        events = parse_kmsg(ring, _boot_time_ns(host) if _speaks_of_gpus(ring) else None)
        yield from events
        yield from _older_than(host, ring)
        return
    read_any, boot_only = False, False
    for path in (*LOG_FILES, BOOT_LOG):
        if read_any and path == BOOT_LOG:
            break
        try:
            text = _tail(host, path)
        except Denied as error:
            refused.append(error)
            continue
        except GpuwardenError:
            continue
        read_any, boot_only = True, path == BOOT_LOG
        yield from _events_of_file(host, text)
    if read_any and not boot_only:
        return
    try:
        text = _journal(host)
    except GpuwardenError as error:
        if isinstance(error, Denied):
            refused.append(error)
    else:
        yield from parse_lines(text, _boot_time_ns(host))
        return
    if not read_any and refused:
        raise Denied(f"the kernel log: {refused[0]}", remedy=_REMEDY)
    if not read_any:
        raise Unavailable("no kernel log here: no ring, no log file, no journal")
    yield Gap(
        sensor="kernel_log",
        what="kernel log after the boot",
        reason=str(refused[0]) if refused else f"only {BOOT_LOG} is here",
        remedy=_REMEDY if refused else "",
    )


def _older_than(host: Host, ring: list[bytes]) -> Iterator[XidEvent]:
    """Events that the ring has already dropped and a log file still has."""
    head = ring[0].split(b",", 3) if ring else []
    if len(head) < 4 or head[1] in (b"", b"0") or not head[2].isdigit():
        return
    boot_time_ns = _boot_time_ns(host)
    if boot_time_ns is None:
        return
    # One second less: syslog stamps are whole seconds and were written a little later.
    first_ns = boot_time_ns + int(head[2][:18]) * 1000 - 1_000_000_000
    for path in LOG_FILES:
        try:
            text = _tail(host, path)
        except GpuwardenError:
            continue
        for event in _events_of_file(host, text):
            if event.at_ns is not None and event.at_ns < first_ns:
                yield event


def _events_of_file(host: Host, text: str) -> list[XidEvent]:
    if "NVRM" not in text and "Xid" not in text:
        return []
    return parse_lines(text, _boot_time_ns(host), zone=_zone(host))


def _speaks_of_gpus(records: list[bytes]) -> bool:
    return any(b"NVRM" in record or b"Xid" in record for record in records)


def _tail(host: Host, path: str) -> str:
    status = host.status(path)
    if not status.is_regular:
        raise Malformed(f"{path}: not a regular file")
    start = max(0, status.size_bytes - TAIL_LIMIT_BYTES)
    text = host.read_at(path, start, TAIL_LIMIT_BYTES).decode("utf-8", "backslashreplace")
    return text.partition("\n")[2] if start else text


def _journal(host: Host) -> str:
    if not host.is_local:
        raise Unavailable("the journal of a mounted host is not read")
    for directory in _JOURNAL_DIRECTORIES:
        try:
            host.status(directory)
            break
        except GpuwardenError:
            continue
    else:
        raise Unavailable("no journal")
    done = host.command(
        ["journalctl", "-k", "-b", "0", "-q", "--no-pager", "-n", "20000", "-o", "short-monotonic"],
        deadline_seconds=JOURNAL_DEADLINE_SECONDS,
    )
    if done.code != 0 or not done.stdout.strip():
        # Without the right to read it, journalctl prints nothing; a kernel log is never empty.
        raise Denied("the journal has no kernel line that we may read")
    return done.stdout.decode("utf-8", "backslashreplace")


def _boot_time_ns(host: Host) -> int | None:
    try:
        data = host.read_bytes("/proc/stat")
    except GpuwardenError:
        return None
    found = re.search(rb"^btime (\d{1,12})$", data, re.MULTILINE)
    return int(found[1]) * 1_000_000_000 if found else None


def _zone(host: Host) -> tzinfo:
    """That host's time zone: syslog writes local time without saying so."""
    from io import BytesIO
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo.from_file(BytesIO(host.read_bytes("/etc/localtime", 1 << 16)))
    except (GpuwardenError, ValueError, ArithmeticError, LookupError):
        return UTC
    except Exception:  # noqa: BLE001 - struct.error and others: the file is anybody's bytes
        return UTC
