"""Lines of a kernel log as Xid events: every prefix that log files and dumps put before them.

Line forms: the NVIDIA driver's ``NVRM: Xid (PCI:<address>): <code>[, pid=…][, name=…], <text>``,
and its "fallen off the bus" lines, which carry no code. Prefixes: dmesg (seconds, ``-T``, ISO),
syslog (RFC 3164 and RFC 3339) and the journal. Records of /dev/kmsg: Documentation/ABI/testing/
dev-kmsg of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, tzinfo

from msgspec import Struct

from gpuwarden.model import XidEvent
from gpuwarden.pattern import pattern
from gpuwarden.sensors.pci import normalise_pci

LINE_LIMIT = 4096
MESSAGE_LIMIT = 512
NAME_LIMIT = 64
EVENT_LIMIT = 20_000
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
            address = normalise_pci(lost["address"])
            if address:
                events.append(_lost_event(line, address, prefix))
        elif first := _LOST_FIRST.search(line):
            self._address = normalise_pci(first["address"])
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
    address = normalise_pci(found["address"])
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
