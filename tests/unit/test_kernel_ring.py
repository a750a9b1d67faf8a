"""The kernel's log without its device node: lines of syslog(2) become records of /dev/kmsg."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import host_calls
from gpuwarden.errors import Denied
from gpuwarden.host import Host
from gpuwarden.host_calls import records_of_log
from gpuwarden.sensors.xid_lines import parse_kmsg

XID = b"NVRM: Xid (PCI:0000:05:00): 31, pid=7, name=x, MMU Fault"


def test_a_line_carries_its_time_and_who_wrote_it() -> None:
    text = b"<5>[    0.000000] Linux version\n<3>[ 5.500000] %s\n<11>[    6.000001][  T12] %s\n"
    kernel, user = parse_kmsg(records_of_log(text % (XID, XID)), 10**9)
    assert (kernel.trusted, user.trusted) == (True, False)
    assert (kernel.at_ns, user.at_ns) == (6_500_000_000, 7_000_001_000)
    assert kernel.message == user.message == "MMU Fault"


def test_whether_lines_were_dropped_is_told_by_the_number() -> None:
    whole = records_of_log(b"<5>[    0.000000] Linux version\n<6>[    1.000000] usb\n")
    later = records_of_log(b"<6>[   12.000000] usb\n")
    assert [record.split(b",")[1] for record in (*whole, *later)] == [b"0", b"0", b"1"]


def test_a_text_that_looks_like_a_prefix_is_text() -> None:
    (record,) = records_of_log(b"<12>[    7.000000] <3>[    1.000000] " + XID)
    assert record.startswith(b"12,1,7000000,-;<3>[")
    (event,) = parse_kmsg([record], 0)
    assert not event.trusted


@given(st.binary(max_size=300) | st.from_regex(rb"(<\d{1,5}>\[ *\d{1,12}\.\d{6}\] .*\n)*"))
def test_any_bytes_give_records(text: bytes) -> None:
    records = records_of_log(text)
    assert len(records) <= text.count(b"\n") + 1
    parse_kmsg(records, 0)


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the device is refused, as by a container's device rules."""
    opened = os.open

    def denied(path: Any, *arguments: Any, **more: Any) -> int:
        if path == "/dev/kmsg":
            raise PermissionError(errno.EPERM, "refused")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", denied)
    monkeypatch.setattr(Host, "device_number", lambda self, path: (1, 11))


def test_where_the_device_is_refused_the_kernel_is_asked_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch)
    monkeypatch.setattr(host_calls, "kernel_log_records", lambda: [b"6,0,1,-;text"])
    assert list(Host().kernel_ring_records()) == [b"6,0,1,-;text"]


def test_where_both_are_refused_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> list[bytes]:
        raise PermissionError(errno.EPERM, "refused")

    refuse(monkeypatch)
    monkeypatch.setattr(host_calls, "kernel_log_records", refused)
    with pytest.raises(Denied, match="/dev/kmsg"):
        list(Host().kernel_ring_records())


def test_both_ways_tell_the_same() -> None:
    try:
        without = host_calls.kernel_log_records()
        with_device = list(Host().kernel_ring_records())
    except (OSError, Denied) as error:
        pytest.skip(f"this user may not read the kernel's log: {error}")
    texts = {record.partition(b";")[2] for record in without}
    device = [record.partition(b";")[2].partition(b"\n")[0] for record in with_device]
    plain = [text for text in device if text and b"\\x" not in text and text == text.strip()]
    missing = [text for text in plain if text not in texts]
    # What is written between the two looks, or dropped from a full ring, may differ.
    assert len(missing) <= len(plain) // 20, missing[:5]
