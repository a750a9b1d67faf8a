"""Whom enforcement denies, which groups are a container's own, and what a reload changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden import enforcement
from gpuwarden.enforcement import (
    GROUPS_LIMIT,
    Decision,
    Enforcer,
    located_by_event,
    located_by_process,
)
from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import FileStatus, Host
from gpuwarden.model import Container
from gpuwarden.policy import EnforceRule, Match, Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.events import GroupEvent

ID = "ab" * 32
OTHER = "cd" * 32
ONE, TWO, THREE = GroupKey(0, 101), GroupKey(0, 102), GroupKey(4, 103)
POLICY = parse_policy(
    b"""
enforce:
  - match: {pod_namespace: sandbox}
    reason: nobody computes there
  - match: {image: registry.example/tool}
    reason: the tool needs no GPU
""",
    "policy.yaml",
)


class Groups:
    """What a probe was told: the denied groups, and whether for real."""

    def __init__(self) -> None:
        self.denied: dict[GroupKey, bool] = {}
        self.refused: set[GroupKey] = set()

    def deny(self, group: GroupKey, dry_run: bool) -> None:
        if group in self.refused:
            raise Unavailable("no room in the kernel's table")
        self.denied[group] = dry_run

    def allow(self, group: GroupKey) -> None:
        del self.denied[group]


def pod(identity: str = ID, **fields: Any) -> Container:
    values = {"runtime": "containerd", "confirmed": True, "pod_namespace": "sandbox", **fields}
    return Container(id=identity, **values)


def new(policy: Policy = POLICY, *, dry_run: bool = False) -> tuple[Enforcer, Groups]:
    groups = Groups()
    return Enforcer(policy, groups.deny, groups.allow, dry_run=dry_run), groups


def test_who_is_named_is_denied_and_who_is_not_is_not() -> None:
    enforcer, groups = new()
    decision = enforcer.container(pod(pod_name="a", name="main", image="x"), [ONE])
    assert decision is not None
    assert (decision.state, decision.entry, decision.groups) == ("denied", 0, (ONE,))
    assert enforcer.container(pod(OTHER, pod_namespace="research"), [TWO]) is None
    assert groups.denied == {ONE: False}
    assert enforcer.decisions() == (decision,)
    assert decision.text == (
        f"denied: pod sandbox/a, container main ({ID[:12]}, image x) by enforce[0]: "
        "nobody computes there; groups 0:101"
    )


@pytest.mark.parametrize(
    "match",
    [
        Match(pod_namespace="sandbox"),
        Match(pod_name="trainer-*"),
        Match(pod_labels={"tier": "free"}),
        Match(image="registry.example/tool"),
        Match(image_digest="sha256:" + "0" * 64),
        Match(pod_namespace=["x", "sandbox"], image="registry.example/tool:2"),
    ],
    ids=str,
)
def test_every_condition_of_a_container_holds_and_a_missing_one_does_not(match: Match) -> None:
    enforcer, groups = new(Policy(enforce=[EnforceRule(match=match, reason="r")]))
    whole = pod(
        pod_name="trainer-7",
        pod_labels={"tier": "free"},
        image="registry.example/tool:2",
        image_digest="sha256:" + "0" * 64,
    )
    bare = Container(id=OTHER, runtime="containerd", confirmed=True)
    assert enforcer.container(bare, [TWO]) is None
    decision = enforcer.container(whole, [ONE])
    assert decision is not None and decision.state == "denied"
    assert set(groups.denied) == {ONE}


@pytest.mark.parametrize("match", [Match(), Match(user="root"), Match(binary="/bin/x")], ids=str)
def test_conditions_of_others_name_no_container(match: Match) -> None:
    enforcer, groups = new(Policy(enforce=[EnforceRule(match=match, reason="r")]))
    assert enforcer.container(pod(), [ONE]) is None
    assert groups.denied == {}


def test_a_claim_is_never_acted_on_until_it_is_confirmed() -> None:
    enforcer, groups = new()
    decision = enforcer.container(pod(confirmed=False), [ONE])
    assert decision is not None and decision.state == "not denied"
    assert "only claimed" in decision.why and groups.denied == {}
    confirmed = enforcer.container(pod(), [])
    assert confirmed is not None and confirmed.groups == (ONE,)
    # A later claim of another kind takes nothing back.
    again = enforcer.container(pod(confirmed=False, pod_namespace="research"), [TWO])
    assert again is not None and again.groups == (ONE, TWO)
    assert set(groups.denied) == {ONE, TWO}


def test_groups_that_become_known_later_are_denied_as_well() -> None:
    enforcer, groups = new()
    waiting = enforcer.container(pod(), [])
    assert waiting is not None and waiting.state == "not denied"
    assert "not known yet" in waiting.why
    enforcer.container(pod(), [ONE])
    enforcer.container(pod(), [THREE, ONE])
    assert groups.denied == {ONE: False, THREE: False}
    (decision,) = enforcer.decisions()
    assert (decision.state, decision.groups) == ("denied", (ONE, THREE))


def test_one_that_is_gone_is_allowed_and_forgotten() -> None:
    enforcer, groups = new()
    enforcer.container(pod(), [ONE, TWO])
    enforcer.container(pod(OTHER), [THREE])
    enforcer.gone(ID)
    enforcer.gone("never met")
    assert set(groups.denied) == {THREE}
    assert [d.container.id for d in enforcer.decisions()] == [OTHER]


def test_a_group_of_two_stays_denied_until_both_are_gone() -> None:
    enforcer, groups = new()
    enforcer.container(pod(), [ONE])
    enforcer.container(pod(OTHER), [ONE])
    enforcer.gone(ID)
    assert set(groups.denied) == {ONE}
    enforcer.gone(OTHER)
    assert groups.denied == {}


def test_a_reload_allows_who_is_no_longer_named_and_denies_who_is_now() -> None:
    enforcer, groups = new()
    enforcer.container(pod(), [ONE])
    enforcer.container(pod(OTHER, pod_namespace="research"), [TWO])
    rule = EnforceRule(match=Match(pod_namespace="research"), reason="paused")
    enforcer.reload(Policy(enforce=[rule]))
    assert set(groups.denied) == {TWO}
    assert [(d.container.id, d.reason) for d in enforcer.decisions()] == [(OTHER, "paused")]
    enforcer.reload(Policy())
    assert groups.denied == {} and enforcer.decisions() == ()


def test_a_dry_run_says_what_it_would_have_denied() -> None:
    enforcer, groups = new(dry_run=True)
    decision = enforcer.container(pod(), [ONE])
    assert decision is not None and decision.state == "would deny"
    assert decision.text.startswith("would deny: container ")
    assert groups.denied == {ONE: True}


def test_what_could_not_be_denied_is_said_and_tried_again() -> None:
    enforcer, groups = new()
    groups.refused.add(TWO)
    decision = enforcer.container(pod(), [ONE, TWO])
    assert decision is not None
    assert (decision.state, decision.groups) == ("failed", (ONE,))
    assert decision.why == "group 0:102: no room in the kernel's table"
    groups.refused.clear()
    decision = enforcer.container(pod(), [])
    assert decision is not None and decision.state == "denied"
    assert set(groups.denied) == {ONE, TWO}


def test_a_probe_that_is_gone_keeps_nobody_from_being_forgotten() -> None:
    def gone(group: GroupKey) -> None:
        raise Unavailable("the eBPF probe is not loaded")

    enforcer = Enforcer(POLICY, Groups().deny, gone, dry_run=False)
    enforcer.container(pod(), [ONE])
    enforcer.gone(ID)
    assert enforcer.decisions() == ()


def test_many_groups_do_not_push_the_first_ones_out() -> None:
    enforcer, groups = new()
    enforcer.container(pod(), [ONE])
    decision: Decision | None = None
    for number in range(200, 200 + GROUPS_LIMIT):
        decision = enforcer.container(pod(), [GroupKey(0, number)])
    assert decision is not None and decision.state == "failed"
    assert ONE in groups.denied and len(groups.denied) == GROUPS_LIMIT


def test_many_containers_are_bounded_and_those_denied_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enforcement, "CONTAINERS_LIMIT", 3)
    enforcer, groups = new()
    enforcer.container(pod(), [ONE])
    for number in range(20):
        enforcer.container(pod(f"{number:064x}", pod_namespace="research"), [])
    enforcer.container(pod(OTHER), [TWO])
    assert set(groups.denied) == {ONE, TWO}
    enforcer.container(pod("ef" * 32), [THREE])
    decision = enforcer.container(pod("12" * 32), [GroupKey(0, 104)])
    assert decision is not None and decision.state == "failed" and "already" in decision.why
    assert set(groups.denied) == {ONE, TWO, THREE} and len(enforcer.decisions()) == 3


# -------------------------------------------------------------------- whose group it is

POD = "0f6e8a0a-1111-2222-3333-444455556677"


class Machine(Host):
    """A machine whose groups are told by text; a group's inode is a number made of its path."""

    def __init__(self, cgroup: str, own: str = "4:devices:/own\n0::/own\n") -> None:
        super().__init__("/")
        self.files = {"/proc/7/cgroup": cgroup, "/proc/self/cgroup": own}
        self.directories: list[str] = []

    def read_bytes(self, path: str, limit: int = 0) -> bytes:
        if path == "/proc/self/mountinfo":
            return (
                b"30 1 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                b"31 1 0:31 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"
                b"32 1 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            )
        if path not in self.files:
            raise Unavailable(f"{path}: not there")
        return self.files[path].encode("utf-8", "surrogateescape")

    def status(self, path: str) -> FileStatus:
        if not path.startswith("/sys/fs/cgroup/"):
            raise Unavailable(f"{path}: not there")
        self.directories.append(path)
        return FileStatus(
            mode=0o40755, uid=0, gid=0, inode=1000 + len(path), size_bytes=0, link_count=1,
            device=(0, 30), special=(0, 0),
        )  # fmt: skip


def event(path: str, hierarchy: int = 0) -> GroupEvent:
    return GroupEvent(at_ns=1, cgroup_id=77, hierarchy=hierarchy, path=path)


@pytest.mark.parametrize(
    ("path", "runtime"),
    [
        (f"/docker/{ID}", "docker"),
        (f"/system.slice/docker-{ID}.scope", "docker"),
        (f"/machine.slice/libpod-{ID}.scope", "podman"),
        (f"/kubepods/burstable/pod{POD}/{ID}", None),
        (
            f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
            "containerd",
        ),
        (f"/system.slice/kubepods-pod{POD.replace('-', '_')}.slice:cri-containerd:{ID}",
         "containerd"),
    ],
)  # fmt: skip
def test_a_containers_own_group_is_known_when_it_is_made(path: str, runtime: str | None) -> None:
    found = located_by_event(Machine(""), event(path))
    assert found is not None
    assert (found.container_id, found.runtime, found.groups) == (ID, runtime, (GroupKey(0, 77),))
    assert found.pod_uid == (POD if "pod" in path.replace("libpod", "") else None)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/kubepods",
        f"/kubepods/burstable/pod{POD}",
        f"/docker/{ID}/init.scope",
        f"/docker/{ID}/{ID}",
        f"/machine.slice/libpod-conmon-{ID}.scope",
        f"/kubepods.slice/crio-conmon-{ID}.scope",
        "/system.slice/docker.service",
        f"/system.slice/backup-{ID[:40]}.service",
        "",
    ],
)
def test_any_other_group_is_nobodys(path: str) -> None:
    assert located_by_event(Machine(""), event(path)) is None


def test_a_group_inside_a_container_is_its_inner_containers() -> None:
    found = located_by_event(Machine(""), event(f"/docker/{ID}/docker/{OTHER}"))
    assert found is not None and found.container_id == OTHER


def test_groups_in_which_the_probe_does_not_look_are_left_alone() -> None:
    assert located_by_event(Machine(""), event(f"/docker/{ID}", hierarchy=9)) is None
    assert located_by_event(Machine(""), event(f"/docker/{ID}", hierarchy=4)) is not None


def test_this_programs_own_container_is_never_denied() -> None:
    own = f"4:devices:/docker/{ID}/x\n0::/docker/{ID}/x\n"
    for hierarchy in (0, 4):
        assert located_by_event(Machine("", own), event(f"/docker/{ID}", hierarchy)) is None
    (mine,) = located_by_process(Machine(f"4:devices:/docker/{ID}\n0::/docker/{ID}\n", own), 7)
    assert mine.groups == ()
    assert located_by_event(Machine("", own), event(f"/docker/{OTHER}")) is not None


def test_a_processs_containers_are_found_from_the_outside_in_with_their_own_groups() -> None:
    machine = Machine(
        f"9:memory:/docker/{ID}/docker/{OTHER}/deep\n"
        f"4:devices:/docker/{ID}/docker/{OTHER}/deep\n"
        f"0::/docker/{ID}/docker/{OTHER}/deep\n"
    )
    outer, inner = located_by_process(machine, 7)
    assert (outer.container_id, inner.container_id) == (ID, OTHER)
    of_outer, of_inner = f"/docker/{ID}", f"/docker/{ID}/docker/{OTHER}"
    assert set(machine.directories) == {
        f"/sys/fs/cgroup/{mount}{path}"
        for mount in ("unified", "devices")
        for path in (of_outer, of_inner)
    }
    assert [group.hierarchy for group in outer.groups] == [4, 0]
    assert set(outer.groups).isdisjoint(inner.groups)


@pytest.mark.parametrize(
    "lines",
    [
        "0::/\n",
        "0::/system.slice/sshd.service\n",
        f"0::/machine.slice/libpod-conmon-{ID}.scope\n",
        f"0::/kubepods/burstable/pod{POD}\n",
    ],
)
def test_a_process_outside_any_container_has_none(lines: str) -> None:
    machine = Machine(lines)
    assert [one for one in located_by_process(machine, 7) if one.groups] == []
    assert machine.directories == []


def test_a_group_that_another_namespace_hides_is_not_guessed() -> None:
    machine = Machine(f"0::/../../docker/{ID}\n")
    (found,) = located_by_process(machine, 7)
    assert (found.container_id, found.groups) == (ID, ())


def test_a_process_that_has_ended_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        located_by_process(Machine(""), 8)


@given(st.text(max_size=200), st.integers(0, 12))
def test_any_path_gives_a_container_or_none(path: str, hierarchy: int) -> None:
    for shown in (path, f"/docker/{ID}{path}", f"{path}/docker-{ID}.scope"):
        found = located_by_event(Machine(""), event(shown, hierarchy))
        assert found is None or found.groups == (GroupKey(hierarchy, 77),)


@given(st.binary(max_size=300))
def test_any_cgroup_file_gives_containers_or_an_error(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for shown in (text, f"0::/docker/{ID}{text}", f"4:devices:{text}/{ID}"):
        machine = Machine(shown)
        try:
            found = located_by_process(machine, 7)
        except GpuwardenError:
            continue
        assert all(ID in one.container_id for one in found if one.groups)
        names = {os.path.basename(path) for path in machine.directories}
        assert all(ID in name for name in names)
