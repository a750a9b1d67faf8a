"""A real Slurm of one node with two pretended GPUs: munged, slurmctld and slurmd as root.

    with running_slurm(tmp) as node:
        job = node.submit("sleep 60", gpus=1, user="nobody")
        node.wait_for_state(job, "RUNNING")

Everything lives in one folder; the daemons are children, ended by their pids, and what a job left
behind is found by the SLURM_CONF in its environment. The node's name differs from the host's on
purpose. Works with 22.05 (Debian 12), 23.11 (Ubuntu 24.04) and 24.11 (Debian 13): settings that
came or went in between follow ``slurmctld -V``.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.packages import require, require_root, unavailable

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
NODE_NAME = "gpu-007"
NVIDIA_MAJOR = 195
START_SECONDS = 60.0
WAIT_SECONDS = 60.0


@dataclass
class SlurmNode:
    """The running cluster; commands run with its slurm.conf."""

    folder: Path
    version: tuple[int, int]
    proctrack: str
    settings: Mapping[str, str] = field(default_factory=dict)
    """Lines of slurm.conf beside the usual ones."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def configuration(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    def device(self, minor: int) -> Path:
        """The node that stands for a GPU."""
        return self.folder / "dev" / f"nvidia{minor}"

    @property
    def environment(self) -> dict[str, str]:
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SQUEUE"))}
        return {**ours, "SLURM_CONF": str(self.configuration), "LC_ALL": "C"}

    def run(self, *argv: str, check: bool = True) -> str:
        """What a Slurm command printed."""
        done = subprocess.run(
            argv,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
            cwd="/",
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{argv}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout

    def submit(self, command: str, *, gpus: int = 0, user: str = "root", **options: str) -> str:
        """Queues a shell command as a job and returns its id; ``gpus`` asks for whole GPUs."""
        argv = ["sbatch", "--parsable", "--output=/dev/null", "--chdir=/", f"--uid={user}"]
        argv += [f"--gres=gpu:{gpus}"] if gpus else []
        argv += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return self.run(*argv, f"--wrap={command}").strip().split(";")[0]

    def state(self, job: str) -> str:
        """The job's state as squeue words it, or "" when the controller has forgotten it."""
        printed = self.run("squeue", "-h", "-t", "all", "-o", "%A|%T")
        return dict(row.strip().split("|") for row in printed.splitlines()).get(job, "")

    def wait_for_state(self, job: str, *states: str) -> None:
        self.wait_for(lambda: self.state(job) in states, f"job {job} to be {states}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Polls until ``condition`` holds; fails with the daemons' logs."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}\n{self.logs()}")
            time.sleep(0.05)

    def pids(self, job: str) -> list[int]:
        """Processes with this job's id in their environment, whoever still tracks them."""
        ours = f"SLURM_CONF={self.configuration}".encode()
        return [
            pid
            for pid, words in _environments()
            if ours in words and f"SLURM_JOB_ID={job}".encode() in words
        ]

    def cancel_all(self) -> None:
        """Ends every job and waits until none is left, running or completing."""
        self.run("scancel", "--full", "--user=root", check=False)
        self.run("scancel", "--full", "--user=nobody", check=False)
        self.wait_for(lambda: not self.run("squeue", "-h").strip(), "all jobs to end")

    def start(self, name: str) -> None:
        """Starts ``slurmctld`` or ``slurmd`` and waits until the node is idle."""
        self._spawn(name, name, "-D")
        self.wait_for(self._is_idle, f"{name} to be ready")

    def stop(self, name: str) -> None:
        """Ends a daemon in order; a controller that is killed may forget its newest jobs."""
        daemon = self.daemons.pop(name)
        daemon.terminate()
        daemon.wait(timeout=30)

    def logs(self) -> str:
        """The end of each daemon's log."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:])
            for path in sorted((self.folder / "log").glob("*.log"))
        )

    def _is_idle(self) -> bool:
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                raise AssertionError(f"{name} ended with {daemon.returncode}\n{self.logs()}")
        done = subprocess.run(
            ["timeout", "5", "sinfo", "-h", "-o", "%T"],
            env=self.environment,
            capture_output=True,
            check=False,
        )
        return done.stdout.strip() in (b"idle", b"mixed", b"allocated")

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.folder / "log" / f"{name}.out.log").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                argv,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd="/",
            )


@contextmanager
def running_slurm(
    proctrack: str = "linuxproc",
    *,
    gpu_major: int = NVIDIA_MAJOR,
    settings: Mapping[str, str] | None = None,
) -> Iterator[SlurmNode]:
    """A Slurm that is ready for jobs; skips where it cannot be had, leaves nothing behind.

    ``gpu_major`` is that of the device nodes that its jobs are given, one with a driver that opens;
    ``settings`` go into slurm.conf beside the usual ones.
    """
    require_root()
    require(*PACKAGES)
    printed = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", printed)
    if found is None:
        unavailable(f"slurmctld does not say its version: {printed!r}")
    node = SlurmNode(
        Path(tempfile.mkdtemp(prefix="gpuwarden-slurm-")),
        (int(found[1]), int(found[2])),
        proctrack,
        settings or {},
    )
    try:
        _prepare(node, gpu_major)
        node._spawn(
            "munged",
            "munged",
            "--foreground",
            "--force",
            "--num-threads=2",
            f"--key-file={node.folder}/key/munge.key",
            f"--socket={node.folder}/munge/sock",
            f"--pid-file={node.folder}/munge/pid",
            f"--log-file={node.folder}/log/munged.log",
            f"--seed-file={node.folder}/key/seed",
        )
        node.wait_for((node.folder / "munge" / "sock").exists, "munged's socket")
        node._spawn("slurmctld", "slurmctld", "-D")
        _start_slurmd(node)
        yield node
    finally:
        _clean_up(node)


def _start_slurmd(node: SlurmNode) -> None:
    try:
        node.start("slurmd")
    except AssertionError as error:
        if node.proctrack != "cgroup":
            raise
        # Inside a container the group tree may be read-only or have no controllers: not ours.
        pytest.skip(f"Slurm cannot use this machine's cgroups: {str(error)[-300:]}")


def _prepare(node: SlurmNode, gpu_major: int) -> None:
    folder = node.folder
    folder.chmod(0o755)
    for name in ("munge", "state", "spool", "log", "etc", "dev", "key"):
        (folder / name).mkdir(mode=0o700 if name == "key" else 0o755)
    key = folder / "key" / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for minor in range(2):
        os.mknod(
            folder / "dev" / f"nvidia{minor}",
            stat.S_IFCHR | 0o666,
            os.makedev(gpu_major, minor),
        )
    (folder / "etc" / "slurm.conf").write_text(_slurm_conf(node))
    (folder / "etc" / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/dev/nvidia[0-1]\n")
    (folder / "etc" / "cgroup.conf").write_text(_cgroup_conf(node))


def _slurm_conf(node: SlurmNode) -> str:
    host = socket.gethostname().split(".")[0]
    cpus = os.cpu_count() or 1
    controller_port, node_port = _free_ports()
    settings = {
        "ClusterName": "bed",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(controller_port),
        "SlurmdPort": str(node_port),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={node.folder}/munge/sock",
        "StateSaveLocation": f"{node.folder}/state",
        "SlurmdSpoolDir": f"{node.folder}/spool",
        "SlurmctldPidFile": f"{node.folder}/slurmctld.pid",
        "SlurmdPidFile": f"{node.folder}/slurmd.pid",
        "SlurmctldLogFile": f"{node.folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{node.folder}/log/slurmd.log",
        "ProctrackType": f"proctrack/{node.proctrack}",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "GresTypes": "gpu",
        "ReturnToService": "2",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=0",
        "KillWait": "1",
    }
    if node.proctrack == "cgroup":
        settings["TaskPlugin"] = "task/cgroup"
        settings["PrologFlags"] = "Contain"
    settings.update(node.settings)
    return (
        "".join(f"{key}={value}\n" for key, value in settings.items())
        + (
            # More CPUs than there are, so that two jobs fit on one core.
            f"NodeName={NODE_NAME} NodeHostName={host} NodeAddr=127.0.0.1 CPUs={max(cpus, 4)} "
            "RealMemory=100 Gres=gpu:h100:2 State=UNKNOWN\n"
            f"PartitionName=gpu Nodes={NODE_NAME} Default=YES MaxTime=INFINITE State=UP\n"
        )
        + ("SlurmdParameters=config_overrides\n")
    )


def _cgroup_conf(node: SlurmNode) -> str:
    if node.proctrack != "cgroup":
        return "CgroupPlugin=disabled\n" if node.version >= (24, 5) else ""
    v1 = Path("/sys/fs/cgroup/freezer").is_dir()
    lines = [
        f"CgroupPlugin=cgroup/{'v1' if v1 else 'v2'}",
        "ConstrainDevices=yes",
        "ConstrainCores=no",
        "ConstrainRAMSpace=no",
    ]
    if v1 and node.version < (24, 5):
        lines += ["CgroupAutomount=no", "CgroupMountpoint=/sys/fs/cgroup"]
    if not v1:
        lines.append("IgnoreSystemd=yes")
    return "\n".join(lines) + "\n"


def _free_ports() -> list[int]:
    """Two ports that the kernel gives to nobody by itself, also while a daemon is down."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(10_000, max(first, 20_000)), 1000):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == 2:
            break
    return found


def _environments() -> Iterator[tuple[int, set[bytes]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield int(name), set(Path(f"/proc/{name}/environ").read_bytes().split(b"\0"))
            except OSError:
                continue


def _clean_up(node: SlurmNode) -> None:
    if "slurmctld" in node.daemons and "slurmd" in node.daemons:
        try:
            node.cancel_all()
        except (AssertionError, subprocess.SubprocessError):
            pass
    # Steps and orphans outlive their daemons; no other process has this folder's slurm.conf.
    ours = f"SLURM_CONF={node.configuration}".encode()
    for daemon in node.daemons.values():
        daemon.terminate()
    for daemon in node.daemons.values():
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    deadline = time.monotonic() + 10
    while left := [pid for pid, words in _environments() if ours in words]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    shutil.rmtree(node.folder, ignore_errors=True)
    _remove_cgroups(node)


def _remove_cgroups(node: SlurmNode) -> None:
    if node.proctrack != "cgroup":
        return
    # Named after the node, so no other Slurm's: v1 below each controller, v2 as a scope.
    trees = list(Path("/sys/fs/cgroup").glob(f"*/slurm_{NODE_NAME}"))
    trees += Path("/sys/fs/cgroup").glob(f"system.slice/{NODE_NAME}_slurmstepd.scope")
    for tree in trees:
        for folder, _, _ in os.walk(tree, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue
