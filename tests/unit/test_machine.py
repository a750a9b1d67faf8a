"""The name of the machine: the kernel's, or in a pod the one that Kubernetes gives its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.host import Host
from gpuwarden.sensors.machine import NODE_VARIABLE, read_machine


def mounted(directory: Path) -> Host:
    """This machine again, mounted below a directory as in a DaemonSet."""
    (directory / "host").symlink_to("/")
    return Host(root=str(directory / "host"))


def test_a_pod_is_told_the_name_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mounted(tmp_path)
    assert host.is_live and not host.is_local
    own = read_machine(Host()).hostname
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    assert read_machine(host).hostname == own
    monkeypatch.setenv(NODE_VARIABLE, " ")
    assert read_machine(host).hostname == own
    monkeypatch.setenv(NODE_VARIABLE, "gpu-node-1")
    assert read_machine(host).hostname == "gpu-node-1"
    # Not in a pod the variable may be anything's, such as a build server's.
    assert read_machine(Host()).hostname == own


def test_a_recorded_node_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_VARIABLE, "gpu-node-1")
    folder = tmp_path / "proc/sys/kernel"
    folder.mkdir(parents=True)
    (folder / "hostname").write_text("recorded-1\n")
    assert read_machine(Host(root=str(tmp_path))).hostname == "recorded-1"
