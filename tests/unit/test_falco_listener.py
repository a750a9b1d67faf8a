"""What Falco posts arrives, over real connections; what does not is answered for and counted."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.falco_http import HEAD_LIMIT_BYTES, Limits
from gpuwarden.falco_listener import FalcoListener, parse_address
from gpuwarden.falco_losses import (
    FALCO_EVENTS_DROPPED,
    LOSSES_STAY_NS,
    OWN_RULES,
    FalcoLosses,
    ListenerCounts,
    drop_findings,
)
from gpuwarden.sensors.falco import BODY_LIMIT_BYTES, FalcoDrop, FalcoEvent
from tests.support.receivers import wait_until

SECOND = 10**9
QUICK = Limits(request_seconds=0.3, idle_seconds=0.3)


class Daemon:
    """Takes batches; stands still between ``pause`` and ``go_on``."""

    def __init__(self) -> None:
        self.taken: list[FalcoEvent | FalcoDrop] = []
        self.entered = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self.trouble: Exception | None = None

    def take(self, batch: list[FalcoEvent | FalcoDrop]) -> None:
        self.entered.set()
        assert self._free.wait(30)
        if self.trouble is not None:
            raise self.trouble
        self.taken += batch

    def pause(self) -> None:
        self._free.clear()

    def go_on(self) -> None:
        self._free.set()


@contextmanager
def listening(daemon: Daemon | None = None, **options: Any) -> Iterator[FalcoListener]:
    with FalcoListener("127.0.0.1:0", (daemon or Daemon()).take, **options) as listener:
        yield listener


def event(rule: str = "A rule", **fields: Any) -> bytes:
    return json.dumps(
        {"rule": rule, "priority": "Notice", "hostname": "node-a", "output_fields": fields}
    ).encode()


def post(
    listener: FalcoListener,
    body: bytes,
    *,
    path: str = "/",
    method: str = "POST",
    **headers: str,
) -> tuple[int, str]:
    named = {"Content-Type": "application/json"}
    named |= {name.replace("_", "-"): text for name, text in headers.items()}
    request = urllib.request.Request(
        f"http://127.0.0.1:{listener.port}{path}", body, named, method=method
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def raw(listener: FalcoListener, *parts: bytes) -> bytes:
    """What is answered until the listener hangs up."""
    with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


def head(length: int | str, *more: str) -> bytes:
    lines = ["POST / HTTP/1.1", "Host: x", "Content-Type: application/json", *more]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


# ------------------------------------------------------------------ what arrives


def test_events_arrive_in_their_order() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        assert post(listener, event("one")) == (200, "")
        assert post(listener, b"[" + event("two") + b"," + event("three") + b"]")[0] == 200
        assert post(listener, event("four") + b"\n" + event("five"))[0] == 200
        line = b"01:02:03.000000001: Notice six (pid=7)\n"
        assert post(listener, line, Content_Type="text/plain; charset=utf-8")[0] == 200
        wait_until(lambda: len(daemon.taken) == 6)
    events = [one for one in daemon.taken if isinstance(one, FalcoEvent)]
    assert [one.rule for one in events] == ["one", "two", "three", "four", "five", None]
    assert listener.counts() == ListenerCounts(requests=4, events=6)


def test_drops_are_counted_apart() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        assert post(listener, event("Falco internal: syscall event drop", n_drops="3"))[0] == 200
        wait_until(lambda: listener.counts().drops == 1)
    assert daemon.taken == [FalcoDrop(drops=3, hostname="node-a")]
    assert listener.counts().events == 0


def test_one_connection_carries_many_events() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        connection = http.client.HTTPConnection("127.0.0.1", listener.port, timeout=20)
        for number in range(20):
            connection.request(
                "POST", "/", event(str(number)), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            assert not answer.will_close
        connection.close()
        wait_until(lambda: len(daemon.taken) == 20)


def test_another_path_and_ipv6() -> None:
    daemon = Daemon()
    with FalcoListener("[::1]:0", daemon.take, "/falco") as listener:
        connection = http.client.HTTPConnection("::1", listener.port, timeout=20)
        connection.request("POST", "/falco", event(), {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()
        wait_until(lambda: len(daemon.taken) == 1)


def test_what_waits_is_handed_over_at_the_end() -> None:
    daemon = Daemon()
    daemon.pause()
    listener = FalcoListener("127.0.0.1:0", daemon.take).start()
    for number in range(5):
        assert post(listener, event(str(number)))[0] == 200
    daemon.go_on()
    listener.close()
    assert len(daemon.taken) == 5
    assert listener.counts().events == 5


# ------------------------------------------------------------------ what does not


def test_what_is_no_event_gets_a_line() -> None:
    with listening() as listener:
        for body in (b"", b"{", b"{}", b"[]", b'{"rule": "\x00"}', b"\xff\xfe"):
            status, line = post(listener, body)
            assert status == 400
            assert line.endswith("\n")
            assert line.count("\n") == 1
            assert len(line) > 10
        assert listener.counts().malformed == 6
        assert listener.counts().last_trouble


def test_a_good_event_beside_a_bad_one_is_taken() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        status, line = post(listener, b"[" + event() + b",{}]")
        assert (status, line) == (200, "1 taken; event 2: a Falco event: it names no rule\n")
        wait_until(lambda: len(daemon.taken) == 1)
        assert listener.counts().malformed == 1


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (404, {"path": "/metrics"}),
        (405, {"method": "PUT"}),
        (405, {"method": "GET"}),
        (405, {"method": "OPTIONS"}),
        (405, {"method": "FROB"}),
        (415, {"Content_Type": "application/x-www-form-urlencoded"}),
        (415, {"Content_Encoding": "gzip"}),
        (403, {"Origin": "http://example.org"}),
        (411, {"Transfer_Encoding": "chunked"}),
    ],
)
def test_requests_that_are_none(status: int, request_: dict[str, str]) -> None:
    with listening() as listener:
        answered, line = post(listener, event(), **request_)
        assert answered == status
        assert line
        assert post(listener, event())[0] == 200
        assert listener.counts().rejected == 1


def test_a_method_that_is_not_allowed_says_which_is() -> None:
    with listening() as listener:
        answer = raw(listener, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert b"\r\nAllow: POST\r\n" in answer
        assert b"Traceback" not in answer


def test_too_large_a_body_is_refused_whether_it_comes_or_not() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        limit = BODY_LIMIT_BYTES
        assert post(listener, b" " * (limit + 1))[0] == 413
        assert raw(listener, head(10**12)).startswith(b"HTTP/1.1 413 ")
        # Asked for leave first, as curl does: no byte of the body is wanted.
        answer = raw(listener, head(limit + 1, "Expect: 100-continue"))
        assert answer.startswith(b"HTTP/1.1 413 ")
        whole = event(**{"proc.cmdline": "x" * 1000})
        assert post(listener, whole + b" " * (limit - len(whole)))[0] == 200
        wait_until(lambda: len(daemon.taken) == 1)
        assert listener.counts().rejected == 3


def test_leave_is_given_for_what_will_be_taken() -> None:
    daemon = Daemon()
    with listening(daemon) as listener:
        body = event()
        with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as connection:
            connection.sendall(head(len(body), "Expect: 100-continue"))
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
            connection.sendall(body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: len(daemon.taken) == 1)


@pytest.mark.parametrize("length", ["-1", "1e3", "5, 5", "٣", "0x10", "+5"])
def test_a_length_that_is_none(length: str) -> None:
    with listening() as listener:
        request = head("@").replace(b"@", length.encode())
        answer = raw(listener, request)
        assert answer.startswith(b"HTTP/1.1 400 ")


def test_two_lengths_are_none() -> None:
    with listening() as listener:
        assert raw(listener, head(5, "Content-Length: 6")).startswith(b"HTTP/1.1 400 ")


def test_too_long_a_head_is_refused() -> None:
    with listening() as listener:
        filler = b"X-Filler: " + b"a" * HEAD_LIMIT_BYTES + b"\r\n"
        first = raw(listener, b"POST / HTTP/1.1\r\n" + filler)
        assert first.startswith(b"HTTP/1.1 431 ")
        assert raw(listener, b"POST /" + b"a" * 2 * HEAD_LIMIT_BYTES).startswith(b"HTTP/1.1 431 ")
        assert listener.counts().rejected == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\r\n", b"POST / HTTP/1.1\r\n"])))
def test_any_bytes_on_the_wire_leave_it_listening(parts: list[bytes]) -> None:
    with SHARED() as listener:
        with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as connection:
            connection.sendall(b"".join(parts))
            connection.shutdown(socket.SHUT_WR)
            try:
                while connection.recv(65536):
                    pass
            except ConnectionError:
                pass
        assert post(listener, event())[0] == 200


_kept: list[FalcoListener] = []


@pytest.fixture(autouse=True, scope="module")
def _ends_what_is_shared() -> Iterator[None]:
    yield
    for listener in _kept:
        listener.close()


@contextmanager
def SHARED() -> Iterator[FalcoListener]:
    """One listener for all examples of a property."""
    if not _kept:
        _kept.append(FalcoListener("127.0.0.1:0", Daemon().take, limits=QUICK).start())
    yield _kept[0]


# ------------------------------------------------------------------ slow and greedy senders


def test_who_drips_is_hung_up_on_and_counted() -> None:
    with listening(limits=QUICK) as listener:
        stop = threading.Event()
        with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as connection:

            def drip() -> None:
                connection.sendall(b"POST / HTTP/1.1\r\nX: ")
                while not stop.wait(0.02):
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        return

            dripping = threading.Thread(target=drip)
            dripping.start()
            wait_until(lambda: listener.counts().rejected == 1)
            stop.set()
            dripping.join(20)
        assert "slowly" in listener.counts().last_trouble


def test_half_a_body_is_not_taken() -> None:
    daemon = Daemon()
    with listening(daemon, limits=QUICK) as listener:
        body = event()
        with socket.create_connection(("127.0.0.1", listener.port), timeout=20) as connection:
            connection.sendall(head(len(body) + 1) + body)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
        wait_until(lambda: listener.counts().rejected == 1)
        raw(listener, head(len(body) + 1) + body)
        wait_until(lambda: listener.counts().rejected == 2)
        assert daemon.taken == []


def test_who_takes_all_connections_delays_falco_and_loses_it_nothing() -> None:
    daemon = Daemon()
    limits = QUICK._replace(connections=2)
    with listening(daemon, limits=limits) as listener:
        greedy = [
            socket.create_connection(("127.0.0.1", listener.port), timeout=20) for _ in range(6)
        ]
        try:
            assert post(listener, event())[0] == 200
        finally:
            for connection in greedy:
                connection.close()
        wait_until(lambda: len(daemon.taken) == 1)


def test_no_more_threads_than_connections_are_allowed() -> None:
    limits = Limits(connections=3, request_seconds=20)
    with listening(limits=limits) as listener:
        before = threading.active_count()
        greedy = [
            socket.create_connection(("127.0.0.1", listener.port), timeout=20) for _ in range(10)
        ]
        try:
            wait_until(lambda: threading.active_count() == before + 3)
            # Another would have been started by the time that this one is answered for.
            greedy[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert greedy[0].recv(100).startswith(b"HTTP/1.1 405")
            assert threading.active_count() <= before + 4
        finally:
            for connection in greedy:
                connection.close()


def test_a_slow_daemon_refuses_the_newest_and_says_how_many() -> None:
    daemon = Daemon()
    daemon.pause()
    with listening(daemon, queue_limit=4) as listener:
        assert post(listener, event("first"))[0] == 200
        assert daemon.entered.wait(20)
        three = b"[" + b",".join([event("later")] * 3) + b"]"
        assert post(listener, three)[0] == 200
        status, line = post(listener, b"[" + event() + b"," + event() + b"]")
        assert status == 503
        assert "4 events wait" in line
        assert listener.counts().refused == 2
        daemon.go_on()
        wait_until(lambda: listener.counts().events == 4)
        assert post(listener, event("again"))[0] == 200
        wait_until(lambda: len(daemon.taken) == 5)
    assert listener.counts().refused == 2


def test_a_daemon_in_trouble_is_counted_and_listening_goes_on() -> None:
    daemon = Daemon()
    daemon.trouble = ValueError("a trouble")
    with listening(daemon) as listener:
        assert post(listener, event())[0] == 200
        wait_until(lambda: listener.counts().failed == 1)
        assert listener.counts().last_trouble == "ValueError: a trouble"
        daemon.trouble = None
        assert post(listener, event())[0] == 200
        wait_until(lambda: len(daemon.taken) == 1)


# ------------------------------------------------------------------ who may post, and where


def test_a_token() -> None:
    with listening(token="s3cret") as listener:
        assert post(listener, event())[0] == 401
        assert post(listener, event(), Authorization="Bearer s3cre")[0] == 401
        assert post(listener, event(), Authorization="Basic s3cret")[0] == 401
        assert post(listener, event(), Authorization="Bearer \xe9")[0] == 401
        assert post(listener, event(), Authorization="Bearer s3cret")[0] == 200
        assert "s3cret" not in repr(listener.counts())


@pytest.mark.parametrize("token", ["", "  ", "a\nb", "é"])
def test_a_token_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(UsageError, match="token"):
        FalcoListener("127.0.0.1:0", Daemon().take, token=token)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:2801", ("127.0.0.1", 2801)),
        ("127.9.9.9:1", ("127.9.9.9", 1)),
        ("localhost:2801", ("127.0.0.1", 2801)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    "text",
    ["", ":2801", "2801", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536",
     "node-a:2801", "127.0.0.1:-1", "127.0.0.1:٣", "localhost.example.org:1",
     "127.0.0.1:9999999999999999999"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--falco-listen"):
        parse_address(text, allow_remote=True)


@pytest.mark.parametrize("text", ["0.0.0.0:2801", "192.0.2.1:2801", "[::]:2801"])
def test_addresses_that_others_reach_must_be_asked_for(text: str) -> None:
    with pytest.raises(UsageError, match="made-up events"):
        FalcoListener(text, Daemon().take)
    assert parse_address(text, allow_remote=True)[1] == 2801


def test_a_port_that_is_taken() -> None:
    with listening() as listener, pytest.raises(Unavailable, match="in use"):
        FalcoListener(f"127.0.0.1:{listener.port}", Daemon().take).start()


# ------------------------------------------------------------------ reduced sight


def drop(drops: int | None = 5, **fields: Any) -> FalcoDrop:
    return FalcoDrop(**{"drops": drops, "of": 20, "hostname": "node-a", **fields})


def texts(losses: FalcoLosses, at_ns: int) -> list[list[str]]:
    return [[one.text for one in found.evidence] for found in drop_findings(losses, at_ns)]


def test_a_blind_falco_is_a_finding_for_an_hour() -> None:
    losses = FalcoLosses()
    assert drop_findings(losses, 0) == []
    losses.add([drop(), FalcoEvent(rule="x"), drop(15, of=20)], received_ns=SECOND)
    (found,) = drop_findings(losses, 2 * SECOND)
    assert (found.rule, found.severity) == ("falco_events_dropped", "warning")
    assert found.subject.name == "falco on node-a"
    assert found.rule in OWN_RULES
    assert found.advice == FALCO_EVENTS_DROPPED.steps
    assert texts(losses, 2 * SECOND) == [["20 system calls lost, 50.0 % of 40, told 2 times"]]
    last = SECOND + LOSSES_STAY_NS - 1
    assert [one.id for one in drop_findings(losses, last)] == [found.id]
    assert drop_findings(losses, last + 1) == []
    # Afterwards it counts anew.
    losses.add([drop(3, of=None)], received_ns=last + 1)
    assert texts(losses, last + 2) == [["3 system calls lost, told 1 times"]]


def test_each_machine_has_its_own() -> None:
    losses = FalcoLosses()
    losses.add([drop(), drop(None, hostname=None)], received_ns=0)
    findings = drop_findings(losses, 1)
    assert len({one.id for one in findings}) == 2
    assert texts(losses, 1)[1] == ["system calls lost 1 times, it did not say how many"]


def test_alerts_lost_by_falco_are_told_when_they_grow() -> None:
    losses = FalcoLosses()
    for total in (2, 2, 7):
        losses.add([drop(0, alerts_dropped=total)], received_ns=total)
    assert texts(losses, 10) == [["7 alerts lost in Falco's own queue"]]
    later = 7 + LOSSES_STAY_NS
    losses.add([drop(0, alerts_dropped=7)], received_ns=later)
    assert texts(losses, later) == []
    # A Falco that began anew counts from nothing.
    losses.add([drop(0, alerts_dropped=1)], received_ns=later)
    assert texts(losses, later) == [["1 alerts lost in Falco's own queue"]]


def test_made_up_machines_make_no_flood_of_findings() -> None:
    losses = FalcoLosses()
    names = set()
    for number in range(1000):
        losses.add([drop(hostname=f"node-{number}")], received_ns=number)
        names |= {found.subject.name for found in drop_findings(losses, number)}
    assert names == {f"falco on node-{n}" for n in range(8)} | {"falco on other machines"}
    assert texts(losses, 1000)[-1] == ["4960 system calls lost, 25.0 % of 19840, told 992 times"]
    # There is room again when those are told no longer.
    later = 1000 + LOSSES_STAY_NS
    losses.add([drop(hostname="node-b")], received_ns=later)
    assert [found.subject.name for found in drop_findings(losses, later)] == ["falco on node-b"]


def test_what_the_listener_did_not_take_is_reduced_sight_too() -> None:
    losses = FalcoLosses()
    losses.look_at(ListenerCounts(requests=5, events=5, rejected=3), 1)
    assert drop_findings(losses, 1) == []
    counts = ListenerCounts(refused=2, malformed=1, last_trouble="the last one")
    losses.look_at(counts, 5)
    losses.look_at(counts, 9)
    (found,) = drop_findings(losses, 9)
    assert found.subject.name == "falco listener"
    assert [one.text for one in found.evidence] == [
        "2 events were refused, the queue was full since it began",
        "1 bodies or events were not Falco's since it began",
        "last: the last one",
    ]
    assert drop_findings(losses, 5 + LOSSES_STAY_NS) == []
