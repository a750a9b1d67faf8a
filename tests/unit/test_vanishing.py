"""A process that ends, or turns unreadable, at any moment of a scan costs nothing but itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.model import AnyFact, Connection, Gap, Holder, Process
from tests.support.failing_host import failing
from tests.support.process_sensors import look
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"
PIDS = [100, 200, 300]
ERRORS: list[Exception] = [Unavailable("gone: not there"), Denied("kept: permission denied")]


def about(facts: list[AnyFact], pid: int) -> list[AnyFact]:
    kinds = (Holder, Process, Connection)
    return [fact for fact in facts if isinstance(fact, kinds) and fact.pid == pid]


def without_peers(facts: list[AnyFact]) -> list[AnyFact]:
    return [
        msgspec.structs.replace(fact, peer_pid=None) if isinstance(fact, Connection) else fact
        for fact in facts
    ]


@pytest.mark.parametrize("error", ERRORS, ids=["gone", "denied"])
def test_each_look_at_one_process_may_fail(error: Exception) -> None:
    whole = look(RecordedHost(NODE), PIDS)
    host, count = failing(RecordedHost(NODE), error, -1, under="/proc/200/")
    assert look(host, PIDS) == whole
    total = count()
    assert total > 20
    for at in range(total):
        facts = look(failing(RecordedHost(NODE), error, at, under="/proc/200/")[0], PIDS)
        assert about(facts, 100) == about(whole, 100), at
        assert without_peers(about(facts, 300)) == without_peers(about(whole, 300)), at
        if facts != whole and isinstance(error, Denied):
            assert _says_so(facts), at


def _says_so(facts: list[AnyFact]) -> bool:
    """A fact that is missing for want of permission leaves a reason behind."""
    told = any(isinstance(fact, Gap) for fact in facts)
    unread = any(
        "permission denied" in reason
        for fact in about(facts, 200)
        if isinstance(fact, Process)
        for exe in [fact.exe]
        for reason in [*fact.unread.values(), *(exe.unread.values() if exe else ())]
    )
    # A holder whose link could not be read shows where it was seen instead of a name.
    unnamed = any(isinstance(f, Holder) and f.path.startswith("/proc/") for f in facts)
    return told or unread or unnamed


@pytest.mark.parametrize("error", ERRORS, ids=["gone", "denied"])
def test_each_look_at_the_machine_may_fail(error: Exception) -> None:
    host, count = failing(RecordedHost(NODE), error, -1)
    look(host, PIDS)
    total = count()
    # Every third look, shifted by the error: half the time, and all kinds of look are met.
    for at in range(ERRORS.index(error), total, 3):
        facts = look(failing(RecordedHost(NODE), error, at)[0], PIDS)
        assert all(fact is not None for fact in facts)
