"""Falco's events put to real processes: joined with what is known, bounded, never made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.cli import main
from gpuwarden.errors import UsageError
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import DeviceNode, Process
from gpuwarden.probes.events import Event, ExitEvent, OpenEvent, OpenReturn, ProcessIdentity, ticks
from gpuwarden.sensors.falco import EVENTS_LIMIT, GPU_RULE
from gpuwarden.sensors.process import details
from gpuwarden.sensors.seen import Seen
from gpuwarden.watch import falco_watch
from gpuwarden.watch.falco_unmatched import LOST_NAMED, LOST_STAYS_NS, Unmatched
from gpuwarden.watch.falco_watch import DEVICES_LIMIT, QUEUE_LIMIT, FalcoWatch
from gpuwarden.watch.listeners import TOKEN_LIMIT_BYTES, read_token
from gpuwarden.watch.opens import OpenBook
from tests.support.opening import opened
from tests.support.receivers import wait_until

SECOND, HOUR = 10**9, 3600 * 10**9
PATH = "/dev/nvidia0"
NODES = (DeviceNode(path=PATH, major=203, minor=0, kind="nvidia-gpu"),)
NODE_NAME = "node-a"


class Waiting:
    """A watch of our own, its book of opens, and a wake that a test can wait for."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.book = OpenBook()
        self.watch = FalcoWatch(
            Host(), "127.0.0.1:0", NODE_NAME, self.woken.set, entries=self.book.entries
        )

    def post(self, *events: dict[str, Any] | bytes) -> int:
        """The status; by the time it is there, what was taken waits for the agent's thread."""
        bodies = [e if isinstance(e, bytes) else json.dumps(e).encode() for e in events]
        body = bodies[0] if len(bodies) == 1 else b"[" + b",".join(bodies) + b"]"
        self.woken.clear()
        status, _ = self.watch.listener.accept(body, text=False)
        if status == 200:
            assert self.woken.wait(20)
        return status

    def events(self) -> list[Event]:
        return self.watch.events(NODES)

    def told(self, *events: dict[str, Any]) -> list[Event]:
        assert self.post(*events) == 200
        return self.events()

    def texts(self) -> list[str]:
        found = self.watch.unmatched.findings(time.time_ns())
        return [one.subject.name + "; " + one.evidence[-1].text for one in found]


@contextmanager
def watching() -> Iterator[Waiting]:
    waiting = Waiting()
    waiting.watch.start()
    try:
        yield waiting
    finally:
        waiting.watch.close()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    with watching() as made:
        yield made


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def event(pid: int | None = None, **more: Any) -> dict[str, Any]:
    fields = {
        "evt.time": more.pop("at_ns", time.time_ns()),
        "evt.type": "openat",
        "fd.name": more.pop("path", PATH),
        "proc.name": more.pop("comm", "sleep"),
        **({} if pid is None else {"proc.pid": pid}),
        **more.pop("fields", {}),
    }
    return {
        "rule": GPU_RULE,
        "priority": "Critical",
        "source": "syscall",
        "hostname": NODE_NAME,
        "output_fields": fields,
        **more,
    }


def process_of(pid: int) -> Process:
    (found,) = [p for p in details.read(Host(), Seen(), [pid]) if isinstance(p, Process)]
    return found


def exact(pid: int) -> ProcessIdentity:
    """As the probe tells it: the start to the nanosecond, which /proc does not have."""
    start_ns = process_of(pid).start_time_ticks * 10_000_000 + 1_234_567
    return ProcessIdentity(pid=pid, start_time_ns=start_ns, comm="sleep")


def note(book: OpenBook, *events: OpenEvent) -> None:
    for one in events:
        list(book.opened(one))


# ---------------------------------------------------------------- whose it was


def test_an_open_is_put_to_its_process(waiting: Waiting, sleeper: subprocess.Popen[bytes]) -> None:
    at_ns = time.time_ns()
    (one,) = waiting.told(event(sleeper.pid, at_ns=at_ns))
    assert isinstance(one, OpenEvent)
    assert (one.source, one.state, one.how) == ("falco", "opened", "open")
    assert (one.major, one.minor, one.path, one.at_ns) == (203, 0, PATH, at_ns)
    assert one.process.pid == sleeper.pid
    assert one.process.start_time_ticks == process_of(sleeper.pid).start_time_ticks
    assert one.process.comm == "sleep"
    assert waiting.texts() == []


def test_a_clock_that_is_far_off_neither_dates_nor_contradicts(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    before = time.time_ns()
    (late,) = waiting.told(event(sleeper.pid, at_ns=before - 3 * HOUR))
    assert isinstance(late, OpenEvent)
    assert before <= late.at_ns <= time.time_ns()
    # Within the hour it is believed: then the process is younger than the open.
    assert waiting.told(event(sleeper.pid, at_ns=before - HOUR // 2)) == []
    assert "began after the event" in waiting.texts()[0]


def test_what_is_gone_or_another_binary_is_not_joined(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert waiting.told(event(ended.pid, comm="ended")) == []
    assert waiting.told(event(sleeper.pid, fields={"proc.exepath": "/bin/other"})) == []
    assert waiting.told(event(comm="unknown")) == []
    gone, other, nobody = waiting.texts()
    assert "had ended" in gone
    assert "Falco saw '/bin/other'" in other
    assert "tells no pid" in nobody


def test_another_machines_events_and_other_files_are_context(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    assert waiting.told(event(sleeper.pid, hostname="node-b")) == []
    assert waiting.told(event(sleeper.pid, path="/dev/null")) == []
    assert (waiting.watch.context, waiting.texts()) == (2, [])


# ---------------------------------------------------------------- what the probe saw


def test_a_node_made_since_the_last_look_is_found_by_its_path(
    sleeper: subprocess.Popen[bytes],
) -> None:
    class Machine(Host):
        """This one, with a node in /dev that nobody had told of."""

        def read_bytes(self, path: str, limit: int = 1 << 20) -> bytes:
            if path == "/proc/devices":
                return b"Character devices:\n  1 nvidia-uvm\n\nBlock devices:\n"
            return super().read_bytes(path, limit)

        def status(self, path: str) -> FileStatus:
            return super().status("/dev/zero" if path == "/dev/nvidia-uvm" else path)

    woken = threading.Event()
    watch = FalcoWatch(Machine(), "127.0.0.1:0", NODE_NAME, woken.set)
    watch.start()
    paths = ("/dev/nvidia-uvm", "/dev/nvidia-other")
    body = json.dumps([event(sleeper.pid, path=path) for path in paths])
    assert watch.listener.accept(body.encode(), text=False)[0] == 200
    assert woken.wait(20)
    found = watch.events(NODES)
    watch.close()
    assert [(one.major, one.minor) for one in found if isinstance(one, OpenEvent)] == [(1, 5)]
    assert watch.context == 1


def test_what_the_probe_told_already_is_not_counted_again(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    note(waiting.book, opened(exact(sleeper.pid), major=203, state="opened"))
    assert waiting.told(event(sleeper.pid)) == []
    assert waiting.watch.seen_already == 1


@pytest.mark.parametrize(
    ("fields", "state"),
    [({}, "opened"), ({"evt.res": "EPERM"}, "denied"), ({"evt.res": "ENXIO"}, "attempted")],
)
def test_falco_says_how_an_attempt_of_the_probe_ended(
    waiting: Waiting, sleeper: subprocess.Popen[bytes], fields: dict[str, Any], state: str
) -> None:
    note(waiting.book, opened(exact(sleeper.pid), major=203))
    (how,) = waiting.told(event(sleeper.pid, fields=fields))
    assert isinstance(how, OpenReturn)
    news = list(waiting.book.returned(how))
    (entry,) = waiting.book.entries().values()
    assert (entry.event.state, entry.count, entry.waits) == (state, 1, False)
    assert bool(news) == (state != "attempted" or bool(fields))


def test_an_open_that_the_probe_did_not_see_is_of_the_same_process(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    known = exact(sleeper.pid)
    note(waiting.book, opened(known, major=203, minor=1))
    (one,) = waiting.told(event(sleeper.pid))
    assert isinstance(one, OpenEvent)
    assert one.process.start_time_ns == known.start_time_ns


def test_falcos_own_entry_is_counted(waiting: Waiting, sleeper: subprocess.Popen[bytes]) -> None:
    for _ in range(2):
        found = waiting.told(event(sleeper.pid))
        note(waiting.book, *(one for one in found if isinstance(one, OpenEvent)))
    (entry,) = waiting.book.entries().values()
    assert entry.count == 2


def test_the_end_of_a_process_is_noticed(
    waiting: Waiting, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(falco_watch, "ENDED_SECONDS", 0.0)
    (one,) = waiting.told(event(sleeper.pid))
    assert waiting.events() == []
    sleeper.kill()
    sleeper.wait()
    (end,) = waiting.events()
    assert isinstance(end, ExitEvent)
    assert isinstance(one, OpenEvent)
    assert (end.pid, end.start_time_ns) == (sleeper.pid, one.process.start_time_ns)
    assert waiting.events() == []


# ---------------------------------------------------------------- whoever can post


def test_a_queue_that_is_full_is_answered_with_503_and_loses_nothing_that_was_taken(
    waiting: Waiting,
) -> None:
    batch = b"[" + b",".join([json.dumps(event(path="/x")).encode()] * EVENTS_LIMIT) + b"]"
    taken = refused = 0
    while not refused:
        status, _ = waiting.watch.listener.accept(batch, text=False)
        refused += status == 503
        taken += EVENTS_LIMIT * (status == 200)
        assert taken <= 4 * QUEUE_LIMIT
    while waiting.watch.context < taken:
        assert waiting.woken.wait(20)
        waiting.woken.clear()
        waiting.events()
    assert waiting.post(event(path="/x")) == 200
    wait_until(lambda: waiting.watch.listener.counts().events == taken + 1)
    assert waiting.watch.listener.counts().refused == EVENTS_LIMIT
    (found,) = waiting.watch.findings(time.time_ns())
    assert "1024 events were refused" in found.evidence[0].text


def test_it_closes_while_its_queue_is_full(waiting: Waiting) -> None:
    batch = b"[" + b",".join([json.dumps(event(path="/x")).encode()] * EVENTS_LIMIT) + b"]"
    while waiting.watch.listener.accept(batch, text=False)[0] == 200:
        pass
    waiting.watch.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "falco-take" not in names
    assert waiting.watch.listener.counts().failed > 0


def test_one_process_has_no_endless_devices(
    waiting: Waiting, sleeper: subprocess.Popen[bytes]
) -> None:
    many = [event(sleeper.pid, path=f"/dev/dri/renderD{128 + n}") for n in range(200)]
    found: list[Event] = []
    assert waiting.post(*many) == 200
    while waiting.watch.unmatched.count + len(found) < len(many):
        found += waiting.events()
    assert len(found) == DEVICES_LIMIT
    assert "more processes, or devices" in waiting.texts()[0]


@given(st.lists(st.tuples(st.text(max_size=200), st.text(max_size=200)), max_size=60))
def test_made_up_opens_are_few_findings_and_none_is_lost(names: list[tuple[str, str]]) -> None:
    lost = Unmatched()
    for name, path in names:
        lost.note(name, path, "why", 5)
    found = lost.findings(6)
    assert len(found) <= LOST_NAMED + 1
    counts = [int(one.evidence[0].text.split()[0]) for one in found]
    assert sum(counts) == lost.count == len(names)
    assert len({one.id for one in found}) == len({one.subject.name for one in found})
    assert lost.findings(5 + LOST_STAYS_NS) == []


def test_a_made_up_flood_does_not_displace_who_was_told_and_makes_room_when_old() -> None:
    lost = Unmatched()
    lost.note("first", PATH, "why", 0)
    for number in range(1000):
        lost.note(f"made up {number}", PATH, "why", 1)
    assert "falco: first /dev/nvidia0" in {one.subject.name for one in lost.findings(2)}
    lost.note("later", PATH, "why", LOST_STAYS_NS + 1)
    assert [one.subject.name for one in lost.findings(LOST_STAYS_NS + 1)] == [
        "falco: later /dev/nvidia0"
    ]


VALUES = st.none() | st.integers() | st.text(max_size=20) | st.booleans() | st.just(os.getpid())


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(
            ["evt.time", "evt.type", "evt.res", "fd.name", "fd.num", "proc.pid", "proc.name",
             "proc.exepath", "container.id"]
        ),
        VALUES | st.sampled_from([PATH, "openat", "EPERM", "a" * 12, -1, 2**63]),
    )
)  # fmt: skip
def test_any_fields_give_opens_of_real_processes_or_a_reason(fields: dict[str, Any]) -> None:
    watch = FalcoWatch(Host(), "127.0.0.1:0", NODE_NAME, lambda: None)
    watch._take(_parsed(event(fields=fields)))
    found = watch.events(NODES)
    assert len(found) + watch.unmatched.count + watch.context == 1
    for one in found:
        assert isinstance(one, OpenEvent)
        assert os.path.exists(f"/proc/{one.process.pid}")
    watch.findings(time.time_ns())


def _parsed(event: dict[str, Any]) -> Any:
    from gpuwarden.sensors.falco import parse_body

    return parse_body(json.dumps(event).encode()).taken


# ---------------------------------------------------------------- the token


@pytest.fixture
def token(tmp_path: Path) -> Callable[..., str]:
    def made(data: bytes = b"secret\n", mode: int = 0o600) -> str:
        path = tmp_path / "token"
        path.write_bytes(data)
        path.chmod(mode)
        return str(path)

    return made


def test_a_token_is_the_files_one_line(token: Callable[..., str], tmp_path: Path) -> None:
    assert read_token(token(b" a token \r\n")) == "a token"
    assert read_token(token(mode=0o640)) == "secret"
    link = tmp_path / "link"
    link.symlink_to(token())
    assert read_token(str(link)) == "secret"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o601])
def test_a_token_that_others_know_is_none(token: Callable[..., str], mode: int) -> None:
    with pytest.raises(UsageError, match="others may"):
        read_token(token(mode=mode))


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"a\nb", b"\xff", b"a\0b", b"x" * (TOKEN_LIMIT_BYTES + 1)]
)
def test_a_token_that_no_header_can_carry_is_refused(
    token: Callable[..., str], data: bytes
) -> None:
    with pytest.raises(UsageError, match="one line"):
        read_token(token(data))


def test_a_token_of_another_user_or_in_no_file_is_refused(
    token: Callable[..., str], tmp_path: Path
) -> None:
    path = token()
    if os.geteuid() == 0:
        os.chown(path, 12345, 0)
        with pytest.raises(UsageError, match="belongs to uid 12345"):
            read_token(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a file"):
        read_token(str(tmp_path / "pipe"))
    for missing in (str(tmp_path / "none"), "a\0b", str(tmp_path)):
        with pytest.raises(UsageError):
            read_token(missing)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--falco-token-file", "/x"], "goes with --falco-listen"),
        (["--falco-listen", "0.0.0.0:0", "--falco-allow-remote"], "goes with --falco-token-file"),
        (["--pin"], "goes with --enforce"),
    ],
)
def test_flags_that_need_another(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *flags]) == 64
    assert said in capsys.readouterr().err


def test_an_address_that_is_taken_or_reached_by_others_is_a_usage_error(tmp_path: Path) -> None:
    with watching() as there:
        for flag, address, said in (
            ("--falco-listen", there.watch.address, "choose another port"),
            ("--falco-listen", "0.0.0.0:0", "others can reach"),
            ("--metrics", there.watch.address, "in use"),
        ):
            done = subprocess.run(
                [
                    sys.executable, "-m", "gpuwarden", "watch", "--state", str(tmp_path / "s"),
                    "--way", "poll", "--for", "0.1", flag, address,
                ],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )  # fmt: skip
            assert done.returncode == 64, done.stderr
            assert said in done.stderr and "Traceback" not in done.stderr


def test_the_start_of_a_process_is_known_to_the_tick(sleeper: subprocess.Popen[bytes]) -> None:
    assert ticks(exact(sleeper.pid).start_time_ns) == process_of(sleeper.pid).start_time_ticks
