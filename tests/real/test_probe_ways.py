"""The other ways of seeing opens: tried in order, each refusal told; the descriptors' way here."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, Malformed, Unavailable, UsageError
from gpuwarden.probes import choose, layouts, loader, loading, ways
from gpuwarden.probes.events import Event, ExecEvent, ExitEvent, OpenEvent, OpenReturn
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.poll import HolderPoll
from gpuwarden.probes.settings import Settings
from tests.support.probes import (
    EVERYTHING,
    FULL,
    by,
    drained,
    node,
    opens,
    probing,
    run,
    tracefs,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

CPUID = (203, 0)
"""A driver of its own, with a major of its own, that is there on every x86-64 machine."""
BY_FUNCTION = ("lsm", "fmod_ret", "fentry", "kprobe")


@pytest.fixture(scope="module", autouse=True)
def tracing(built: None) -> Iterator[None]:
    with tracefs():
        yield


def loads(way: str) -> str:
    """Why a way does not load here; empty if it does."""
    try:
        with DeviceOpenProbe([FULL], way=way):
            return ""
    except (Unavailable, Denied) as error:
        return str(error)


# -------------------------------------------------------------------- the choice


def test_each_way_that_does_not_load_is_told_with_its_reason_and_the_next_is_tried() -> None:
    reasons = {way: loads(way) for way in loader.WAYS}
    assert not reasons["cgroup/dev"] and not reasons["tracepoint"]
    expected = next(way for way in loader.WAYS[1:] if not reasons[way])
    before = loader.WAYS[1 : loader.WAYS.index(expected)]
    with choose.chosen([FULL], ways=loader.WAYS[1:]) as choice:
        assert choice.source == expected and choice.probe is not None
        assert choice.probe.way.name == expected
        assert choice.limits == ways.BY_NAME[expected].limits
        assert [one.way for one in choice.refused] == [f"eBPF ({way})" for way in before]
        assert all(one.reason and one.remedy for one in choice.refused)
        assert all(one.reason in str(choice) for one in choice.refused)
        assert choice.limits in str(choice)


def test_what_is_refused_leaves_nothing_behind_and_the_poll_is_last() -> None:
    refused = [way for way in BY_FUNCTION if loads(way)]
    if not refused:
        pytest.skip("this kernel takes every way")
    before = bpf_descriptors()
    with choose.chosen([FULL], ways=refused) as choice:
        assert choice.probe is None and choice.poll is not None
        assert choice.source == "proc poll" and not choice.can_deny
        assert [one.way for one in choice.refused] == [f"eBPF ({way})" for way in refused]
        assert choice.limits == HolderPoll.limits
    assert bpf_descriptors() == before


def bpf_descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and "bpf" in os.readlink(path):
            found.append(name)
    return sorted(found)


def test_all_ways_are_tried_best_first_and_the_best_is_taken() -> None:
    with choose.chosen([FULL]) as choice:
        assert (choice.source, choice.refused, choice.limits) == ("cgroup/dev", (), "")
        assert choice.can_deny
    with choose.chosen([FULL], Settings(return_values=True), ways=("tracepoint",)) as choice:
        assert choice.source == "tracepoint" and choice.refused == () and not choice.can_deny


def test_only_return_values_are_given_up_where_only_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "TRACEFS", ("/nonexistent",))
    with choose.chosen([FULL], Settings(return_values=True)) as choice:
        assert choice.source == "cgroup/dev" and choice.probe is not None
        assert not choice.probe.settings.return_values
        assert [one.way for one in choice.refused] == ["eBPF (cgroup/dev, return values)"]
        assert "tracefs" in choice.refused[0].reason


def test_a_way_that_there_is_not_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(UsageError, match="none of the ways"):
        DeviceOpenProbe([FULL], way="ptrace")
    with pytest.raises(UsageError), choose.chosen([FULL], ways=("cgroup/dev", "ptrace")):
        pass


@pytest.mark.parametrize("way", loader.WAYS)
def test_a_layout_that_differs_is_refused_by_every_way(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tuple(layouts.LAYOUTS["exit_record"][1:])
    monkeypatch.setattr(layouts, "LAYOUTS", {**layouts.LAYOUTS, "exit_record": wrong})
    with pytest.raises(Malformed, match="struct exit_record"):
        DeviceOpenProbe([FULL], way=way).__enter__()


@pytest.mark.parametrize("way", [way for way in loader.WAYS if not ways.BY_NAME[way].can_deny])
def test_a_way_that_cannot_deny_says_so_before_it_is_relied_on(way: str) -> None:
    if reason := loads(way):
        pytest.skip(f"{way} does not load here: {reason}")
    with probing(EVERYTHING, way=way) as probe:
        with pytest.raises(UsageError, match="cannot deny"):
            probe.deny("/sys/fs/cgroup")
        with pytest.raises(UsageError, match="cannot deny"):
            probe.pin()


# -------------------------------------------------------------------- what the others see


SAME = (
    "major",
    "minor",
    "how",
    "reads",
    "writes",
    "open_flags",
    "system_call",
    "path",
    "path_is_claimed",
    "io_uring",
    "denial",
    "hits",
    "process",
)


def told(way: str, opener: Path, path: Path) -> tuple[list[OpenEvent], list[Event]]:
    """The opens of one process that opens three times, each another way, then everything told."""
    code = (
        "import os, sys\n"
        "os.close(os.open(sys.argv[1], os.O_RDONLY))\n"
        "os.chdir(os.path.dirname(sys.argv[1]))\n"
        "os.close(os.open(os.path.basename(sys.argv[1]), os.O_RDONLY | os.O_NONBLOCK))\n"
        "os.close(os.open(sys.argv[1], os.O_PATH))\n"
    )
    with probing(Settings(), CPUID, way=way) as probe:
        child = subprocess.Popen(["/usr/bin/python3", "-c", code, path])
        child.wait()
        run(opener, "open", path)
        events = drained(probe)
        assert probe.counters().dropped == 0 and probe.counters().malformed == 0
    return by(child.pid, events), events


def comparable(event: OpenEvent) -> tuple[object, ...]:
    who = event.process
    named = (who.exe_path, who.exe_inode, who.argv, who.uid, who.comm, who.cgroup_path, who.ppid)
    return (*(getattr(event, name) for name in SAME if name != "process"), named)


@pytest.mark.parametrize("way", loader.WAYS[1:])
def test_the_same_opens_are_told_alike_by_every_way(way: str, opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "renamed", CPUID)
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"203:0 does not open here: {error}")
    if reason := loads(way):
        pytest.skip(f"{way} does not load here: {reason}")
    best, _ = told("cgroup/dev", opener, path)
    other, events = told(way, opener, path)
    assert [e.path for e in other] == [str(path), "renamed"]
    assert [comparable(e) for e in other] == [comparable(e) for e in best]
    assert {e.source for e in best} == {"cgroup/dev"} and {e.source for e in other} == {way}
    expected = "opened" if ways.BY_NAME[way].gives_results else "attempted"
    assert {e.state for e in other} == {expected}
    pid = other[0].process.pid
    assert [e.pid for e in events if isinstance(e, ExitEvent) and e.pid == pid] == [pid]


def test_descriptors_show_what_succeeded_and_nothing_else(opener: Path, tmp_path: Path) -> None:
    good, absent = node(tmp_path / "good", FULL), tmp_path / "absent"
    with probing(Settings(return_values=True), way="tracepoint") as probe:
        node(absent, (195, 9))
        run(opener, "open", absent)
        run(opener, "access", good)
        run(opener, "open", good)
        with open(good, "rb"):
            events = drained(probe)
            held = [one for one in probe.holders() if one.pid == os.getpid()]
        (tmp_path / "file").write_text("")
        assert opens(drained(probe)) == []
    assert [(e.path, e.state, e.how) for e in opens(events)] == [(str(good), "opened", "open")] * 2
    assert not [e for e in events if isinstance(e, OpenReturn)]
    assert {(one.major, one.minor) for one in held} == {FULL}


def test_a_dry_run_works_where_nothing_can_be_denied(opener: Path, tmp_path: Path) -> None:
    from tests.support.probes import control_groups, opened_in

    path = node(tmp_path / "n", FULL)
    with control_groups() as make, probing(EVERYTHING, way="tracepoint") as probe:
        group = make("")
        probe.deny(str(group), dry_run=True)
        assert opened_in(group, opener, path)
        (event,) = opens(drained(probe))
        assert (event.state, event.denial) == ("opened", "would deny")


def test_tools_and_the_limit_are_the_same_in_the_other_object(opener: Path, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    path = node(tmp_path / "n", FULL)
    settings = Settings(limit_events=3, limit_window_seconds=3600)
    with probing(settings, way="tracepoint") as probe:
        run(tool)
        run(opener, "open", path, "1000")
        events = drained(probe)
        (count,) = [one for one in probe.counts() if one.hits == 1000]
    assert [e.tool for e in events if isinstance(e, ExecEvent) and e.tool] == ["nvidia-smi"]
    assert (count.major, count.minor, count.how) == (*FULL, "open")
    assert len([e for e in opens(events) if e.process.argv and "1000" in e.process.argv]) == 3


def test_a_descriptor_that_only_names_a_node_is_no_holder(tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        descriptor = os.open(path, os.O_PATH)
        try:
            assert not [one for one in probe.holders() if one.descriptor == descriptor]
        finally:
            os.close(descriptor)
        assert by(os.getpid(), drained(probe)) == []
