"""The endpoint answers what is asked, refuses the rest, and outlives every caller."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden import metrics_server
from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.metrics_server import (
    HEADER_BYTES,
    MAX_CONNECTIONS,
    REQUEST_LINE_BYTES,
    Address,
    MetricsServer,
    parse_address,
)
from gpuwarden.model import Gap
from gpuwarden.outputs.metrics_state import AgentState
from tests.support.agent_state import quiet_node, state_of
from tests.support.receivers import wait_until

ANY = Address("127.0.0.1", 0)


class Agent:
    """What the daemon is to the server: a state that changes."""

    def __init__(self) -> None:
        self.state = state_of(quiet_node())
        self.broken = False

    def __call__(self) -> AgentState:
        if self.broken:
            raise RuntimeError("a defect")
        return self.state


@pytest.fixture(autouse=True)
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "LOOK_UP_SECONDS", 0.01)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def server(agent: Agent) -> Iterator[MetricsServer]:
    with MetricsServer(ANY, agent) as up:
        yield up


def ask(
    server: MetricsServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def send(server: MetricsServer, data: bytes) -> bytes:
    """All that comes back for these bytes, until the server hangs up."""
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while chunk := connection.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass  # it had enough of what was still on the way
        return answer


def healthz(server: MetricsServer) -> tuple[int, Any]:
    status, headers, body = ask(server, "/healthz")
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(body)


# ---------------------------------------------------------------- answers


def test_metrics_are_served_in_the_form_asked_for(server: MetricsServer) -> None:
    status, headers, body = ask(server, "/metrics")
    assert status == 200
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(headers["Content-Length"]) == len(body)
    assert b"\ngpuwarden_process_sm_ratio{" in body
    wanted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    _, headers, body = ask(server, "/metrics?x=1", Accept=wanted)
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


def test_each_scrape_gets_the_state_of_its_time(server: MetricsServer, agent: Agent) -> None:
    assert b"\ngpuwarden_judgements_total 12.0\n" in ask(server, "/metrics")[2]
    agent.state = msgspec.structs.replace(agent.state, judgements=13)
    assert b"\ngpuwarden_judgements_total 13.0\n" in ask(server, "/metrics")[2]


def test_head_is_get_without_the_body(server: MetricsServer) -> None:
    for path in ("/metrics", "/healthz"):
        status, headers, body = ask(server, path, "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 0
    assert ask(server, "/nothing", "HEAD")[0] == 404
    # A client of HTTP reads no body here, also when there is one.
    for line in (b"HEAD /metrics", b"HEAD /nothing"):
        assert send(server, line + b" HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")


def test_an_agent_that_sees_is_ok_and_one_that_does_not_says_why(
    server: MetricsServer, agent: Agent
) -> None:
    assert healthz(server) == (200, {"status": "ok", "reasons": []})
    trouble = Gap(sensor="store", what="/var/lib\udcff\n/x", reason="no space left")
    agent.state = msgspec.structs.replace(agent.state, watching=False, store_troubles=(trouble,))
    status, told = healthz(server)
    assert status == 503
    assert told == {
        "status": "blind",
        "reasons": [
            "probe: device opens are not watched",
            r"store: /var/lib\udcff\n/x: no space left",
        ],
    }


def test_reasons_are_bounded(server: MetricsServer, agent: Agent) -> None:
    troubles = tuple(Gap(sensor="store", what="x" * 5000, reason=str(i)) for i in range(100))
    agent.state = msgspec.structs.replace(agent.state, store_troubles=troubles)
    status, told = healthz(server)
    assert status == 503
    assert len(told["reasons"]) == 17
    assert told["reasons"][-1] == "and 84 more"
    assert max(map(len, told["reasons"])) <= 300


def test_an_agent_that_hangs_is_blind_although_its_server_answers(
    server: MetricsServer, agent: Agent
) -> None:
    state = agent.state
    agent.state = msgspec.structs.replace(state, monotonic_seconds=state.monotonic_seconds - 60)
    status, told = healthz(server)
    assert status == 503
    assert any(reason.startswith("agent: it hangs") for reason in told["reasons"])
    assert b'\ngpuwarden_blind{cause="agent"} 1.0\n' in ask(server, "/metrics")[2]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/healthz/x", "/../metrics", "*"])
def test_other_paths_are_not_found(server: MetricsServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "X"])
def test_other_methods_are_not_allowed(server: MetricsServer, method: str) -> None:
    status, headers, _ = ask(server, "/metrics", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_what_is_too_long_is_refused(server: MetricsServer) -> None:
    fits = b"GET /metrics?" + b"a" * (REQUEST_LINE_BYTES - 13 - 11) + b" HTTP/1.1\r\n"
    assert len(fits) == REQUEST_LINE_BYTES
    assert send(server, fits + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert send(server, b"GET /m?a" + fits[12:] + b"\r\n").startswith(b"HTTP/1.1 404 ")
    long = b"GET /metrics?" + b"a" * REQUEST_LINE_BYTES + b" HTTP/1.1\r\n\r\n"
    assert send(server, long).startswith(b"HTTP/1.1 414 ")
    start = b"GET /metrics HTTP/1.1\r\n"
    below = b"X: " + b"a" * (HEADER_BYTES - 7) + b"\r\n\r\n"
    assert send(server, start + below).startswith(b"HTTP/1.1 200 ")
    above = b"X: " + b"a" * (HEADER_BYTES - 4) + b"\r\n\r\n"
    assert send(server, start + above).startswith(b"HTTP/1.1 431 ")
    many = b"".join(b"X: %d\r\n" % i for i in range(101))
    assert send(server, start + many + b"\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/x\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"505"),
        (b"GET / metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused_without_repeating_it(
    server: MetricsServer, data: bytes, status: bytes
) -> None:
    answer = send(server, data)
    assert answer.split(b" ", 2)[1] == status
    assert b"metrics" not in answer


GET = b"GET /metrics HTTP/1.1\r\n"


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=400)
    | st.binary(max_size=200).map(lambda data: GET + data)
    | st.binary(max_size=99).map(lambda data: GET + b"Accept: " + data + b"\r\n\r\n")
)
def test_any_bytes_leave_it_answering(server: MetricsServer, data: bytes) -> None:
    answer = send(server, data)
    assert b" 500 " not in answer.split(b"\r\n", 1)[0]
    assert ask(server, "/healthz")[0] == 200


def test_a_defect_of_the_agent_is_500_and_no_end(server: MetricsServer, agent: Agent) -> None:
    agent.broken = True
    status, _, body = ask(server, "/metrics")
    assert (status, body) == (500, b"500 Internal Server Error\n")
    assert ask(server, "/healthz")[0] == 500
    agent.broken = False
    assert ask(server, "/metrics")[0] == 200


# ---------------------------------------------------------------- callers that stay


def test_more_than_eight_connections_are_closed_and_those_that_end_make_room(
    server: MetricsServer,
) -> None:
    held = [socket.create_connection(server.address, timeout=10) for _ in range(MAX_CONNECTIONS)]
    try:
        with socket.create_connection(server.address, timeout=10) as one_more:
            assert one_more.recv(1) == b""
        held.pop().close()
        wait_until(lambda: _answers(server))
    finally:
        for connection in held:
            connection.close()


def _answers(server: MetricsServer) -> bool:
    try:
        return ask(server, "/healthz")[0] == 200
    except (http.client.HTTPException, OSError):
        return False


def test_a_silent_caller_is_hung_up_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_server._Handler.timeout == metrics_server.SILENCE_SECONDS
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    with (
        MetricsServer(ANY, agent) as server,
        socket.create_connection(server.address, timeout=10) as silent,
    ):
        silent.sendall(b"GET /metr")
        assert silent.recv(1) == b""


def test_a_dripping_caller_is_hung_up_on(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTION_SECONDS", 0.3)
    ended = threading.Event()
    with (
        MetricsServer(ANY, agent) as server,
        socket.create_connection(server.address, timeout=10) as caller,
    ):

        def drip() -> None:
            try:
                while not ended.wait(0.02):
                    caller.sendall(b"a")
            except OSError:
                pass

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        try:
            assert caller.recv(1) == b""
        finally:
            ended.set()
            thread.join(10)


def test_stop_frees_the_port_and_ends_those_who_wait(agent: Agent) -> None:
    server = MetricsServer(ANY, agent)
    server.start()
    address = server.address
    with socket.create_connection(address, timeout=10) as waiting:
        wait_until(lambda: server._server is not None and bool(server._server._until))
        server.stop()
        assert waiting.recv(1) == b""
    server.stop()
    with MetricsServer(address, agent) as again:
        assert again.address == address
        assert ask(again, "/healthz")[0] == 200


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9835", "127.0.0.1", 9835),
        (":9835", "127.0.0.1", 9835),
        (":0", "127.0.0.1", 0),
        ("127.0.0.1:9835", "127.0.0.1", 9835),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
        ("[::1]:9835", "::1", 9835),
        ("[::]:1", "::", 1),
        ("[0:0::2]:1", "::2", 1),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", ":", "127.0.0.1", "127.0.0.1:", ":65536", ":-1", ":+1", ":1 ", ": 1", ":٣", "localhost:1",
     "unix:/run/x", "unix:1", "::1:9835", "[::1]", "[127.0.0.1]:1", "[]:1", "[fe80::1%lo]:1",
     "1.2.3:1", "127.0.0.01:1", "http://127.0.0.1:1", "a" * 5000, ":1\n"],
)  # fmt: skip
def test_what_is_no_address_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert str(caught.value).startswith("--metrics: ")
    assert len(str(caught.value)) < 500
    assert "9835" in caught.value.remedy


@given(st.text(max_size=40) | st.from_regex(r"\[?[0-9a-f.:]{0,20}\]?:[0-9]{1,6}", fullmatch=True))
def test_any_text_is_an_address_or_a_usage_error(text: str) -> None:
    try:
        address = parse_address(text)
    except UsageError:
        return
    assert parse_address(str(address)) == address


def test_an_address_that_is_taken_or_not_ours_is_said(server: MetricsServer, agent: Agent) -> None:
    for address in (server.address, Address("203.0.113.1", 9835)):
        with pytest.raises(Unavailable, match="cannot listen on"):
            MetricsServer(address, agent).start()


def test_ipv6_loopback_is_served(agent: Agent) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"this machine has no IPv6: {error}")
    with MetricsServer(Address("::1", 0), agent) as server:
        assert str(server.address).startswith("[::1]:")
        assert ask(server, "/healthz")[0] == 200
