"""A process that ends, or turns unreadable, at any moment of a scan costs nothing but itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwarden.errors import Denied, GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import AnyFact, Connection, Gap, Holder, Process
from gpuwarden.sensors import device_nodes, hidden, holders, sockets
from gpuwarden.sensors.process import details, stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.failing_host import failing
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"
PIDS = [100, 200, 300]
ERRORS: list[Exception] = [Unavailable("gone: not there"), Denied("kept: permission denied")]


def look(host: Host) -> list[AnyFact]:
    """All process sensors once, each as the runner runs it: its own error costs it alone."""
    seen = Seen()
    facts: list[AnyFact] = []
    try:
        seen.table = {p: line for p, line in stat_lines.read(host).items() if p in PIDS}
    except GpuwardenError:
        return facts
    for sensor in (
        device_nodes.read,
        holders.read,
        lambda h, s: details.read(h, s, PIDS),
        lambda h, s: sockets.read(h, s, PIDS),
        hidden.read,
    ):
        try:
            for fact in sensor(host, seen):
                seen.add(fact)
                facts.append(fact)
        except GpuwardenError:
            continue
    return facts


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
    whole = look(RecordedHost(NODE))
    host, count = failing(RecordedHost(NODE), error, -1, under="/proc/200/")
    assert look(host) == whole
    total = count()
    assert total > 20
    for at in range(total):
        facts = look(failing(RecordedHost(NODE), error, at, under="/proc/200/")[0])
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
    look(host)
    total = count()
    # Every third look, shifted by the error: half the time, and all kinds of look are met.
    for at in range(ERRORS.index(error), total, 3):
        facts = look(failing(RecordedHost(NODE), error, at)[0])
        assert all(fact is not None for fact in facts)
