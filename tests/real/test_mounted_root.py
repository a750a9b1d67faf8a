"""A host that is mounted into a container, as a DaemonSet with hostPID sees it: ``--root``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import require_root

pytestmark = pytest.mark.real

SCRIPT = """
set -e
mount --rbind / "$1"
mount --bind "$2" "$1/etc"
exec "$3" -m gpuwarden scan --root "$1" --format json
"""


def test_a_mounted_host_is_read_through_its_root(tmp_path: Path) -> None:
    require_root()
    root, etc = tmp_path / "host", tmp_path / "etc"
    root.mkdir()
    # An /etc of its own for the mounted host: a minimal system has no cron.d to put a file in.
    (etc / "cron.d").mkdir(parents=True)
    shutil.copy("/etc/passwd", etc)
    shutil.copy("/etc/group", etc)
    job = "* * * * * root cp -f /etc/.sh /tmp/.sh && /tmp/.sh -c && rm -rf /tmp/.sh\n"
    (etc / "cron.d/update").write_text(job)
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh",
         str(root), str(etc), sys.executable],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        check=False,
    )  # fmt: skip
    # The planted cron job is an error, so the scan ends with a finding.
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["node"]["origin"] == "root"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert report["node"]["boot_id"] == boot_id
    assert report["node"]["process_count"] > 1
    states = {sensor["name"]: sensor["state"] for sensor in report["sensors"]}
    assert states["persistence"] in ("ok", "partial")
    # Commands of another host are not run: a scheduler there would be "failed", never "absent".
    assert {s["name"]: s["state"] for s in report["sources"]}["slurm"] in ("absent", "failed")
    planted = [f for f in report["findings"] if f["rule"] == "autostart_suspicious"]
    assert [f["subject"]["name"] for f in planted] == ["/etc/cron.d/update:1"]
    assert not Path("/etc/cron.d/update").exists()
