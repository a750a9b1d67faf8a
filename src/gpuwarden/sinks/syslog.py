"""Findings to the system's log: journald's own protocol where it is, RFC 5424 to /dev/log else."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from gpuwarden.finding import Severity
from gpuwarden.life import Transition, decode, encode
from gpuwarden.sinks.fitting import fitting
from gpuwarden.sinks.sink import DELIVERED, Outcome

JOURNAL_SOCKET = "/run/systemd/journal/socket"
SYSLOG_SOCKET = "/dev/log"

# RFC 5424, 6.2.1: priority = facility * 8 + severity. Facility 3: system daemons.
FACILITY = 3
SEVERITIES: dict[Severity, int] = {"critical": 2, "error": 3, "warning": 4, "info": 6}
RESOLVED = 5
SYSLOG_BYTES = 8192
"""What rsyslog takes of one message by default."""
JOURNAL_BYTES = 48 << 10
APP_NAME = "gpuwarden"


def severity(finding: Transition) -> int:
    return RESOLVED if finding.status == "resolved" else SEVERITIES[finding.severity]


def summary(finding: Transition) -> str:
    """One line for a person; control characters are escaped."""
    parts = [finding.title]
    if finding.subject.gpu:
        parts.append(finding.subject.gpu)
    if finding.subject.pid is not None:
        parts.append(f"{finding.subject.name} pid {finding.subject.pid}".lstrip())
    if finding.verdict:
        parts.append(finding.verdict)
    text = f"{finding.status}: {', '.join(parts)} [{finding.rule} {finding.id}]"
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _printable(text: str, characters: int) -> str:
    """A header field of RFC 5424: printable ASCII without blanks, or a hyphen."""
    return "".join(c for c in text if "!" <= c <= "~")[:characters] or "-"


def rfc5424(finding: Transition) -> bytes:
    """One message: header, no structured data, then the JSON (RFC 5424, 6)."""
    seconds, nanoseconds = divmod(finding.at_ns, 10**9)
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds // 1000:06d}Z"
    header = (
        f"<{FACILITY * 8 + severity(finding)}>1 {at} {_printable(finding.node, 255)} {APP_NAME} "
        f"{os.getpid()} {_printable(finding.rule, 32)} - "
    )
    return header.encode() + encode(finding)


def _field(name: str, value: str) -> bytes:
    """One field with an explicit length, so that no value can begin another field."""
    data = value.encode("utf-8", "backslashreplace")
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def journal(finding: Transition) -> bytes:
    """One entry in journald's native protocol (systemd, JOURNAL_NATIVE_PROTOCOL)."""
    fields = {
        "MESSAGE": summary(finding),
        "PRIORITY": str(severity(finding)),
        "SYSLOG_FACILITY": str(FACILITY),
        "SYSLOG_IDENTIFIER": APP_NAME,
        "GPUWARDEN_ID": finding.id,
        "GPUWARDEN_SEQUENCE": str(finding.sequence),
        "GPUWARDEN_RULE": finding.rule,
        "GPUWARDEN_STATUS": finding.status,
        "GPUWARDEN_VERDICT": finding.verdict or "",
        "GPUWARDEN_FINDING": encode(finding).decode(),
    }
    return b"".join(_field(name, value) for name, value in fields.items() if value)


class SyslogSink:
    """One datagram a transition."""

    repeat_seconds = None
    key = "syslog"
    name = "syslog"

    def __init__(
        self, journal_socket: str = JOURNAL_SOCKET, syslog_socket: str = SYSLOG_SOCKET
    ) -> None:
        self._journal_socket = journal_socket
        self._syslog_socket = syslog_socket

    def deliver(self, finding_json: bytes) -> Outcome:
        finding = decode(finding_json)
        if os.path.exists(self._journal_socket):
            path, render, limit = self._journal_socket, journal, JOURNAL_BYTES
        else:
            path, render, limit = self._syslog_socket, rfc5424, SYSLOG_BYTES
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            # A log that nobody reads from any more would block us for ever.
            sender.settimeout(5)
            try:
                sender.connect(path)
                sender.send(fitting(finding, render, limit))
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return Outcome("refused", f"{path}: {error.strerror}")
                return Outcome("retry", f"{path}: {error.strerror or 'no answer'}")
        return DELIVERED

    def close(self) -> None:
        pass
