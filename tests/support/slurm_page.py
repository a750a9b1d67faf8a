"""Runs the commands that docs/deploy.md has for Slurm, on a real one; prints what the last said.

    unshare --mount --propagation private python -m tests.support.slurm_page FOLDER

In that mount namespace alone the device of the tests is a GPU's and lies at /dev/nvidia0, and /etc,
/opt, /dev and /var/log are overlays that are gone afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.deploy_page import ROOT, commands
from tests.support.slurm import SlurmNode, running_slurm
from tests.support.watching import GPU, devices_file

SECONDS = 600
OVERLAID = ("/etc", "/opt", "/dev", "/var/log")
KEPT = ("/dev/pts", "/dev/shm")


def main() -> int:
    folder = Path(sys.argv[1])
    mount("-t", "tmpfs", "tmpfs", str(folder))
    for number, path in enumerate(OVERLAID):
        parts = [folder / f"{name}{number}" for name in ("upper", "work")]
        for part in parts:
            part.mkdir()
        kept = [kept for kept in KEPT if kept.startswith(path + "/") and os.path.isdir(kept)]
        for index, one in enumerate(kept):
            (folder / f"kept{index}").mkdir()
            mount("--bind", one, str(folder / f"kept{index}"))
        options = f"lowerdir={path},upperdir={parts[0]},workdir={parts[1]}"
        mount("-t", "overlay", "overlay", "-o", options, path)
        for index, one in enumerate(kept):
            mount("--bind", str(folder / f"kept{index}"), one)
    mount("--bind", str(devices_file(folder)), "/proc/devices")
    node = Path("/dev/nvidia0")
    node.unlink(missing_ok=True)
    os.mknod(node, 0o020666, os.makedev(*GPU))
    with running_slurm(gpu_major=GPU[0]) as slurm:
        Path("/etc/slurm").mkdir(exist_ok=True)
        place = Path("/etc/slurm/slurm.conf")
        place.unlink(missing_ok=True)
        place.symlink_to(slurm.configuration)
        said = ""
        for command in commands("Slurm"):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            said = done.stdout
            # A person takes a while to read what a command said; a program does not.
            if command == "scontrol reconfigure":
                slurm.wait_for(lambda: has_prolog(slurm), "its new configuration")
            elif command.endswith("&"):
                slurm.wait_for(lambda: is_held(node), f"a holder of {node}")
            if done.returncode not in ((0, 2) if "gpuwarden " in command else (0,)):
                print(f"{command}: {done.returncode}\n{said}\n{slurm.logs()}", file=sys.stderr)
                return 1
        print(said)
    return 0


def has_prolog(slurm: SlurmNode) -> bool:
    """Whether the controller has read its configuration, and its node is there again."""
    said = slurm.run("scontrol", "show", "config", check=False)
    return "gpuwarden-prolog" in said and slurm._is_idle()


def is_held(node: Path) -> bool:
    """Whether a process has the device node open."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(one) == str(node) for one in folder.iterdir()):
                return True
        except OSError:
            continue
    return False


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


sys.exit(main())
