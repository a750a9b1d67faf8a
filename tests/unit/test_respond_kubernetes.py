"""Cordon and delete-pod against a server that plays Kubernetes' API: a mock, held to its schemas.

No API server can be had here: RBAC, admission and what a kubelet does are not shown by this.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwarden.cluster import Cluster
from gpuwarden.errors import Denied, GpuwardenError, TimedOut, Unavailable
from gpuwarden.model import CgroupPlacement, NodeFacts, Process, Snapshot
from gpuwarden.respond.kubernetes import Cordon, DeletePod
from gpuwarden.respond.step import Target
from tests.support.kubernetes_api import Api, check_delete_options
from tests.support.kubernetes_target import (
    BOOT,
    NODE,
    POD,
    UID,
    add_pod,
    asked,
    deleting,
    done,
    impatient,
    known_target,
    planned,
    target,
)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with known_target(tmp_path, monkeypatch) as found:
        yield found


# ---------------------------------------------------------------- cordon


def test_a_node_is_cordoned_and_the_plan_says_what_that_means(api: Api) -> None:
    step = planned(Cordon().step(target()))
    assert (step.power, step.refused, step.automatic) == ("deny", "", True)
    assert "gpu-node-1" in step.changes
    assert step.undo == "kubectl uncordon gpu-node-1"
    assert not asked(api, "PATCH")
    outcome = done(Cordon(), target())
    assert (outcome.done, outcome.complete) == (True, True)
    assert outcome.undo == "kubectl uncordon gpu-node-1"
    assert api.nodes["gpu-node-1"]["spec"] == {"unschedulable": True}
    assert asked(api, "PATCH") == [
        {"metadata": {"resourceVersion": "7"}, "spec": {"unschedulable": True}}
    ]
    assert {request.token for request in api.asked} == {"Bearer a-token"}


def test_what_others_cordoned_is_theirs(api: Api) -> None:
    api.add_node("gpu-node-1", boot_id=BOOT, unschedulable=True)
    step = planned(Cordon().step(target()))
    assert "already" in step.refused
    assert "kubectl" not in step.undo
    outcome = done(Cordon(), target())
    assert outcome.done
    assert outcome.undo == ""
    assert not asked(api, "PATCH")


def test_a_node_that_is_another_machine_is_not_touched(api: Api) -> None:
    api.add_node("gpu-node-1", boot_id="another")
    step = planned(Cordon().step(target()))
    assert not step.automatic
    assert "boot id" in step.changes
    assert "kubectl cordon gpu-node-1" in step.commands
    with pytest.raises(Unavailable, match="boot id"):
        done(Cordon(), target())
    assert not asked(api, "PATCH")


def test_a_node_is_found_by_its_pods_when_the_hostname_is_another(api: Api) -> None:
    one = target()
    node = replace(one.snapshot.node, hostname="ip-10-0-0-1")
    other = replace(one, snapshot=replace(one.snapshot, node=node))
    assert done(Cordon(), other).complete
    assert api.nodes["gpu-node-1"]["spec"] == {"unschedulable": True}


def test_the_name_that_the_chart_tells_comes_first(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.add_node("told", boot_id=BOOT)
    monkeypatch.setenv("NODE_NAME", "told")
    assert done(Cordon(), target()).complete
    assert api.nodes["told"]["spec"] == {"unschedulable": True}
    assert api.nodes["gpu-node-1"]["spec"] == {}


def test_a_node_that_changes_meanwhile_is_read_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflicts = [409, 409]
    plain = api.answer

    def answer(request: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
        if request.method == "PATCH" and conflicts:
            return conflicts.pop(), None
        return plain(request, query)

    monkeypatch.setattr(api, "answer", answer)
    assert done(Cordon(), target()).complete
    conflicts[:] = [409] * 9
    api.add_node("gpu-node-1", boot_id=BOOT)
    with pytest.raises(Unavailable):
        done(Cordon(), target())


@pytest.mark.parametrize(
    ("status", "error"), [(403, Denied), (401, Denied), (500, Unavailable), (504, TimedOut)]
)
def test_what_the_server_refuses_is_printed_as_commands(
    api: Api, status: int, error: type[GpuwardenError]
) -> None:
    api.answers = {f"GET {NODE}": status, f"GET {POD}": status}
    for step in (Cordon().step(target()), deleting().step(target())):
        assert not planned(step).automatic
        assert str(status) in planned(step).changes
        assert planned(step).commands
    with pytest.raises(error):
        done(Cordon(), target())
    with pytest.raises(error):
        done(deleting(), target())


def test_a_right_to_read_alone_is_not_enough(api: Api) -> None:
    api.answers = {f"PATCH {NODE}": 403, f"DELETE {POD}": 403}
    with pytest.raises(Denied, match="403"):
        done(Cordon(), target())
    with pytest.raises(Denied, match="403"):
        done(deleting(), target())
    assert ("training", "job-7-abcde") in api.pods


def test_a_server_that_does_not_answer_does_not_hold_the_plan(api: Api) -> None:
    api.hang = {f"GET {NODE}", f"GET {POD}"}
    assert not planned(Cordon(impatient).step(target())).automatic
    assert not planned(DeletePod(5.0, impatient).step(target())).automatic


def test_a_cordon_that_does_not_last_is_told(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = api.answer

    def answer(request: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
        status, body = plain(request, query)
        if request.method == "PATCH":
            api.add_node("gpu-node-1", boot_id=BOOT)
        return status, body

    monkeypatch.setattr(api, "answer", answer)
    outcome = done(Cordon(), target())
    assert (outcome.done, outcome.complete) == (True, False)
    assert "schedulable again" in outcome.lines[0]


# ---------------------------------------------------------------- delete-pod


def test_the_pod_is_deleted_by_its_uid(api: Api) -> None:
    step = planned(deleting().step(target()))
    assert (step.power, step.refused, step.automatic) == ("kill", "", True)
    assert "Job/job-7 makes a new one" in step.changes
    assert step.hurts == ("the pod's other containers end as well: mesh",)
    assert not asked(api, "DELETE")
    outcome = done(deleting(), target())
    assert (outcome.done, outcome.complete) == (True, True)
    assert any("Job/job-7" in line for line in outcome.lines)
    assert asked(api, "DELETE") == [
        {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 3,
            "preconditions": {"uid": UID},
        }
    ]


def test_a_new_pod_of_that_name_is_not_taken_for_the_old_one(api: Api) -> None:
    add_pod(api, metadata={"uid": "another"})
    assert "gone" in planned(deleting().step(target())).refused
    assert not done(deleting(), target()).done
    assert not asked(api, "DELETE")


def test_a_pod_that_is_replaced_at_the_last_moment_is_not_deleted(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = api.answer

    def answer(request: Any, query: dict[str, list[str]]) -> tuple[int, Any]:
        if request.method == "DELETE":
            add_pod(api, metadata={"uid": "another"})
        return plain(request, query)

    monkeypatch.setattr(api, "answer", answer)
    outcome = done(deleting(), target())
    assert not outcome.done
    assert "another" in outcome.lines[0]
    assert ("training", "job-7-abcde") in api.pods


def test_a_pod_that_comes_back_is_told(api: Api) -> None:
    api.comes_back.add(("training", "job-7-abcde"))
    outcome = done(deleting(), target())
    assert (outcome.done, outcome.complete) == (True, False)
    assert "uid-of-the-next" in outcome.lines[0]


def test_a_pod_that_stays_is_told_with_what_holds_it(api: Api) -> None:
    add_pod(api, metadata={"finalizers": ["example.net/hold"]})
    api.stubborn.add(("training", "job-7-abcde"))
    add = {"terminationGracePeriodSeconds": 1}
    api.pods["training", "job-7-abcde"]["spec"] |= add
    outcome = done(deleting(0.0), target())
    assert (outcome.done, outcome.complete) == (True, False)
    assert "example.net/hold" in outcome.lines[0]


def test_a_long_grace_is_not_granted(api: Api) -> None:
    add_pod(api, spec={"terminationGracePeriodSeconds": 86400})
    done(deleting(), target())
    assert asked(api, "DELETE")[0]["gracePeriodSeconds"] == 30


FORGED: dict[str, Callable[[], Target]] = {
    "not confirmed": partial(target, confirmed=False),
    "a label that the kubelet's group does not confirm": lambda: replace(
        target(), process=Process(pid=1, start_time_ticks=1, cgroup=CgroupPlacement())
    ),
    "no process": lambda: replace(target(), process=None),
    "a container that the pod has not": partial(target, id="c" * 64),
    "a name that is none": partial(target, pod_name="../../nodes/gpu-node-1"),
    "a name for the shell": partial(target, pod_name="$(touch x)"),
    "a namespace that is none": partial(target, pod_namespace=None),
    "a uid that is none": partial(target, pod_uid="x"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_pod_that_is_not_proven_is_not_deleted(api: Api, name: str) -> None:
    one = FORGED[name]()
    step = planned(deleting().step(one))
    assert step.refused
    assert not step.commands
    with pytest.raises(GpuwardenError):
        done(deleting(), one)
    assert not asked(api, "DELETE")


def test_a_static_pod_is_said_to_be_one(api: Api) -> None:
    add_pod(api, metadata={"annotations": {"kubernetes.io/config.mirror": "x"}})
    assert "static pod" in planned(deleting().step(target())).refused
    with pytest.raises(Denied, match="static pod"):
        done(deleting(), target())


def test_what_is_in_no_pod_has_no_such_step(api: Api) -> None:
    assert deleting().step(target(pod_uid=None)) is None
    assert deleting().step(replace(target(), container=None)) is None
    bare = Snapshot(taken_at_ns=1, node=NodeFacts(hostname="h", boot_id=BOOT))
    assert Cordon().step(replace(target(), snapshot=bare)) is None
    assert api.asked == []


def test_without_a_cluster_commands_are_printed_that_delete_by_uid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    step = planned(deleting().step(target()))
    assert not step.automatic
    assert step.hurts == ("the pod's other containers end as well: mesh",)
    command = step.commands[0]
    words = shlex.split(command.split(" | ")[1])
    assert words == ["kubectl", "delete", "--raw", POD, "-f", "-"]
    sent = subprocess.run(
        ["sh", "-c", command.split(" | ")[0]], capture_output=True, check=True, text=True
    ).stdout
    check_delete_options(json.loads(sent))
    assert json.loads(sent)["preconditions"] == {"uid": UID}
    cordon = planned(Cordon().step(target()))
    assert not cordon.automatic
    assert cordon.commands[-1] == "kubectl cordon gpu-node-1"
    with pytest.raises(Unavailable):
        done(Cordon(), target())


def test_a_configuration_that_is_none_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, text in enumerate(("", "a: [", "{}", "clusters: 7")):
        (tmp_path / str(number)).write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / str(number)))
        with pytest.raises(Unavailable, match="no cluster"):
            Cluster()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="no cluster"):
        Cluster()


def test_a_pod_without_a_service_account_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(Unavailable, match="no cluster"):
        Cluster()
    step = planned(deleting().step(target()))
    assert not step.automatic
    assert step.commands


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"\xff", b'{"kind":7}', b"null"])
def test_an_answer_that_is_none_is_no_other_exception(
    api: Api, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    api.raw = body
    for read in (lambda c: c.node("gpu-node-1"), lambda c: list(c.pods())):
        try:
            read(Cluster())
        except GpuwardenError:
            continue
