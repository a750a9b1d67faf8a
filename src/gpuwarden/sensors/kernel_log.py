"""Xid events and lost GPUs in the kernel log: the ring, else the log files, else the journal.

Line forms: the NVIDIA driver's ``NVRM: Xid (PCI:<address>): <code>[, pid=…][, name=…], <text>``,
and its "fallen off the bus" lines, which carry no code. Prefixes: dmesg (seconds, ``-T``, ISO),
syslog (RFC 3164 and RFC 3339) and the journal. Records of /dev/kmsg: Documentation/ABI/testing/
dev-kmsg of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, tzinfo

from msgspec import Struct

from gpuwarden.errors import Denied, GpuwardenError, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, XidEvent
from gpuwarden.pattern import pattern
from gpuwarden.sensors.seen import Seen

RING = "/dev/kmsg"
LOG_FILES = ("/var/log/kern.log", "/var/log/messages")
BOOT_LOG = "/var/log/dmesg"
"""Holds only what was said up to the end of the boot."""
TAIL_LIMIT_BYTES = 2 << 20
LINE_LIMIT = 4096
MESSAGE_LIMIT = 512
NAME_LIMIT = 64
EVENT_LIMIT = 20_000
JOURNAL_DEADLINE_SECONDS = 2.0
_JOURNAL_DIRECTORIES = ("/var/log/journal", "/run/log/journal")
_REMEDY = "run as root, or grant CAP_SYSLOG"

LOST_GPU_CODE = 79
_PID_MAXIMUM = 1 << 22
_SECONDS_MAXIMUM = 1e11
_USER_LEVEL_FACILITY_MASK = 0x3F8

_XID = pattern(
    r"(?<![A-Za-z])Xid \((?:PCI:)?(?P<address>[0-9A-Fa-f:.]{4,20})"
    r"(?: +GPU-I:(?P<gi>\w{1,8})(?:[ ,]+GPU-CI:(?P<ci>\w{1,8}))?)?\): ?"
    r"(?P<code>\d{1,5})(?![\w])"
    r"(?:, *pid='?(?P<pid>\d{1,10}(?!\d)|<unknown>|\S{0,32}?)'?(?=,|$|\s))?"
    r"(?:, *name=(?P<name>[^,]*))?"
    r"[, ]*(?P<message>.*)"
)
_ADDRESS = pattern(r"(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?\Z")
_LOST = pattern(
    r"GPU (?:at )?(?:PCI:)?(?P<address>[0-9A-Fa-f:.]{4,20}): GPU has fallen off the bus"
)
# One message of three lines: "The NVIDIA GPU <address>", "(PCI ID: …) installed in this system
# has", "fallen off the bus and is not responding to commands."
_LOST_FIRST = pattern(r"The NVIDIA GPU (?P<address>[0-9A-Fa-f:.]{4,20})(?=\s|$)")
_LOST_LAST = "fallen off the bus and is not responding"
_LOST_LINES = 8
"""How many lines of the driver may lie between the first and the last of the three."""

_BRACKET = pattern(r"\[([^\[\]]{0,40})\]\s*")
_PRIORITY = pattern(r"<(\d{1,4})>\s*")
_ISO = pattern(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s+")
_BSD = pattern(r"([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?\s+")
_DECODED = pattern(r"(kern|user|daemon|syslog|[a-z0-9]{2,10})\s*:[a-z]{3,8}\s*:\s*")
_TAG = pattern(r"(?:[^\s:]{1,255} )?kernel: *\Z")
_SECONDS = pattern(r"\s*(\d{1,11}(?:\.\d{1,9})?)\s*\Z")
_CTIME = "%a %b %d %H:%M:%S %Y"
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_KMSG_ESCAPE = pattern(rb"\\x([0-9a-f]{2})")


class _Prefix(Struct, frozen=True):
    at_ns: int | None
    seconds: float | None
    trusted: bool


# -------------------------------------------------------------------- reading


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


# -------------------------------------------------------------------- parsing


def normalise_pci_address(text: str) -> str | None:
    """``dddddddd:bb:dd.f`` in lower case for any PCI address form of the driver, else None."""
    found = _ADDRESS.match(text)
    if not found:
        return None
    domain, bus, device, function = found.groups()
    if int(device, 16) > 0x1F:
        return None
    return f"{int(domain or '0', 16):08x}:{bus}:{device}.{function or '0'}".lower()


def parse_kmsg(records: Iterable[bytes], boot_time_ns: int | None = None) -> list[XidEvent]:
    """The events in records of /dev/kmsg; what user space wrote there is not trusted."""
    events: list[XidEvent] = []
    reader = _Lines()
    for record in records:
        if b"NVRM" not in record and b"Xid" not in record:
            continue
        head, separator, rest = record.partition(b";")
        fields = head.split(b",")
        if not separator or len(fields) < 3 or not (fields[0].isdigit() and fields[2].isdigit()):
            continue
        priority, microseconds = int(fields[0][:9]), int(fields[2][:18])
        text = _KMSG_ESCAPE.sub(
            lambda found: bytes((int(found[1], 16),)), rest.partition(b"\n")[0]
        ).decode("utf-8", "backslashreplace")
        prefix = _Prefix(
            at_ns=None if boot_time_ns is None else boot_time_ns + microseconds * 1000,
            seconds=microseconds / 1e6,
            trusted=not priority & _USER_LEVEL_FACILITY_MASK,
        )
        for line in text.split("\n")[:64]:
            reader.feed(line[:LINE_LIMIT], prefix, events)
    return events[-EVENT_LIMIT:]


def parse_lines(
    text: str | Iterable[str], boot_time_ns: int | None = None, *, zone: tzinfo = UTC
) -> list[XidEvent]:
    """The events in kernel-log text of any origin, in its order.

    ``boot_time_ns`` turns seconds since boot into a time; ``zone`` is where stamps without one
    were written.
    """
    events: list[XidEvent] = []
    reader = _Lines()
    for raw in text.split("\n") if isinstance(text, str) else text:
        if "NVRM" not in raw and "Xid" not in raw:
            continue
        line = raw.rstrip("\r\n")[:LINE_LIMIT]
        start = line.find("NVRM:")
        if start < 0:
            start = _xid_start(line)
            if start < 0:
                continue
        prefix = _parse_prefix(line[:start], boot_time_ns, zone)
        reader.feed(line[start:], prefix, events)
    return events[-EVENT_LIMIT:]


def _xid_start(line: str) -> int:
    found = _XID.search(line)
    return found.start() if found else -1


class _Lines:
    """Turns lines into events; remembers the head of a message that spans three lines."""

    def __init__(self) -> None:
        self._address: str | None = None
        self._left = 0

    def feed(self, line: str, prefix: _Prefix, events: list[XidEvent]) -> None:
        is_driver = line.startswith("NVRM:")
        found = _XID.search(line)
        if found:
            event = _xid_event(found, prefix, is_driver)
            if event:
                events.append(event)
            return
        if not is_driver:
            return
        if lost := _LOST.search(line):
            address = normalise_pci_address(lost["address"])
            if address:
                events.append(_lost_event(line, address, prefix))
        elif first := _LOST_FIRST.search(line):
            self._address = normalise_pci_address(first["address"])
            self._left = _LOST_LINES
            if _LOST_LAST in line:
                self._finish(line, prefix, events)
        elif self._left:
            self._left -= 1
            if _LOST_LAST in line:
                self._finish(line, prefix, events)

    def _finish(self, line: str, prefix: _Prefix, events: list[XidEvent]) -> None:
        if self._address:
            events.append(_lost_event(line, self._address, prefix))
        self._address, self._left = None, 0


def _lost_event(line: str, address: str, prefix: _Prefix) -> XidEvent:
    return XidEvent(
        code=LOST_GPU_CODE,
        pci_address=address,
        message=line.removeprefix("NVRM:").strip()[:MESSAGE_LIMIT],
        at_ns=prefix.at_ns,
        seconds_since_boot=prefix.seconds,
        trusted=prefix.trusted,
    )


def _xid_event(found: re.Match[str], prefix: _Prefix, is_driver: bool) -> XidEvent | None:
    address = normalise_pci_address(found["address"])
    if address is None:
        return None
    pid_text, name = found["pid"] or "", (found["name"] or "").strip().strip("'")
    pid = int(pid_text) if pid_text.isascii() and pid_text.isdigit() else None
    message = found["message"].strip()
    return XidEvent(
        code=int(found["code"]),
        pci_address=address,
        pid=pid if pid is not None and 0 < pid <= _PID_MAXIMUM else None,
        process_name=name[:NAME_LIMIT] if name and name != "<unknown>" else None,
        message=message[:MESSAGE_LIMIT],
        at_ns=prefix.at_ns,
        seconds_since_boot=prefix.seconds,
        truncated=message.endswith(">") or message.count("(") > message.count(")"),
        trusted=is_driver and prefix.trusted,
        gpu_instance=_instance(found["gi"]),
        compute_instance=_instance(found["ci"]),
    )


def _instance(text: str | None) -> str | None:
    if text is None:
        return None
    return str(int(text)) if text.isascii() and text.isdigit() else text


def _parse_prefix(prefix: str, boot_time_ns: int | None, zone: tzinfo) -> _Prefix:
    at_ns: int | None = None
    seconds: float | None = None
    trusted = True
    rest = prefix.lstrip()
    # Brackets stand before the host and the tag in the journal, behind them in syslog.
    while rest:
        if found := _PRIORITY.match(rest):
            trusted = trusted and not int(found[1]) & _USER_LEVEL_FACILITY_MASK
        elif found := _BRACKET.match(rest):
            if number := _SECONDS.match(found[1]):
                seconds = float(number[1])
            else:
                at_ns = at_ns or _ctime_ns(found[1], zone)
        elif found := _ISO.match(rest):
            at_ns = _iso_ns(found, zone)
        elif found := _BSD.match(rest):
            at_ns = _bsd_ns(found, boot_time_ns, zone)
        elif found := _DECODED.match(rest):
            trusted = trusted and found[1] == "kern"
        else:
            break
        rest = rest[found.end() :]
    trailing = rest
    while trailing.rstrip().endswith("]"):
        opening = trailing.rfind("[")
        bracket = _BRACKET.match(trailing, opening) if opening >= 0 else None
        if not bracket:
            break
        if number := _SECONDS.match(bracket[1]):
            seconds = float(number[1])
        trailing = trailing[:opening]
    if trailing.strip() and not _TAG.match(trailing):
        trusted = False
    if at_ns is None and seconds is not None and boot_time_ns is not None:
        at_ns = boot_time_ns + int(min(seconds, _SECONDS_MAXIMUM) * 1e9)
    return _Prefix(at_ns, seconds, trusted)


def _ns(moment: datetime, nanoseconds: int = 0) -> int | None:
    try:
        return int(moment.timestamp()) * 1_000_000_000 + nanoseconds
    except (OverflowError, ValueError):
        return None


def _ctime_ns(text: str, zone: tzinfo) -> int | None:
    try:
        return _ns(datetime.strptime(text.strip(), _CTIME).replace(tzinfo=zone))
    except ValueError:
        return None


def _iso_ns(found: re.Match[str], zone: tzinfo) -> int | None:
    try:
        moment = datetime.fromisoformat(found[1] + (found[3] or ""))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone)
    return _ns(moment, int((found[2] or "0").ljust(9, "0")))


def _bsd_ns(found: re.Match[str], boot_time_ns: int | None, zone: tzinfo) -> int | None:
    """A stamp without a year: the first such moment after the boot, or up to 30 days before it."""
    month = _MONTHS.find(found[1])
    if boot_time_ns is None or month < 0 or month % 3:
        return None
    try:
        boot = datetime.fromtimestamp(boot_time_ns // 1_000_000_000, zone)
    except (OverflowError, ValueError, OSError):
        return None
    for year in (boot.year, boot.year + 1):
        try:
            hour, minute, second = int(found[3]), int(found[4]), int(found[5])
            moment = datetime(year, month // 3 + 1, int(found[2]), hour, minute, second)
            moment = moment.replace(tzinfo=zone)
        except ValueError:
            continue
        if (boot - moment).days < 30:
            return _ns(moment)
    return None
