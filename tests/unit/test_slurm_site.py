"""Which of several slurmd on one host counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.expected.slurm.site import find_site
from gpuwarden.sensors.process import stat_lines
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost


class OwnHost(RecordedHost):
    """A recorded host that counts as the one we run on."""

    is_local = True


@pytest.fixture
def host(tmp_path: Path) -> OwnHost:
    for pid, node in ((10, "gpu-a"), (20, "gpu-b")):
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        rest = "0 " * 40
        (folder / "stat").write_text(f"{pid} (slurmd) S 1 {pid} {pid} 0 -1 {rest}")
        conf = f"/etc/{node}/slurm.conf"
        (folder / "cmdline").write_text(f"slurmd\0-f\0{conf}\0-N\0{node}\0")
        (folder / "environ").write_text("")
    return OwnHost(tmp_path)


@pytest.mark.parametrize(
    ("ours", "node"),
    [("", "gpu-a"), ("/etc/gpu-b/slurm.conf", "gpu-b"), ("/etc/elsewhere/slurm.conf", "gpu-a")],
)
def test_the_one_that_our_own_configuration_names_else_the_first(
    host: OwnHost, monkeypatch: pytest.MonkeyPatch, ours: str, node: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", ours)
    site = find_site(host, Seen(table=stat_lines.read(host)))
    assert site is not None
    assert site.node == node
    assert site.configuration == f"/etc/{node}/slurm.conf"
    assert site.other_nodes == ()
    other = {"gpu-a": "gpu-b", "gpu-b": "gpu-a"}[node]
    assert site.notes == [f"a second slurmd, with /etc/{other}/slurm.conf, was not asked"]
