"""Each sink says what its receiver takes; the dispatcher brings everything, whatever they do."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import UsageError
from gpuwarden.finding import Evidence, Subject
from gpuwarden.life import FindingLife, Transition, decode, encode
from gpuwarden.model import Gap
from gpuwarden.sinks import alertmanager, falco, syslog
from gpuwarden.sinks.dispatcher import Backoff, Dispatcher, SinkHealth
from gpuwarden.sinks.fitting import fitting
from gpuwarden.sinks.http_post import parse_url
from gpuwarden.sinks.lines import FileSink, StdoutSink
from gpuwarden.sinks.own_trouble import OWN_RULES, OwnTrouble
from gpuwarden.sinks.sink import DELIVERED, Outcome, Sink
from gpuwarden.sinks.specs import parse_sink, parse_sinks
from gpuwarden.sinks.syslog import SyslogSink
from gpuwarden.sinks.webhook import WebhookSink
from gpuwarden.store import LedgerLimits, Store
from tests.support.receivers import Receiver, wait_until

SECOND = 10**9
AT = 1_700_000_000 * SECOND + 123_456_789
QUICK = Backoff(first_seconds=0.005, most_seconds=0.02)


def transition(number: int = 1, **fields: Any) -> Transition:
    values: dict[str, Any] = {
        "id": f"{number:016x}",
        "sequence": number,
        "rule": "rogue_container",
        "severity": "critical",
        "title": "A container that nobody gave a GPU uses one",
        "explanation": "An explanation.",
        "subject": Subject(kind="process", name="xx", pid=77, start_time_ticks=5, gpu="GPU 0"),
        "verdict": "rogue-container",
        "owner": "ada",
        "evidence": (Evidence(text="opened /dev/nvidia0", source="probe"),),
        "advice": ("look at it",),
        "stream": "aa" * 8,
        "node": "gpu-01",
        "at_ns": AT,
        "first_seen_ns": AT - SECOND,
        "last_seen_ns": AT,
    }
    return Transition(**(values | fields))


HUGE = transition(
    title="t" * 9000,
    explanation="\u20ac" * 9000,
    owner="o" * 9000,
    node="n" * 9000,
    subject=Subject(
        kind="process", name="\n" * 9000, gpu="g" * 9000, gpu_ids=("GPU-" + "u" * 90,) * 400
    ),
    evidence=tuple(Evidence(text="\x01" * 3000, source="s" * 3000) for _ in range(300)),
    advice=("a" * 5000,) * 50,
)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as up:
        yield up


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(str(tmp_path / "memory")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        ("stdout", "stdout"),
        ("syslog:", "syslog"),
        ("syslog", "syslog"),
        ("file:/var/log/x.jsonl", "file:/var/log/x.jsonl"),
        ("webhook:https://alerts.example.com/hook", "webhook:"),
        ("alertmanager:http://192.0.2.1:9093", "alertmanager:"),
        ("falco:http://[2001:db8::1]:2801/", "falco:"),
    ],
)
def test_a_specification_names_a_sink(spec: str, key: str) -> None:
    assert parse_sink(spec).key.startswith(key)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' is no sink"),
        ("mail:me", "'mail' is no sink; there are: stdout, file:PATH"),
        ("stdout:x", "takes nothing"),
        ("syslog:x", "takes nothing"),
        ("file:", "needs a path"),
        ("file:/var/log/", "needs a path"),
        ("webhook:", "needs a URL"),
        ("webhook:ftp://x.example.com", "http:// or https://"),
        ("webhook:http://", "no host"),
        ("webhook:http://x.example.com:99999/", "not a URL"),
        ("webhook:http://a:b@x.example.com/", "user and password"),
        ("webhook:http://x.example.com/a b", "no blanks"),
        ("webhook:http://x.example.com/\r\nX: y", "no blanks"),
        ("webhook:http://x.example.com/#f", "fragment"),
        ("alertmanager:http://x.example.com/?a=b", "query"),
    ],
)
def test_a_wrong_specification_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sink(spec)
    assert message in str(caught.value)


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_url_is_an_endpoint_or_a_usage_error(text: str) -> None:
    for candidate in (text, f"http://{text}", f"https://x.example.com:{text}"):
        try:
            endpoint = parse_url(candidate, "--sink webhook")
        except UsageError:
            continue
        assert endpoint.host
        assert endpoint.target.startswith("/") or "?" in endpoint.target


def test_a_sink_named_twice_is_refused_and_a_secret_is_not_shown() -> None:
    specs = ["webhook:https://x.example.com/secret-token", "webhook:https://x.example.com/other"]
    sinks = parse_sinks(specs)
    assert len({sink.key for sink in sinks}) == 2
    assert "secret" not in "".join(sink.name + sink.key for sink in sinks)
    with pytest.raises(UsageError, match="named twice") as caught:
        parse_sinks([specs[0], specs[0]])
    assert "secret" not in str(caught.value)


def test_a_webhook_gets_the_finding_with_a_key_that_tells_repetitions(receiver: Receiver) -> None:
    sink = parse_sink(f"webhook:{receiver.url}/hook?x=1")
    assert sink.deliver(encode(transition(5))) == DELIVERED
    (request,) = receiver.accepted
    assert request.path == "/hook?x=1"
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Idempotency-Key"] == f"{'aa' * 8}-5"
    assert decode(request.body) == transition(5)


@pytest.mark.parametrize(
    ("behaviour", "kind", "reason"),
    [
        (204, "delivered", ""),
        (500, "retry", "it answered 500: {}"),
        (404, "retry", "it answered 404"),
        (429, "retry", "it answered 429"),
        (304, "retry", "it answered 304"),
        (400, "refused", "it answered 400"),
        (413, "refused", "it answered 413"),
        ("redirect", "retry", "it answered 307"),
        ("reset", "retry", ""),
        ("hang", "retry", "timed out"),
        ("drip", "retry", "no answer within 0.5 s"),
    ],
)
def test_only_2xx_counts_and_redirects_are_not_followed(
    receiver: Receiver, behaviour: int | str, kind: str, reason: str
) -> None:
    receiver.behaviour = behaviour
    seconds = 0.2 if behaviour == "hang" else 5.0
    deadline = 0.5 if behaviour == "drip" else 20.0
    sink = WebhookSink(
        parse_url(receiver.url, ""), timeout_seconds=seconds, deadline_seconds=deadline
    )
    outcome = sink.deliver(encode(transition()))
    assert outcome.kind == kind
    assert reason in outcome.reason
    assert len(receiver.requests) == 1
    assert receiver.requests[0].path == "/"


def test_nobody_there_and_an_endless_answer_are_bounded(receiver: Receiver) -> None:
    receiver.answer = b"x" * (1 << 20)
    assert parse_sink(f"webhook:{receiver.url}").deliver(encode(transition())) == DELIVERED
    receiver.down()
    outcome = parse_sink(f"webhook:{receiver.url}").deliver(encode(transition()))
    assert outcome == Outcome("retry", outcome.reason)
    assert "refused" in outcome.reason


def test_alertmanager_gets_an_alert_that_lives_as_the_finding_does(receiver: Receiver) -> None:
    sink = parse_sink(f"alertmanager:{receiver.url}/prefix/")
    assert sink.repeat_seconds == 60
    for status, severity in (
        ("opened", "warning"),
        ("updated", "critical"),
        ("resolved", "critical"),
    ):
        finding = transition(1, status=status, severity=severity)
        assert sink.deliver(encode(finding)) == DELIVERED
    assert {request.path for request in receiver.accepted} == {"/prefix/api/v2/alerts"}
    opened, updated, resolved = (request.json() for request in receiver.accepted)

    def over(alert: Any) -> bool:
        lasts = datetime.fromisoformat(alert["endsAt"]) - datetime.fromisoformat(alert["startsAt"])
        assert lasts >= timedelta(0)
        return datetime.fromisoformat(alert["endsAt"]) <= datetime.now().astimezone()

    (first,) = opened
    assert first["labels"] == {
        "alertname": "rogue_container",
        "severity": "warning",
        "instance": "gpu-01",
        "finding_id": f"{1:016x}",
    }
    assert first["annotations"]["summary"].startswith("A container")
    assert not over(first)
    # Another severity is another alert to Alertmanager: the first one is ended with it.
    assert [(a["labels"]["severity"], over(a)) for a in updated] == [
        ("warning", True),
        ("critical", False),
    ]
    assert [(a["labels"]["severity"], over(a)) for a in resolved] == [("critical", True)]
    assert {a["startsAt"] for a in [first, *updated, *resolved]} == {first["startsAt"]}


PRIORITIES = {"emergency alert critical error warning notice informational info debug"}


def check_falco(body: bytes) -> Any:
    """What falcosidekick checks of its input, and what breaks its outputs."""
    assert len(body) <= 4096
    event = json.loads(body)
    assert event["priority"].lower() in " ".join(PRIORITIES).split()
    assert event["rule"]
    assert event["time"].endswith("Z")
    datetime.fromisoformat(event["time"][:26] + "+00:00")
    fields = event["output_fields"]
    assert fields
    assert isinstance(fields.pop("evt.time"), int)
    assert all(isinstance(value, str) and value for value in fields.values())
    assert not [(a, b) for a in fields for b in fields if b.startswith(a + ".")]
    assert all(isinstance(tag, str) for tag in event["tags"])
    return event


def test_falco_events_keep_to_what_falcosidekick_takes(receiver: Receiver) -> None:
    sink = parse_sink(f"falco:{receiver.url}")
    plain = transition(verdict=None, owner=None, evidence=(), subject=Subject(kind="node"))
    resolved = transition(status="resolved")
    for finding in (transition(), resolved, plain, HUGE):
        assert sink.deliver(encode(finding)) == DELIVERED
    first, over, _, _ = (check_falco(request.body) for request in receiver.accepted)
    assert receiver.accepted[0].path == "/"
    assert first["time"] == "2023-11-14T22:13:20.123456789Z"
    assert (first["priority"], over["priority"]) == ("Critical", "Notice")
    assert first["output"].startswith("2023-11-14T22:13:20.123456789Z: Critical A container")
    assert first["output_fields"]["proc.pid"] == "77"
    assert "T1496" in first["tags"]


def test_bodies_are_cut_to_fit_and_keep_who_they_are_about() -> None:
    for limit in (1 << 20, 64 << 10, 8192, 4096):
        body = fitting(HUGE, encode, limit)
        assert len(body) <= limit
        short = decode(body)
        assert (short.id, short.sequence, short.rule) == (HUGE.id, HUGE.sequence, HUGE.rule)
    assert fitting(transition(), encode, 4096) == encode(transition())


@given(
    st.builds(
        transition,
        title=st.text(max_size=600),
        explanation=st.text(max_size=600),
        owner=st.none() | st.text(max_size=600),
        node=st.text(max_size=300),
        verdict=st.sampled_from(["cryptominer", None]),
        severity=st.sampled_from(["info", "warning", "error", "critical"]),
        status=st.sampled_from(["opened", "updated", "resolved"]),
        at_ns=st.integers(0, 1 << 62),
        evidence=st.lists(
            st.builds(Evidence, text=st.text(max_size=900), source=st.text(max_size=50)),
            max_size=12,
        ).map(tuple),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_finding_can_be_told_everywhere(finding: Transition) -> None:
    check_falco(fitting(finding, lambda f: msgspec.json.encode(falco.event(f)), 4096))
    message = fitting(finding, syslog.rfc5424, 8192)
    assert len(message) <= 8192
    assert b"\n" not in message
    header = message.split(b" ", 7)
    assert len(header) == 8
    assert decode(header[7]).sequence == finding.sequence
    assert read_journal(fitting(finding, syslog.journal, 48 << 10))["MESSAGE"].isprintable()
    now = datetime.fromtimestamp(1_800_000_000).astimezone()
    msgspec.json.encode(alertmanager.alert(finding, now))


def test_stdout_writes_one_line_a_finding_and_a_closed_pipe_is_tried_again() -> None:
    reading, writing = os.pipe()
    sink = StdoutSink(writing)
    assert sink.deliver(encode(transition(1))) == DELIVERED
    assert sink.deliver(encode(transition(2))) == DELIVERED
    lines = os.read(reading, 100_000).splitlines()
    assert [decode(line).sequence for line in lines] == [1, 2]
    os.close(reading)
    assert sink.deliver(encode(transition(3))).kind == "retry"
    os.close(writing)


def sequences(path: Path) -> list[int]:
    return [decode(line).sequence for line in path.read_bytes().splitlines()]


def test_a_file_is_rotated_by_size_and_so_many_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    one = len(encode(transition(1000))) + 1
    sink = FileSink(str(path), rotate_bytes=3 * one, kept_files=2)
    for number in range(1000, 1011):
        assert sink.deliver(encode(transition(number))) == DELIVERED
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "findings.jsonl",
        "findings.jsonl.1",
        "findings.jsonl.2",
    ]
    assert sequences(path) == [1009, 1010]
    assert sequences(tmp_path / "findings.jsonl.1") == [1006, 1007, 1008]
    assert sequences(tmp_path / "findings.jsonl.2") == [1003, 1004, 1005]
    assert path.stat().st_mode & 0o777 == 0o600
    sink.close()


def test_a_file_that_others_rotate_or_a_crash_cut_goes_on_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    sink = FileSink(str(path))
    sink.deliver(encode(transition(1)))
    path.rename(tmp_path / "moved")
    sink.deliver(encode(transition(2)))
    assert (sequences(tmp_path / "moved"), sequences(path)) == ([1], [2])
    sink.close()
    with path.open("ab") as file:
        file.write(encode(transition(3))[:50])
    again = FileSink(str(path))
    again.deliver(encode(transition(3)))
    again.close()
    lines = path.read_bytes().split(b"\n")
    assert decode(lines[2]).sequence == 3
    assert lines[3:] == [b""]


def test_a_file_sink_follows_no_link_and_takes_no_fifo(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "no/such/directory"):
        assert FileSink(str(tmp_path / name)).deliver(encode(transition())).kind == "retry"
    assert not (tmp_path / "target").exists()


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "findings.jsonl"
    sink = FileSink(str(path))
    sink.deliver(encode(transition(1)))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]) and full())
    outcome = sink.deliver(encode(transition(2)))
    monkeypatch.undo()
    assert outcome == Outcome("retry", "No space left on device")
    assert sink.deliver(encode(transition(2))) == DELIVERED
    assert sequences(path) == [1, 2]
    sink.close()


def full() -> int:
    raise OSError(28, "No space left on device")


def read_journal(datagram: bytes) -> dict[str, str]:
    """journald's side of its native protocol."""
    fields: dict[str, str] = {}
    while datagram:
        name, _, datagram = datagram.partition(b"\n")
        assert b"=" not in name
        (size,) = struct.unpack("<Q", datagram[:8])
        fields[name.decode()] = datagram[8 : 8 + size].decode()
        assert datagram[8 + size : 9 + size] == b"\n"
        datagram = datagram[9 + size :]
    return fields


@pytest.fixture
def log_sockets(tmp_path: Path) -> Iterator[dict[str, socket.socket]]:
    sockets = {}
    for name in ("journal", "log"):
        sockets[name] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sockets[name].settimeout(5)
        sockets[name].bind(str(tmp_path / name))
    yield sockets
    for sock in sockets.values():
        sock.close()


def test_the_journal_gets_fields_that_no_value_can_forge(
    tmp_path: Path, log_sockets: dict[str, socket.socket]
) -> None:
    sink = SyslogSink(str(tmp_path / "journal"), str(tmp_path / "log"))
    assert sink.deliver(encode(transition(title="a\nPRIORITY=7\n\x1b[2J"))) == DELIVERED
    fields = read_journal(log_sockets["journal"].recv(1 << 20))
    assert fields["PRIORITY"] == "2"
    assert fields["MESSAGE"] == (
        "opened: a\\u000aPRIORITY=7\\u000a\\u001b[2J, GPU 0, xx pid 77, rogue-container "
        f"[rogue_container {fields['GPUWARDEN_ID']}]"
    )
    assert fields["GPUWARDEN_RULE"] == "rogue_container"
    assert decode(fields["GPUWARDEN_FINDING"].encode()).sequence == 1
    assert sink.deliver(encode(HUGE)) == DELIVERED


def test_without_a_journal_it_is_rfc_5424_to_dev_log(
    tmp_path: Path, log_sockets: dict[str, socket.socket]
) -> None:
    sink = SyslogSink(str(tmp_path / "none"), str(tmp_path / "log"))
    assert sink.deliver(encode(transition(node="gpu 01\n", status="resolved"))) == DELIVERED
    message = log_sockets["log"].recv(1 << 20).decode()
    head, _, body = message.partition("{")
    assert head == (
        f"<29>1 2023-11-14T22:13:20.123456Z gpu01 gpuwarden {os.getpid()} rogue_container - "
    )
    assert json.loads("{" + body)["status"] == "resolved"
    log_sockets["log"].close()
    assert sink.deliver(encode(transition())).kind == "retry"


class Scripted:
    """A sink that does as told."""

    repeat_seconds: float | None = None

    def __init__(self, name: str = "scripted") -> None:
        self.key = self.name = name
        self.outcome: Outcome | Exception = DELIVERED
        self.refuses: set[int] = set()
        self.got: list[Transition] = []
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def deliver(self, finding_json: bytes) -> Outcome:
        if not self.goes_on.is_set():
            self.hangs.set()
            self.goes_on.wait(30)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        finding = decode(finding_json)
        if finding.sequence in self.refuses:
            return Outcome("refused", "not this one")
        if self.outcome.kind == "delivered":
            self.got.append(finding)
        return self.outcome

    def close(self) -> None:
        pass

    @property
    def sequences(self) -> list[int]:
        return [finding.sequence for finding in self.got]


def add(store: Store, life: FindingLife, count: int) -> None:
    """So many new findings, each opened in a round of its own."""
    start = store.findings.last_sequence
    present = [
        msgspec.structs.replace(transition(), id=f"{n:016x}")
        for n in range(start + 1, start + count + 1)
    ]
    life.observe([*life.open.values(), *present], AT + start, frozenset({"rogue_container"}))


@pytest.fixture
def dispatchers() -> Iterator[list[Dispatcher]]:
    started: list[Dispatcher] = []
    yield started
    for dispatcher in started:
        dispatcher.stop(5)


def start(
    dispatchers: list[Dispatcher], store: Store, sinks: list[Sink], **more: Any
) -> Dispatcher:
    dispatcher = Dispatcher(store.findings, sinks, backoff=QUICK, **more)
    dispatchers.append(dispatcher)
    dispatcher.start()
    return dispatcher


def test_everything_comes_in_order_and_the_spool_is_empty_then(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    life, sink = FindingLife(store), Scripted()
    dispatcher = start(dispatchers, store, [sink])
    for _ in range(10):
        add(store, life, 7)
        dispatcher.wake()
    assert dispatcher.drain(20)
    assert sink.sequences == list(range(1, 71))
    assert store.findings._connection.execute("SELECT count(*) FROM outbox").fetchone() == (0,)
    (health,) = dispatcher.health()
    assert (health.delivered, health.waiting, health.dropped, health.error) == (70, 0, 0, "")


def test_a_receiver_that_is_down_slow_wrong_or_resets_gets_everything_afterwards(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    receiver = Receiver()
    life = FindingLife(store)
    sink = WebhookSink(parse_url(receiver.url, ""), timeout_seconds=0.1)
    dispatcher = start(dispatchers, store, [sink])
    add(store, life, 3)
    dispatcher.wake()
    wait_until(lambda: dispatcher.health()[0].failures >= 2)
    assert dispatcher.health()[0].failing_since_ns is not None
    with receiver:
        for behaviour in (500, "reset", "hang", "redirect"):
            receiver.behaviour = behaviour
            seen = len(receiver.requests)
            wait_until(lambda seen=seen: len(receiver.requests) > seen)  # type: ignore[misc]
            add(store, life, 3)
        receiver.behaviour = 200
        assert dispatcher.drain(20)
        got = [decode(request.body).sequence for request in receiver.accepted]
        assert sorted(set(got)) == list(range(1, 16))
        assert dispatcher.health()[0].failing_since_ns is None
        assert dispatcher.stop(5)


def test_one_that_hangs_stops_no_other_and_not_the_end(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    life = FindingLife(store)
    stuck, broken, fine = Scripted("stuck"), Scripted("broken"), Scripted("fine")
    stuck.goes_on.clear()
    broken.outcome = RuntimeError("a defect")
    dispatcher = start(dispatchers, store, [stuck, broken, fine])
    add(store, life, 5)
    dispatcher.wake()
    assert stuck.hangs.wait(10)
    wait_until(lambda: fine.sequences == [1, 2, 3, 4, 5])
    wait_until(lambda: dispatcher.health()[1].dropped == 5)
    assert "RuntimeError: a defect" in dispatcher.health()[1].error
    assert not dispatcher.stop(0.05)
    stuck.goes_on.set()


def test_what_a_receiver_refuses_is_given_up_and_counted_and_the_rest_comes(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    life, sink = FindingLife(store), Scripted()
    sink.refuses = {2, 4}
    dispatcher = start(dispatchers, store, [sink])
    add(store, life, 5)
    assert dispatcher.drain(20)
    assert sink.sequences == [1, 3, 5]
    assert dispatcher.health()[0].dropped == 2


def test_after_a_restart_each_sink_goes_on_where_it_was(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    life, fast, slow = FindingLife(store), Scripted("fast"), Scripted("slow")
    slow.outcome = Outcome("retry", "down")
    first = start(dispatchers, store, [fast, slow])
    add(store, life, 4)
    first.wake()
    wait_until(lambda: len(fast.got) == 4)
    wait_until(lambda: first.health()[0].waiting == 0)
    assert first.stop(5)
    slow.outcome = DELIVERED
    with_new = [fast, slow, Scripted("new")]
    second = start(dispatchers, store, list(with_new))
    assert second.drain(20)
    assert [sink.sequences for sink in with_new] == [[1, 2, 3, 4]] * 3


def test_drops_are_counted_and_told(tmp_path: Path, dispatchers: list[Dispatcher]) -> None:
    with Store(str(tmp_path / "m"), ledger_limits=LedgerLimits(spool_rows=10)) as store:
        life, down, fine = FindingLife(store), Scripted("down"), Scripted("fine")
        down.outcome = Outcome("retry", "connection refused")
        dispatcher = start(dispatchers, store, [down, fine])
        own = OwnTrouble()
        assert own.findings(dispatcher.health(), store.troubles, AT) == []
        for _ in range(30):
            add(store, life, 1)
            dispatcher.wake()
            wait_until(lambda: dispatcher.health()[1].waiting == 0)
        health = dispatcher.health()
        assert (health[0].dropped, health[0].waiting) == (20, 10)
        assert health[1].dropped == 0
        (told,) = own.findings(health, store.troubles, AT)
        assert (told.rule, told.subject.name) == ("alarms_dropped", "down")
        assert told.rule in OWN_RULES
        assert "20 dropped" in told.evidence[0].text
        assert own.findings(health, [], AT + 3601 * SECOND) != [told]
        down.outcome = DELIVERED
        assert dispatcher.drain(20)
        assert down.sequences == list(range(21, 31))
        assert dispatcher.stop(5)


def test_a_sink_that_is_silent_and_a_memory_that_is_not_kept_are_findings() -> None:
    own = OwnTrouble()
    silent = SinkHealth(name="webhook", failures=3, failing_since_ns=AT, error="refused")
    assert own.findings([silent], [], AT + SECOND) == []
    gap = Gap(sensor="store", what="/f.sqlite", reason="the disk is full", remedy="free space")
    first, second = own.findings([silent], [gap], AT + 61 * SECOND)
    assert (first.rule, second.rule) == ("sink_not_answering", "memory_not_kept")
    assert second.evidence[0].text == "the disk is full (free space)"
    assert first.id == own.findings([silent], [], AT + 99 * SECOND)[0].id


def test_open_findings_are_repeated_to_who_wants_them(
    store: Store, dispatchers: list[Dispatcher]
) -> None:
    life, once, repeated = FindingLife(store), Scripted("once"), Scripted("repeated")
    repeated.repeat_seconds = 0.01
    dispatcher = start(dispatchers, store, [once, repeated], current=life.current)
    add(store, life, 1)

    def heard_often() -> bool:
        dispatcher.wake()
        return len(repeated.got) >= 4

    wait_until(heard_often)
    assert {finding.status for finding in repeated.got} == {"opened"}
    assert dispatcher.health()[1].repeated >= 3
    assert once.sequences == [1]


def test_waits_grow_are_bounded_and_differ() -> None:
    backoff = Backoff(first_seconds=1, most_seconds=8)
    waits = {failures: [backoff.seconds(failures) for _ in range(50)] for failures in range(1, 40)}
    for failures, seconds in waits.items():
        most = min(2.0 ** (failures - 1), 8)
        assert all(most / 2 <= wait <= most for wait in seconds)
        assert len(set(seconds)) > 10
