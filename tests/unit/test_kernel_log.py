"""Kernel-log lines become Xid events: which lines count, what they name, when, by whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.host import CommandOutput, Host
from gpuwarden.model import Gap, XidEvent
from gpuwarden.sensors.kernel_log import read
from gpuwarden.sensors.pci import normalise_pci
from gpuwarden.sensors.seen import Seen
from gpuwarden.sensors.xid_lines import parse_kmsg, parse_lines

REPOSITORY = Path(__file__).parents[2]
CASES = REPOSITORY.parent / "shared" / "cases" / "d"
FIXTURES = REPOSITORY / "tests" / "fixtures" / "xid"
BOOT_NS = 1_700_000_000 * 1_000_000_000
"""2023-11-14 22:13:20 UTC."""


def _ns(*moment: int, zone: timezone = UTC) -> int:
    return int(datetime(*moment, tzinfo=zone).timestamp()) * 1_000_000_000  # type: ignore[misc,arg-type]


def _one(line: str, *, zone: timezone = UTC) -> XidEvent:
    (event,) = parse_lines(line, BOOT_NS, zone=zone)
    return event


Row = tuple[int, str | None, int | None, str | None]
CASE_ROWS: dict[str, list[Row]] = {
    "d01-xid119-gsp-burst.log": [
        *[(119, "00000000:9b:00.0", 2024380, "nvidia-smi")] * 3,
        (119, "00000000:9b:00.0", 1263500, "cache_mgr_main"),
        (119, "00000000:9b:00.0", 1240590, "gpud"),
    ],
    "d02-nvlink5-subcodes.log": [
        (149, "00000018:01:00.0", None, None),
        (145, "00000018:01:00.0", 876767, "ray::WorkerDict"),
        (149, "00000019:01:00.0", None, None),
        (145, "00000008:01:00.0", 11436, "cache_mgr_main"),
        (145, "00000018:01:00.0", 922932, "acctg"),
        *[(code, "00000000:04:00.0", None, None) for code in (144, 146, 147, 148, 150)],
        (149, "00000018:01:00.0", None, None),
    ],
    "d04-fallen-off-bus-no-xid.log": [
        (79, f"00000000:{bus}:00.0", None, None) for bus in ("18", "29", "18", "05", "01")
    ],
    "d05-old-style.log": [
        (14, "00000000:03:00.0", None, None),
        (46, "00000000:3f:00.0", None, None),
        (999, "00000000:66:00.0", 1234, "test"),
        (32, "00000000:01:00.0", None, None),
        (31, "00000000:01:00.0", None, None),
    ],
    "d08-xid13-no-pid.log": [
        *[(13, "00000000:cb:00.0", None, None)] * 3,
        (13, "00000002:00:00.0", 2519562, "python3"),
        (31, "00000001:00:00.0", None, None),
        (13, "00000000:08:00.0", None, None),
    ],
    "d09-hex-payload.log": [
        (62, "00000000:19:00.0", None, None),
        (62, "00000000:03:00.0", None, None),
        (74, "00000003:00:00.0", None, None),
        (13, "00000000:b5:00.0", None, None),
    ],
    "d10-bdf-forms.log": [
        (48, "00000000:00:1e.0", 1234, "python3"),
        (48, "00000000:00:1e.0", 1234, None),
        (48, "00000000:00:1e.0", None, None),
        (43, "00000000:00:1e.0", 9999, "compute"),
        (48, "00000000:00:1e.0", None, None),
        (31, "00000000:00:1e.0", None, None),
    ],
    "d13-xid109-chia-host.log": [(109, "00000000:0b:00.0", 11263, "Renderer")] * 2,
}


@pytest.mark.parametrize("name", sorted(CASE_ROWS))
def test_every_collected_log_gives_its_events_and_no_more(name: str) -> None:
    path = CASES / name
    if not path.exists():
        pytest.skip("the collected cases are not here")
    events = parse_lines(path.read_text(), BOOT_NS)
    assert [(e.code, e.pci_address, e.pid, e.process_name) for e in events] == CASE_ROWS[name]
    assert [e.truncated for e in events].count(True) == (name[:3] in ("d02", "d08"))
    assert [e.trusted for e in events].count(False) == (name[:3] == "d10")


def test_spellings_of_the_driver_line() -> None:
    events = parse_lines((FIXTURES / "spellings.log").read_text())
    assert [(e.code, e.pci_address, e.pid, e.process_name) for e in events] == [
        (43, "00000000:0a:00.0", 4711, "trainer"),
        (31, "00000000:0a:00.0", None, None),
        (8, "00000007:0a:00.0", None, None),
        (13, "00000000:0a:00.0", None, None),
        (94, "00000000:0a:00.0", 77, "infer"),
        (45, "00000000:0a:00.0", 77, "infer"),
        (62, "00000000:0a:00.0", None, None),
        (149, "00000000:0a:00.0", None, None),
        (74, "00000000:0a:00.0", None, None),
        (79, "00000000:0a:00.0", None, "big"),
    ]
    assert (events[3].gpu_instance, events[3].compute_instance) == ("5", "0")
    assert (events[4].gpu_instance, events[4].compute_instance) == ("2", None)
    assert [e.code for e in events if e.truncated] == [149]
    assert [e.code for e in events if not e.trusted] == [74]
    assert events[6].message == "4b1d0001 00000123 00000000"


def test_a_lost_gpu_without_a_code_is_79_and_counts_once_a_message() -> None:
    events = parse_lines((FIXTURES / "lost-in-three-lines.log").read_text(), BOOT_NS)
    assert [(e.code, e.pci_address) for e in events] == [
        (79, "00000001:41:00.0"),
        (79, "00000000:41:00.0"),
    ]
    assert events[0].at_ns == BOOT_NS + 812_000_001_000


@pytest.mark.parametrize(
    ("prefix", "at_ns", "seconds"),
    [
        ("", None, None),
        ("kernel: ", None, None),
        ("[...] ", None, None),
        ("[    5.500000] ", BOOT_NS + 5_500_000_000, 5.5),
        ("[    5.500000] [ T1234] ", BOOT_NS + 5_500_000_000, 5.5),
        ("kernel: [5.5] ", BOOT_NS + 5_500_000_000, 5.5),
        ("<3>[    5.500000] ", BOOT_NS + 5_500_000_000, 5.5),
        ("kern  :err   : [    5.500000] ", BOOT_NS + 5_500_000_000, 5.5),
        ("[    5.500000] node7 kernel: ", BOOT_NS + 5_500_000_000, 5.5),
        ("[Fri Aug 30 11:43:09 2024] ", _ns(2024, 8, 30, 11, 43, 9), None),
        ("2024-08-30T11:43:09,250000+02:00 ", _ns(2024, 8, 30, 9, 43, 9) + 250_000_000, None),
        (
            "2024-08-30T11:43:09.25+00:00 node7 kernel: [  5.5] ",
            _ns(2024, 8, 30, 11, 43, 9) + 250_000_000,
            5.5,
        ),
        ("2024-08-30T11:43:09+0000 node7 kernel: ", _ns(2024, 8, 30, 11, 43, 9), None),
        ("Nov 15 01:02:03 node7 kernel: [ 5.5] ", _ns(2023, 11, 15, 1, 2, 3), 5.5),
        ("Feb  3 01:02:03 node7 kernel: ", _ns(2024, 2, 3, 1, 2, 3), None),
        ("Nov 10 01:02:03 node7 kernel: ", _ns(2023, 11, 10, 1, 2, 3), None),
    ],
)
def test_prefixes_tell_when(prefix: str, at_ns: int | None, seconds: float | None) -> None:
    event = _one(f"{prefix}NVRM: Xid (PCI:0000:05:00): 48, pid=12, name=x, DBE")
    assert (event.at_ns, event.seconds_since_boot) == (at_ns, seconds)
    assert event.trusted


def test_a_stamp_without_a_zone_is_local_time_of_the_host() -> None:
    zone = timezone(timedelta(hours=-5))
    event = _one("[Fri Aug 30 11:43:09 2024] NVRM: Xid (PCI:0000:05:00): 48", zone=zone)
    assert event.at_ns == _ns(2024, 8, 30, 16, 43, 9)


@pytest.mark.parametrize(
    "prefix",
    [
        "Nov 15 01:02:03 node7 backup[77]: ",
        "Nov 15 01:02:03 node7 backup: kernel: ",
        "backup: kernel: ",
        "[    5.500000] node7 ",
        "<11>[    5.500000] ",
        "user  :err   : [    5.500000] ",
        "[    5.500000] usb 1-1: Product: ",
    ],
)
def test_a_line_that_the_driver_did_not_write_is_not_trusted(prefix: str) -> None:
    assert not _one(f"{prefix}NVRM: Xid (PCI:0000:05:00): 79, gone").trusted


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("0000:05:00", "00000000:05:00.0"),
        ("05:00", "00000000:05:00.0"),
        ("00:1E.0", "00000000:00:1e.0"),
        ("00001580:00:00.1", "00001580:00:00.1"),
        ("0018:01:00", "00000018:01:00.0"),
        ("1:2:3", None),
        ("0000:05:20.0", None),
        ("05:00.8", None),
        ("::", None),
        ("", None),
    ],
)
def test_pci_addresses_are_normalised(text: str, normal: str | None) -> None:
    assert normalise_pci(text) == normal


def _record(text: bytes, *, priority: int = 3, usec: int = 5_500_000, sequence: int = 9) -> bytes:
    return b"%d,%d,%d,-;%s\n SUBSYSTEM=pci\n" % (priority, sequence, usec, text)


def test_ring_records_carry_time_and_facility() -> None:
    line = b"NVRM: Xid (PCI:0000:05:00): 31, pid=7, name=x, MMU Fault"
    kernel, user = parse_kmsg([_record(line), _record(line, priority=11)], BOOT_NS)
    assert kernel.trusted
    assert not user.trusted
    assert kernel.at_ns == BOOT_NS + 5_500_000_000
    assert kernel.seconds_since_boot == 5.5
    assert kernel.message == "MMU Fault"


def test_a_ring_record_can_hold_all_three_lines_of_a_lost_gpu() -> None:
    record = _record(
        b"NVRM: The NVIDIA GPU 0000:18:00.0\\x0aNVRM: (PCI ID: 10de:2901) installed in this "
        b"system has\\x0aNVRM: fallen off the bus and is not responding to commands."
    )
    (event,) = parse_kmsg([record])
    assert (event.code, event.pci_address, event.at_ns) == (79, "00000000:18:00.0", None)


def test_text_inside_another_drivers_record_is_not_the_driver() -> None:
    (event,) = parse_kmsg([_record(b"usb 1-1: NVRM: Xid (PCI:0000:05:00): 79, gone")])
    assert not event.trusted


@dataclass
class _Ring(Host):
    """A host whose ring is given, on a folder of log files."""

    folder: Path
    records: list[bytes] = field(default_factory=list)
    refused: bool = False

    def __post_init__(self) -> None:
        super().__init__(str(self.folder))

    def kernel_ring_records(self, path: str = "/dev/kmsg") -> Iterator[bytes]:
        if self.refused:
            raise Denied(f"{path}: permission denied")
        yield from self.records


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/stat": "cpu 1\nbtime 1700000000\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


OLD = "2023-11-14T22:14:00+00:00 n kernel: [   40.0] NVRM: Xid (PCI:0000:05:00): 13, old\n"
NEW = "2023-11-14T23:14:00+00:00 n kernel: [ 3640.0] NVRM: Xid (PCI:0000:05:00): 31, new\n"


def test_a_ring_that_has_dropped_lines_is_completed_from_the_log_file(tmp_path: Path) -> None:
    _tree(tmp_path, {"var/log/kern.log": OLD + NEW})
    record = _record(b"NVRM: Xid (PCI:0000:05:00): 31, new", usec=3_640_000_000)
    facts = list(read(_Ring(tmp_path, [record]), Seen()))
    assert [f.code for f in facts if isinstance(f, XidEvent)] == [31, 13]
    whole = _record(b"NVRM: Xid (PCI:0000:05:00): 31, new", usec=3_640_000_000, sequence=0)
    assert [f.code for f in read(_Ring(tmp_path, [whole]), Seen()) if isinstance(f, XidEvent)] == [
        31
    ]


def test_without_the_ring_the_log_file_is_read_from_its_tail(tmp_path: Path) -> None:
    padding = "Nov 15 01:02:03 node7 kernel: nothing here\n" * 60_000
    _tree(tmp_path, {"var/log/kern.log": OLD + padding + NEW})
    facts = list(read(Host(str(tmp_path)), Seen()))
    assert [f.code for f in facts if isinstance(f, XidEvent)] == [31]
    assert not [f for f in facts if isinstance(f, Gap)]


def test_only_the_boot_log_is_a_gap_and_no_log_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        list(read(Host(str(_tree(tmp_path, {}))), Seen()))
    _tree(tmp_path, {"var/log/dmesg": "[   40.0] NVRM: Xid (PCI:0000:05:00): 13, old\n"})
    event, gap = read(_Ring(tmp_path, refused=True), Seen())
    assert isinstance(event, XidEvent)
    assert event.at_ns == BOOT_NS + 40_000_000_000
    assert isinstance(gap, Gap)
    assert "permission denied" in gap.reason


def test_a_refused_ring_and_nothing_else_is_denied(tmp_path: Path) -> None:
    with pytest.raises(Denied) as caught:
        list(read(_Ring(_tree(tmp_path, {}), refused=True), Seen()))
    assert caught.value.remedy


class _JournalHost(_Ring):
    """A host with a journal and no other log."""

    output = (
        b"[ 40.0] n kernel: NVRM: Xid (PCI:0000:05:00): 13, x\n"
        b"[ 41.0] n NVRM: Xid (PCI:0000:05:00): 79, forged\n"
    )
    is_local = True

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        assert argv[0] == "journalctl"
        assert deadline_seconds <= 2
        return CommandOutput(0, self.output, b"")


def test_the_journal_is_the_last_resort_and_an_empty_one_is_a_refusal(tmp_path: Path) -> None:
    host = _JournalHost(_tree(tmp_path, {"var/log/journal/x": ""}), refused=True)
    facts = [f for f in read(host, Seen()) if isinstance(f, XidEvent)]
    assert [(f.code, f.trusted) for f in facts] == [(13, True), (79, False)]
    host.output = b""
    with pytest.raises(Denied):
        list(read(host, Seen()))


def test_a_broken_time_zone_file_costs_nothing(tmp_path: Path) -> None:
    _tree(tmp_path, {"var/log/kern.log": NEW, "etc/localtime": "TZif2\0\0not one"})
    assert len(list(read(Host(str(tmp_path)), Seen()))) == 1


LINE_PARTS = st.sampled_from(
    ["NVRM: ", "Xid (PCI:", "0000:05:00", "): ", "79", ", pid='", "12", "', name=", "[", "]",
     "12.5", "<3>", "kernel: ", "\n", "The NVIDIA GPU ", "fallen off the bus and is not responding",
     "Feb 30 25:61:61 ", "2024-13-41T99:99:99 ", "GPU-I:", " ", "GPU has fallen off the bus",
     "99999999999999999999", "\x00", "(", "Fri Aug 30 11:43:09 9999"]
)  # fmt: skip


@given(st.lists(LINE_PARTS | st.text(max_size=8), max_size=30).map("".join))
def test_any_text_gives_events(text: str) -> None:
    for event in parse_lines(text, BOOT_NS):
        assert event.pci_address is not None
        assert normalise_pci(event.pci_address) == event.pci_address


@given(st.lists(st.binary(max_size=60) | LINE_PARTS.map(lambda t: b"3,1,2,-;NVRM: " + t.encode())))
def test_any_bytes_as_ring_records_give_events(records: list[bytes]) -> None:
    assert isinstance(parse_kmsg(records, BOOT_NS), list)
