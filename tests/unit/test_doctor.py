"""The doctor: what works, what does not, why, and what to do about it."""

from __future__ import annotations

import json

from msgspec.structs import replace

from gpuwarden import doctor
from gpuwarden.model import Gap, SensorRun
from tests.support.nodes import NodeBuilder

PTRACE, SYSLOG = 1 << 19, 1 << 34


def examined(node: NodeBuilder, width: int = 100) -> tuple[str, bool]:
    return doctor.examine(node.snapshot(), as_json=False, width=width)


def test_a_sound_node_is_sound_and_names_every_sensor_and_source(node: NodeBuilder) -> None:
    text, sound = examined(node)
    assert sound
    for name in (*node.sensors, *node.sources):
        assert any(line.startswith(f"{name} ") for line in text.splitlines())


def test_a_failed_sensor_says_why_and_what_to_do(node: NodeBuilder) -> None:
    node.sensors["nvml"] = SensorRun(
        name="nvml", state="failed", reason="the library was refused", remedy="correct its owner"
    )
    text, sound = examined(node)
    assert not sound
    lines = text.splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("nvml"))
    assert "failed" in lines[row]
    assert "the library was refused" in lines[row]
    assert lines[row + 1].strip() == "→ correct its owner"


def test_a_failed_source_is_not_sound_and_an_absent_one_is(node: NodeBuilder) -> None:
    assert examined(node)[1]
    node.source("slurm", "failed")
    assert not examined(node)[1]


def test_an_absent_sensor_is_no_failure(node: NodeBuilder) -> None:
    node.sensor("amd", "absent", "no amdgpu driver here")
    text, sound = examined(node)
    assert sound
    assert "no amdgpu driver here" in text


def test_the_vantage_names_the_pid_namespace_and_each_missing_right() -> None:
    node = NodeBuilder(host_pid_namespace=False, observer_uid=1000, observer_capabilities=0)
    told = doctor.vantage(node.node)
    assert "hostPID: true" in told[0]
    assert any("CAP_SYS_PTRACE" in line for line in told)
    assert any(line.startswith("Run as root") for line in told)
    rights = replace(node.node, observer_capabilities=PTRACE | SYSLOG, host_pid_namespace=True)
    told = doctor.vantage(rights)
    assert told[0].startswith("The host's pid namespace")
    assert not any("CAP_SYS_PTRACE" in line or "CAP_SYSLOG" in line for line in told)
    assert any("CAP_SYS_ADMIN" in line for line in told)


def test_nothing_is_claimed_of_a_vantage_that_was_not_read() -> None:
    node = NodeBuilder(host_pid_namespace=None, observer_uid=None, observer_capabilities=None)
    assert doctor.vantage(node.node) == ()


def test_gaps_are_listed_with_their_count(node: NodeBuilder) -> None:
    node.gaps.append(
        Gap(
            sensor="holders",
            what="descriptors of processes",
            reason="permission denied",
            remedy="run as root",
            count=3,
        )
    )
    text, _ = examined(node)
    assert "  holders: descriptors of processes (3): permission denied → run as root" in text


def test_long_reasons_are_cut_to_the_width_and_escaped(node: NodeBuilder) -> None:
    node.sensor("nvml", "absent", "x\x1b[2J" + "y" * 300)
    text, _ = examined(node, width=80)
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("nvml"))
    assert len(row) == 80
    assert row.endswith("…")


def test_json_carries_the_whole_diagnosis(node: NodeBuilder) -> None:
    text, sound = doctor.examine(node.snapshot(), as_json=True, width=80)
    document = json.loads(text)
    assert sound
    assert (document["schema"], document["version"]) == ("gpuwarden.doctor", 1)
    assert {s["name"] for s in document["sensors"]} == set(node.sensors)
    assert document["vantage"]
