"""Sockets that systemd passes: taken when they are ours and listen, served by the endpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request

import pytest

from gpuwarden.watch.passed_sockets import FIRST_DESCRIPTOR, passed_sockets

# Runs with a listening socket as its third descriptor: serves one scrape from it.
SERVE = """
import os, socket, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="metrics:log")
from gpuwarden.metrics_server import Address, MetricsServer
from gpuwarden.watch.passed_sockets import passed_sockets
from tests.support.agent_state import miner_node, state_of
passed = passed_sockets()
assert sorted(passed) == ["metrics"], passed
assert not {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} & set(os.environ)
assert not os.get_inheritable(3)
state = state_of(miner_node())
# No socket of the network may be made here.
made = socket.socket
def refuse(family=socket.AF_INET, *more, **named):
    assert family == socket.AF_UNIX or named.get("fileno") is not None, family
    return made(family, *more, **named)
socket.socket = refuse
with MetricsServer(Address("127.0.0.1", 0), lambda: state, passed=passed["metrics"]):
    print("serving", flush=True)
    sys.stdin.readline()
"""


def test_the_endpoint_serves_from_a_socket_that_was_passed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listens = os.dup(listening.fileno())
        script = f'exec 3<&{listens} 4</dev/null; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", sys.executable, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listens],
        )
        os.close(listens)
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == b"serving\n"
            port = listening.getsockname()[1]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                assert b"gpuwarden_findings" in answer.read()
            process.stdin.close()


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "x"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
    ],
)
def test_what_is_meant_for_others_is_left_alone(words: dict[str, str]) -> None:
    assert passed_sockets(words) == {}
    assert FIRST_DESCRIPTOR == 3
