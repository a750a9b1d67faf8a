"""The daemon's socket: who may ask, what is refused, what is remembered and what is given up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import control
from gpuwarden.control import Answer, GroupName, Request
from gpuwarden.errors import Malformed, Unavailable
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.respond import control_client
from gpuwarden.watch import asked_denials, group_ids
from gpuwarden.watch.asked_denials import FILE, AskedDenials
from gpuwarden.watch.control import ControlSide
from gpuwarden.watch.denial_findings import DENYING_RULES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the socket answers root only")

BOOT = "b00710b0-0000-4000-8000-000000000001"
ONE, TWO = GroupName(0, 4711), GroupName(5, 12)
KEYS = {GroupKey(0, 4711), GroupKey(5, 12)}


class Probe:
    """Keeps what it was told to deny."""

    def __init__(self, *, fails_on: GroupKey | None = None) -> None:
        self.denied: set[GroupKey] = set()
        self.fails_on = fails_on

    def deny_group(self, group: GroupKey, *, dry_run: bool = False) -> None:
        if group == self.fails_on:
            raise Unavailable("the table is full")
        self.denied.add(group)

    def allow(self, group: GroupKey) -> None:
        self.denied.discard(group)


@pytest.fixture(autouse=True)
def every_group_is_there(monkeypatch: pytest.MonkeyPatch) -> set[GroupKey]:
    """The groups that exist; a test takes some away."""
    there = set(KEYS) | {GroupKey(0, number) for number in range(2, 100)}

    def existing(groups: Iterable[GroupKey]) -> set[GroupKey]:
        return there & set(groups)

    monkeypatch.setattr(group_ids, "existing", existing)
    monkeypatch.setattr(asked_denials, "own_groups", lambda: {GroupKey(0, 99)})
    return there


class Daemon:
    """A control side with a loop that turns when it is woken."""

    def __init__(self, directory: Path, probe: Any, *, also: Callable[[], Any] = tuple) -> None:
        self.denials = AskedDenials(str(directory), BOOT, also=also)
        self._woken = threading.Event()
        self.side = ControlSide(
            control.socket_of(str(directory)), self.denials, self._woken.set, answer_seconds=5
        )
        self.path = self.side.path
        self._ends = False
        self._thread = threading.Thread(target=self._loop)
        self.side.start(probe)
        assert not self.side.trouble
        self._thread.start()

    def _loop(self) -> None:
        while not self._ends:
            self._woken.wait(0.05)
            self._woken.clear()
            self.side.turn()

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.side.close()

    def ask(self, action: Any, *groups: GroupName, **fields: Any) -> Answer:
        answer = control_client.ask(self.path, Request(action=action, groups=groups, **fields))
        assert answer is not None
        return answer


@contextmanager
def daemon(directory: Path, probe: Any, **fields: Any) -> Iterator[Daemon]:
    one = Daemon(directory, probe, **fields)
    try:
        yield one
    finally:
        one.close()


def raw(path: str, data: bytes, *, shut: bool = True) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(10)
        end.connect(path)
        try:
            end.sendall(data)
            if shut:
                end.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        body = b""
        while chunk := end.recv(65536):
            body += chunk
    return msgspec.json.decode(body, type=Answer)


def test_deny_status_and_allow(tmp_path: Path) -> None:
    probe = Probe()
    with daemon(tmp_path, probe) as one:
        assert one.ask("status") == Answer(done=True)
        done = one.ask("deny", ONE, TWO, name="container abc", reason="ticket 7")
        assert done.done and probe.denied == KEYS
        assert [(d.group, d.name, d.reason) for d in done.denied] == [
            (ONE, "container abc", "ticket 7"), (TWO, "container abc", "ticket 7"),
        ]  # fmt: skip
        found = one.side.findings()
        assert [f.rule for f in found] == ["denied_on_request"]
        assert found[0].rule in DENYING_RULES and "0:4711" in found[0].evidence[0].text
        assert one.ask("allow", ONE).done
        assert probe.denied == {GroupKey(5, 12)}
        again = one.ask("allow", ONE)
        assert not again.done and "0:4711" in again.error
    assert not os.path.exists(one.path)


def test_the_socket_and_its_file_are_roots_alone(tmp_path: Path) -> None:
    with daemon(tmp_path / "state", Probe()) as one:
        one.ask("deny", ONE)
        assert os.stat(one.path).st_mode & 0o777 == 0o600
        assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o700
        assert os.stat(tmp_path / "state" / FILE).st_mode & 0o777 == 0o600


def test_it_is_remembered_across_a_restart_of_the_daemon_and_not_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon(tmp_path, Probe()) as one:
        one.ask("deny", ONE, name="container abc")
    second = Probe()
    with daemon(tmp_path, second) as one:
        assert second.denied == {GroupKey(0, 4711)}
        assert [d.name for d in one.ask("status").denied] == ["container abc"]
    monkeypatch.setattr("tests.unit.test_control.BOOT", "another")
    third = Probe()
    with daemon(tmp_path, third) as one:
        assert not third.denied and one.ask("status") == Answer(done=True)


def test_a_group_that_has_ended_is_forgotten(
    tmp_path: Path, every_group_is_there: set[GroupKey]
) -> None:
    probe = Probe()
    with daemon(tmp_path, probe) as one:
        one.ask("deny", ONE, TWO)
        every_group_is_there.discard(GroupKey(0, 4711))
        one.denials.forget_ended()
        assert probe.denied == {GroupKey(5, 12)}
    second = Probe()
    with daemon(tmp_path, second):
        assert second.denied == {GroupKey(5, 12)}


def test_all_of_a_request_is_done_or_nothing(tmp_path: Path) -> None:
    probe = Probe(fails_on=GroupKey(5, 12))
    with daemon(tmp_path, probe) as one:
        answer = one.ask("deny", ONE, TWO)
        assert not answer.done and "the table is full" in answer.error
        assert not probe.denied and one.ask("status") == Answer(done=True)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (GroupName(0, 1), "no control group that can be denied"),
        (GroupName(0, 99), "gpuwarden is in that control group"),
        (GroupName(0, 123_456), "not there"),
    ],
)
def test_a_root_our_own_and_an_unknown_group_are_refused(
    tmp_path: Path, every_group_is_there: set[GroupKey], group: GroupName, why: str
) -> None:
    every_group_is_there.add(GroupKey(0, 1))
    with daemon(tmp_path, Probe()) as one:
        answer = one.ask("deny", group)
        assert not answer.done and why in answer.error


def test_what_cannot_be_kept_is_not_denied(tmp_path: Path) -> None:
    probe = Probe()
    with daemon(tmp_path, probe) as one:
        (tmp_path / f"{FILE}.new").mkdir()
        answer = one.ask("deny", ONE)
        assert not answer.done and "not written" in answer.error and not probe.denied


def test_a_way_that_only_sees_says_so(tmp_path: Path) -> None:
    with daemon(tmp_path, None) as one:
        answer = one.ask("deny", ONE)
        assert not answer.done and "cannot deny" in answer.error


def test_what_the_policy_denies_too_stays_denied(tmp_path: Path) -> None:
    probe = Probe()
    with daemon(tmp_path, probe, also=lambda: [GroupKey(0, 4711)]) as one:
        one.ask("deny", ONE)
        answer = one.ask("allow", ONE)
        assert not answer.done and "the policy" in answer.error
        assert probe.denied == {GroupKey(0, 4711)}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b'{"action":"kill"}', b'{"action":"deny","x":1}',
             b"[" * 60_000, b" " * (control.MESSAGE_LIMIT_BYTES + 1)],
)  # fmt: skip
def test_what_is_no_request_is_answered_as_such(tmp_path: Path, data: bytes) -> None:
    with daemon(tmp_path, Probe()) as one:
        answer = raw(one.path, data)
        assert not answer.done and answer.error.startswith("no request")
        assert one.ask("status").done


def test_too_many_groups_are_refused(tmp_path: Path) -> None:
    with daemon(tmp_path, Probe()) as one:
        many = tuple(GroupName(0, number) for number in range(2, 90))
        assert "more than" in one.ask("deny", *many).error


def test_who_says_nothing_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.watch.control.READ_SECONDS", 0.2)
    with daemon(tmp_path, Probe()) as one:
        assert "complete within" in raw(one.path, b"{", shut=False).error
        assert one.ask("status").done


def test_what_was_given_up_is_not_done_later(tmp_path: Path) -> None:
    probe = Probe()
    denials = AskedDenials(str(tmp_path), BOOT)
    side = ControlSide(control.socket_of(str(tmp_path)), denials, lambda: None, answer_seconds=0.1)
    side.start(probe)  # type: ignore[arg-type]
    try:
        answer = control_client.ask(side.path, Request(action="deny", groups=(ONE,)))
        assert answer is not None and "did not answer" in answer.error
        side.turn()
        assert not probe.denied
    finally:
        side.close()


def test_a_second_daemon_leaves_the_first_ones_socket(tmp_path: Path) -> None:
    with daemon(tmp_path, Probe()) as one:
        second = ControlSide(one.path, AskedDenials(str(tmp_path), BOOT), lambda: None)
        second.start(None)
        assert "another daemon" in second.trouble
        second.close()
        assert one.ask("status").done


def test_a_stale_socket_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = control.socket_of(str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    with daemon(tmp_path, Probe()) as one:
        assert one.ask("status").done
    Path(path).write_text("mine")
    side = ControlSide(path, AskedDenials(str(tmp_path), BOOT), lambda: None)
    side.start(None)
    side.close()
    assert "something else" in side.trouble and Path(path).read_text() == "mine"


def test_a_directory_that_others_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    side = ControlSide(
        control.socket_of(str(tmp_path)), AskedDenials(str(tmp_path), BOOT), lambda: None
    )
    side.start(None)
    side.close()
    assert "others may write" in side.trouble


def test_nobody_there_is_none_and_nonsense_is_malformed(tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    assert control_client.ask(path, Request(action="status")) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()

        def answer() -> None:
            end, _ = other.accept()
            end.sendall(b"hello")
            end.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((Malformed, Unavailable)):
            control_client.ask(path, Request(action="status"))
        thread.join()


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_in_the_file_start_a_daemon(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, FILE).write_bytes(data)
        denials = AskedDenials(directory, BOOT)
        denials.begin(Probe())  # type: ignore[arg-type]
        assert not denials.denied()
        assert "not known" in denials.trouble


def test_a_path_of_any_length_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    with daemon(deep, Probe()) as one:
        assert one.ask("status").done


def test_two_daemons_have_two_sockets() -> None:
    assert control.socket_of("/var/lib/gpuwarden/") == control.SOCKET
    assert control.socket_of("/tmp/x") == "/tmp/x/control.sock"


def test_a_request_for_no_group_denies_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path, Probe()) as one:
        answer = one.ask("deny")
        assert not answer.done and "no control group" in answer.error
