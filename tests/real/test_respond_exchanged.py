"""Of what was exchanged between a finding and an action, no process is touched."""

from __future__ import annotations

import os

import pytest

from gpuwarden.host import Host
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond import freezer_group
from gpuwarden.respond.freezing import Freeze, Thaw
from gpuwarden.respond.gpu_use import GpuUse
from gpuwarden.respond.identity import Changed, hold, read_identity
from gpuwarden.respond.killing import Kill
from gpuwarden.respond.step import Identity, Target
from tests.support.acted_on import (
    NO_COUNTS,
    born_as,
    freezer_mounts,
    group_of,
    nobody_tells,
    running,
    target_of,
    untouched,
    wait_for_words,
)
from tests.support.packages import require_root
from tests.support.probes import build

pytestmark = pytest.mark.real

HOST = Host()


@pytest.fixture(scope="module", autouse=True)
def probes() -> None:
    require_root()
    build()


def freeze() -> Freeze:
    return Freeze(HOST, lambda target: ())


def spared(target: Target, identity: Identity, counts: ExecCounts) -> None:
    """No step touches it, neither as the command holds it nor as the actors do."""
    with pytest.raises(Changed), hold(HOST, identity, counts):
        pass
    actors = (
        Freeze(HOST, lambda target: (), counts=counts),
        Kill(HOST, look=GpuUse, counts=counts),
    )
    for actor in actors:
        with pytest.raises(Changed):
            actor.do(target, nobody_tells)


def test_of_100_that_were_exchanged_none_is_touched() -> None:
    sleeper = ("sleep", "67")
    # What a process is, what it becomes, how it was started, whether marks alone must tell.
    ways = [
        (("sh", "-c", 'read x; exec sh -c "read y; :"'), ("sh", "-c", "read y; :"), ()),
        (("sh", "-c", "read x; exec sleep 67"), sleeper, ()),
        (("sh", "-c", 'read x; exec sh -c "read y; :"'), ("sh", "-c", "read y; :"), ("-R",)),
        (("sh", "-c", "read x; exec sleep 67"), sleeper, ("-R",)),
        (("sh", "-c", 'read x; exec sh -c "$0" "$0"', "read z; :"), None, ()),
        (("sh", "-c", 'read x; exec sh -c "$0" "$0"', "read z; :"), None, ("-R",)),
    ]
    done = 0
    with ExecCounts() as counts:
        assert not counts.unavailable, counts.unavailable
        for turn in range(72):
            before, after, how = ways[turn % len(ways)]
            after = after or ("sh", "-c", "read z; :", "read z; :")
            start = ("setarch", *how, *before) if how else before
            by_mark = turn // len(ways) % 2 == 1
            with running(*start, as_argv=before) as process:
                pid = process.pid
                identity = read_identity(HOST, pid, NO_COUNTS if by_mark else counts)
                assert (identity.exec_mark is None) is bool(how)
                target = target_of(pid, identity=identity)
                assert process.stdin is not None
                process.stdin.write(b"\n")
                process.stdin.flush()
                wait_for_words(pid, after)
                spared(target, identity, NO_COUNTS if by_mark else counts)
                assert untouched(pid, after)()
                done += 1
        for turn in range(28):
            with running("sleep", "68") as process:
                pid = process.pid
                identity = read_identity(HOST, pid, NO_COUNTS if turn % 2 else counts)
                target = target_of(pid, identity=identity)
            born_as(pid, ("sleep", "68"))
            try:
                spared(target, identity, NO_COUNTS if turn % 2 else counts)
                assert untouched(pid, ("sleep", "68"))()
                done += 1
            finally:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    assert done == 100


def test_one_that_executed_is_let_go_on_all_the_same() -> None:
    with running("sh", "-c", "read x; exec sleep 71") as process:
        target = target_of(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_for_words(process.pid, ("sleep", "71"))
        assert freeze().do(target_of(process.pid), nobody_tells).complete
        assert Thaw(HOST).do(target, nobody_tells).complete
        assert untouched(process.pid, ("sleep", "71"))()


def test_one_that_executes_while_it_is_held_is_not_signalled() -> None:
    with running("sh", "-c", "read x; exec sleep 69") as process, ExecCounts() as counts:
        with hold(HOST, read_identity(HOST, process.pid, counts), counts) as held:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            wait_for_words(process.pid, ("sleep", "69"))
            with pytest.raises(Changed, match="binary is another"):
                held.check()
        assert untouched(process.pid, ("sleep", "69"))()


def test_one_that_is_frozen_after_it_executed_is_let_go_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, mount = freezer_mounts()[0]
    switched = freezer_group.switch

    def late(group: freezer_group.FreezerGroup, *, frozen: bool) -> None:
        if frozen:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            wait_for_words(process.pid, ("sleep", "70"))
        switched(group, frozen=frozen)

    monkeypatch.setattr(freezer_group, "switch", late)
    with (
        running("sh", "-c", "read x; exec sleep 70") as process,
        group_of(mount, process.pid) as group,
    ):
        with pytest.raises(Changed):
            freeze().do(target_of(process.pid), nobody_tells)
        switches = [group / name for name in ("freezer.state", "cgroup.freeze")]
        words = {one.read_text() for one in switches if one.exists()}
        assert words <= {"THAWED\n", "0\n"} and words
        assert untouched(process.pid, ("sleep", "70"))()
