"""Nodes with device opens in a few lines, judged as the daemon does: by the rules over opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gpuwarden.finding import Finding, Report
from gpuwarden.judge import judge
from gpuwarden.model import DeviceNode, DeviceOpen, NodeKind, Snapshot, ToolRun
from gpuwarden.policy import Policy
from gpuwarden.rules.registry import OPEN_RULES, Rule
from tests.support.nodes import (
    SECOND_NS,
    TAKEN_AT_NS,
    NodeBuilder,
    container_id,
    executable,
    policy_of,
)

NUMBERS: dict[NodeKind, tuple[int, int, str]] = {
    "nvidia-ctl": (195, 255, "/dev/nvidiactl"),
    "nvidia-uvm": (510, 0, "/dev/nvidia-uvm"),
    "kfd": (241, 0, "/dev/kfd"),
    "drm-render": (226, 128, "/dev/dri/renderD128"),
}
RUNC = executable("/usr/bin/runc", inode=777)


class OpenNode(NodeBuilder):
    """A builder that also takes opens and tool runs; init is always there, as it is for watch."""

    rules: Sequence[Rule] = OPEN_RULES

    def __init__(self, **node: Any) -> None:
        super().__init__(**node)
        self.opens: list[DeviceOpen] = []
        self.tool_runs: list[ToolRun] = []
        self.gpu(0)
        self.init()

    def _ticks(self, pid: int) -> int:
        return next((p.start_time_ticks for p in self.processes if p.pid == pid), 100_000 + pid)

    def open(self, pid: int, gpu: int = 0, *, kind: NodeKind = "nvidia-gpu", **fields: Any) -> None:
        """What a process did with /dev/nvidia<gpu>, unless another kind is named: opened it."""
        major, minor, path = NUMBERS.get(kind, (195, gpu, f"/dev/nvidia{gpu}"))
        values: dict[str, Any] = {
            "how": "open",
            "state": "opened",
            "start_time_ticks": self._ticks(pid),
            "major": major,
            "minor": minor,
            "path": path,
            "first_ns": TAKEN_AT_NS - SECOND_NS,
            "last_ns": TAKEN_AT_NS,
            "renamed": False,
            **fields,
        }
        self.opens.append(DeviceOpen(pid=pid, kind=kind, **values))

    def uses_gpu(self, pid: int, gpu: int = 0, **fields: Any) -> None:
        """The opens that a CUDA context needs."""
        for kind in ("nvidia-ctl", "nvidia-uvm", "nvidia-gpu"):
            self.open(pid, gpu, kind=kind, **fields)

    def tool(self, pid: int, name: str, **fields: Any) -> None:
        """A GPU management tool that a process was."""
        values = {"start_time_ticks": self._ticks(pid), "at_ns": TAKEN_AT_NS, **fields}
        self.tool_runs.append(ToolRun(pid=pid, tool=name, **values))

    def node_of(self, gpu: int = 0) -> None:
        """/dev/nvidia<gpu> as it lies under /dev."""
        self.device_nodes.append(
            DeviceNode(path=f"/dev/nvidia{gpu}", major=195, minor=gpu, kind="nvidia-gpu")
        )

    def runc_init(self, name: str, **container: Any) -> int:
        """The first process of a container that runc is making: runc's own file, its own pid 1."""
        self.container(name, **container)
        self.process(
            40,
            user="root",
            exe=RUNC,
            argv=("runc", "create"),
            cgroup="/system.slice/docker.service",
        )
        copy = replace(RUNC, path="/", path_is_genuine=None)
        return self.process(
            41,
            user="root",
            exe=copy,
            argv=("runc", "init"),
            container=name,
            comm="runc:[2:INIT]",
            ppid=40,
            pids_in_namespaces=(41, 1),
        )

    def snapshot(self) -> Snapshot:
        return replace(super().snapshot(), opens=tuple(self.opens), tool_runs=tuple(self.tool_runs))

    def judge(self, policy: str | Policy = "") -> Report:
        return judge(self.snapshot(), policy_of(policy), None, self.rules)

    def found(self, rule: str, policy: str | Policy = "") -> list[Finding]:
        """The findings of one rule that are not silenced."""
        report = self.judge(policy)
        assert all(run.state == "ok" for run in report.rules), report.rules
        return [f for f in report.findings if f.rule == rule and f.silenced_by is None]

    def one(self, rule: str, policy: str | Policy = "") -> Finding:
        """The one finding of a rule."""
        found = self.found(rule, policy)
        assert len(found) == 1, found
        return found[0]


def digest(name: str) -> str:
    """The digest that the builder gives to a container's image."""
    return f"sha256:{container_id('d' + name)}"


__all__ = ["RUNC", "OpenNode", "digest"]


def texts(finding: Finding) -> str:
    """What a finding's evidence says, a line each."""
    return "\n".join(e.text for e in finding.evidence)
