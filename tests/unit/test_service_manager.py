"""What the daemon tells systemd: datagrams, the watchdog's beat, nothing where nobody listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.watch.service_manager import STATUS_CHARACTERS, ServiceManager


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        path = str(tmp_path / "notify")
        one.bind(path)
        one.setblocking(False)
        yield path, one


def heard(one: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found.append(one.recv(65536).decode())
        except BlockingIOError:
            return found


def test_ready_reloading_and_stopping_are_told(listener: tuple[str, socket.socket]) -> None:
    path, one = listener
    manager = ServiceManager({"NOTIFY_SOCKET": path})
    manager.ready("sees by eBPF\nREADY=0")
    manager.reloading()
    manager.stopping()
    ready, reloading, stopping = heard(one)
    assert ready == "READY=1\nSTATUS=sees by eBPF READY=0"
    assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert stopping == "STOPPING=1"


def test_an_abstract_socket_is_one() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        name = f"gpuwarden-test-{os.getpid()}"
        one.bind("\0" + name)
        one.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert heard(one) == ["STOPPING=1"]


@pytest.mark.parametrize("meant", [None, str(os.getpid())], ids=["anybody", "us"])
def test_the_watchdog_hears_of_it_and_not_at_each_turn(
    listener: tuple[str, socket.socket], meant: str | None
) -> None:
    path, one = listener
    named = {} if meant is None else {"WATCHDOG_PID": meant}
    manager = ServiceManager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "60000000", **named})
    for _ in range(5):
        manager.alive()
    assert heard(one) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"WATCHDOG_USEC": "x"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
)
def test_no_watchdog_or_anothers_hears_nothing(
    listener: tuple[str, socket.socket], words: dict[str, str]
) -> None:
    path, one = listener
    ServiceManager({"NOTIFY_SOCKET": path, **words}).alive()
    assert heard(one) == []


def test_children_do_not_inherit_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    manager = ServiceManager()
    assert manager.is_there
    manager.stopping()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(os.environ)


@given(st.text(max_size=500))
def test_any_status_is_one_bounded_line(status: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        name = f"gpuwarden-status-{os.getpid()}"
        one.bind("\0" + name)
        one.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready(status)
        (told,) = heard(one)
    assert told.count("\n") == 1
    assert len(told) <= len("READY=1\nSTATUS=") + 5 * STATUS_CHARACTERS


@given(st.text(max_size=30))
def test_a_socket_that_is_none_is_no_error(address: str) -> None:
    ServiceManager({"NOTIFY_SOCKET": address}).stopping()
