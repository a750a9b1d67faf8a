"""Which control group is denied, and which never is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpuwarden.errors import UsageError
from gpuwarden.finding import VERDICTS, Row, Verdict
from gpuwarden.host import Host
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.groups import Group, groups_of, parse_lines
from gpuwarden.respond import denied_group
from gpuwarden.respond.denied_group import DeniedGroup, choose
from tests.support.responding import PID, target_of

HOST = Host()
OTHER = 77


class Nobody:
    """Nobody is out of bounds, but for those named."""

    def __init__(self, **reasons: str) -> None:
        self.table: dict[int, Any] = {}
        self._reasons = reasons

    def reason(self, pid: int) -> str:
        return self._reasons.get(f"pid_{pid}", "")


def row(verdict: Verdict, **fields: Any) -> Row:
    return Row(gpu_id="0", gpu="0", pid=OTHER, verdict=verdict, severity="info", **fields)


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chooses among groups of these paths, with these processes in each of them."""

    def picked(
        *paths: str,
        members: Sequence[int] = (PID,),
        rows: Sequence[Row] = (),
        untouchable: Any = None,
        hierarchies: Sequence[int] = (),
    ) -> DeniedGroup:
        numbers = hierarchies or range(len(paths))
        groups = [
            Group(GroupKey(number, 100 + at), path, f"/sys/fs/cgroup{path}")
            for at, (number, path) in enumerate(zip(numbers, paths, strict=True))
        ]
        monkeypatch.setattr(denied_group, "groups_of", lambda *a, **b: groups)
        monkeypatch.setattr(denied_group, "_members", lambda group: list(members))
        target = target_of("cryptominer")
        who: Any = untouchable or Nobody()
        return choose(HOST, target, who, rows)

    return picked


@pytest.mark.parametrize(
    "path",
    ["/system.slice/x.service", "/user.slice/user-1.slice/session-3.scope", "/mine",
     "/a/job_7/step_0/task_0", "/user.slice/user-1.slice/user@1.service/app.slice/x.scope"],
)  # fmt: skip
def test_a_process_is_denied_by_its_innermost_group(pick: Any, path: str) -> None:
    chosen = pick(path, members=(PID, OTHER))
    assert [one.path for one in chosen.groups] == [path]
    assert chosen.others == (f"pid {OTHER}",)


@pytest.mark.parametrize(
    "path",
    ["/system.slice", "/user.slice/user-1000.slice", "/kubepods",
     "/kubepods.slice/kubepods-pod1.slice", "/kubepods/pod0a1b2c3d-0000-4000-8000-000000000001",
     "/docker", "/slurm/uid_1000",
     "/system.slice/slurmstepd.scope", "/user.slice/user-1.slice/user@1.service", "/init.scope"],
)  # fmt: skip
def test_what_holds_several_owners_is_not_denied(pick: Any, path: str) -> None:
    with pytest.raises(UsageError, match="kept for many"):
        pick(path)


def test_the_root_group_is_not_denied(pick: Any) -> None:
    with pytest.raises(UsageError, match="root group"):
        pick()


def test_version_2_comes_first_and_another_where_that_is_kept_for_many(pick: Any) -> None:
    chosen = pick("/a", "/b", hierarchies=(5, 0))
    assert [one.path for one in chosen.groups] == ["/b"]
    chosen = pick("/a", "/x.slice", hierarchies=(5, 0))
    assert [one.path for one in chosen.groups] == ["/a"]


@pytest.mark.parametrize("verdict", VERDICTS)
def test_with_somebody_else_only_where_that_ones_verdict_grants_it(
    pick: Any, verdict: Verdict
) -> None:
    fields: dict[str, Any] = {"members": (PID, OTHER), "rows": (row(verdict),)}
    if verdict in ("rogue-container", "suspicious", "cryptominer"):
        assert pick("/x.service", **fields).others
        return
    with pytest.raises(UsageError, match=verdict):
        pick("/x.service", **fields)


def test_not_with_somebody_whom_the_policy_excepts(pick: Any) -> None:
    rows = (row("cryptominer", silenced_by="exception"),)
    with pytest.raises(UsageError, match="excepts"):
        pick("/x.service", members=(PID, OTHER), rows=rows)


def test_not_with_gpuwarden_or_its_shell_in_it(pick: Any) -> None:
    with pytest.raises(UsageError, match="its shell"):
        pick("/x.service", members=(PID, OTHER), untouchable=Nobody(pid_77="its shell"))


def test_not_with_somebody_who_came_to_a_gpu_since(
    pick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        denied_group, "_holds_an_accelerator", lambda host, target, pid: pid == OTHER
    )
    with pytest.raises(UsageError, match="was not judged"):
        pick("/x.service", members=(PID, OTHER))


def test_lines_that_are_none_are_left_out() -> None:
    text = "0::/a\n5:devices:/b\nx::/c\n6:pids\n99999999999::/d\n7:a,b:c\n"
    assert parse_lines(text) == [(0, (), "/a"), (5, ("devices",), "/b")]


def test_a_process_that_is_gone_is_in_no_group() -> None:
    assert groups_of(1 << 22, HOST) == []
