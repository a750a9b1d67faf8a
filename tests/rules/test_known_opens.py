"""Device opens of workloads that the policy knows: silenced, and until when."""

from __future__ import annotations

import pytest

from tests.rules.open_node import OpenNode, digest

CONTAINER = "container_opens_accelerator"
TOOL = "gpu_tool_in_container"


def known(condition: str, expires: str = "") -> str:
    more = f", expires: {expires}" if expires else ""
    return f"user_known_gpu_workloads: [{{match: {{{condition}}}, reason: reviewed{more}}}]\n"


@pytest.mark.parametrize(
    ("condition", "silent"),
    [
        (f"image_digest: '{digest('probe')}'", True),
        ("image: registry.example/probe, pod_namespace: research", True),
        ("pod_labels: {app: probe}", True),
        ("pod_labels: {app: probe}, binary: /usr/bin/python3.11, user: root", True),
        ("pod_labels: {app: probe}, binary: /usr/bin/perl", False),
        ("pod_labels: {app: probe}, user: alice", False),
        ("pod_labels: {app: other}", False),
        ("image: probe", False),
    ],
)
def test_a_known_gpu_workload_is_silenced_with_its_reason(
    kube: OpenNode, condition: str, silent: bool
) -> None:
    kube.pod("probe", pod_labels={"app": "probe"})
    kube.process(10, container="probe", user="root")
    kube.open(10)
    kube.tool(10, "nvidia-smi")
    findings = kube.judge(known(condition)).findings
    assert {f.rule for f in findings} == {CONTAINER, TOOL}
    why = "known GPU workload of the policy: reviewed" if silent else None
    assert {f.silenced_by for f in findings} == {why}


def test_it_is_silent_to_its_last_day_and_not_after(kube: OpenNode) -> None:
    kube.pod("probe")
    kube.process(10, container="probe", user="root")
    kube.open(10)
    image = "image: registry.example/probe"
    last = kube.judge(known(image, "2026-01-01")).findings[0]
    assert last.silenced_by == ("known GPU workload of the policy: reviewed (until 2026-01-01)")
    assert kube.judge(known(image, "2025-12-31")).findings[0].silenced_by is None


def test_a_container_that_no_runtime_confirms_is_not_known(kube: OpenNode) -> None:
    kube.pod("probe", confirmed=False)
    kube.process(10, container="probe", user="root")
    kube.open(10)
    assert kube.found(CONTAINER, known("image: registry.example/probe"))


def test_another_process_with_the_number_of_the_known_one_silences_nothing(kube: OpenNode) -> None:
    kube.pod("probe")
    kube.process(10, container="probe", user="root")
    kube.open(10, start_time_ticks=5, container_state="unknown")
    assert kube.found(CONTAINER, known("image: registry.example/probe"))
