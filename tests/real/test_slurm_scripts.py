"""The prolog and the epilog that `gpuwarden harden slurm` writes, run by a real slurmd."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.packages import require
from tests.support.slurm import NODE_NAME, SlurmNode, running_slurm
from tests.support.watching import GPU

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_SECONDS = 45
"""PrologEpilogTimeout: what slurmd ends with a failure, and a drained node."""
HOLD = "exec 3<$(dirname $SLURM_CONF)/../dev/nvidia$SLURM_JOB_GPUS; exec sleep 600"
SAYING = HOLD.replace("exec sleep 600", "echo; exec sleep 600 >/dev/null")
LEAVE = f"(setsid sh -c '{SAYING}' &) | read said"
"""With proctrack/linuxproc Slurm loses a process whose parents have gone.

The job ends once that one is in a session of its own and has the device.
"""


class Site:
    """A node of Slurm with both scripts installed, and what they said."""

    def __init__(self, slurm: SlurmNode, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        self.log = folder / "said.log"

    def install(self, *flags: str, program: str | None = None) -> None:
        """Writes the scripts as a person would, from this node's own Slurm."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", "harden", "slurm", "-o", str(self.folder)),
                *("--program", program or str(self.folder / "gpuwarden"), "--log", str(self.log)),
                *flags,
            ],
            cwd=REPOSITORY,
            env={**self.slurm.environment, "PYTHONPATH": "src"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "gpuwarden-epilog" in done.stdout, done.stdout + done.stderr

    def run(self, command: str) -> str:
        """A job with one GPU, from its prolog to the end of its epilog."""
        job = self.slurm.submit(command, gpus=1, user="nobody")
        self.slurm.wait_for_state(job, "COMPLETED")
        return job

    def said(self, phase: str, job: str) -> list[str]:
        """What the prolog or epilog of a job said, once it has said something."""
        head = f"gpuwarden {phase}: job {job}: "

        def lines() -> list[str]:
            text = self.log.read_text() if self.log.exists() else ""
            return [line[len(head) :] for line in text.splitlines() if line.startswith(head)]

        self.slurm.wait_for(lambda: bool(lines()), f"{phase} of {job} to say something")
        return lines()

    def state(self) -> tuple[str, str]:
        text = self.slurm.run("sinfo", "-h", "-o", "%T|%E").strip()
        state, _, reason = text.partition("|")
        return state, reason

    def end_leftovers(self, job: str) -> None:
        for pid in self.slurm.pids(job):
            os.kill(pid, signal.SIGKILL)

    def resume(self) -> None:
        # Slurm 24.11 keeps the reason of a node that is resumed, 22.05 does not.
        words = (f"nodename={NODE_NAME}", "state=resume", "reason=none")
        self.slurm.run("scontrol", "update", *words)
        self.slurm.wait_for(lambda: self.state()[0] == "idle", "the node to be idle")


def write_program(folder: Path, name: str, *mounts: tuple[Path, str]) -> str:
    """gpuwarden for the scripts, with a view of the machine of its own; its path.

    Its /proc/devices takes the tests' device for a GPU's. A test machine's first process may have
    rights that its root has not, and then its descriptors are rightly said not to be seen.
    """
    empty, nothing = folder / "empty", folder / "nothing"
    empty.mkdir(exist_ok=True)
    nothing.touch()
    view = [(folder / "devices", "/proc/devices"), (empty, "/proc/1/fd"), (nothing, "/proc/1/maps")]
    binds = " && ".join(f"mount --bind {one} {place}" for one, place in (*view, *mounts))
    program = folder / name
    program.write_text(
        f"""#!/bin/sh
exec unshare --mount --propagation private sh -c \\
    '{binds} && cd {REPOSITORY} && exec "$@"' sh \\
    env PYTHONPATH=src {sys.executable} -m gpuwarden "$@"
"""
    )
    program.chmod(0o755)
    return str(program)


CONSOLES = 7
"""Another device that opens, /dev/vcs and /dev/vcs1: other tests may hold the usual one."""


def write_devices(folder: Path) -> int:
    """A /proc/devices with one accelerator's driver; its major, that of a device that opens."""
    major = CONSOLES if Path("/dev/vcs1").exists() else GPU[0]
    text = f"Character devices:\n  1 mem\n{major:3} nvidia-frontend\n\nBlock devices:\n"
    (folder / "devices").write_text(text)
    return major


@contextmanager
def hanging(path: Path) -> Iterator[Path]:
    """A program that hangs as badly as it can; what it left is ended on the way out.

    It will not be ended by a signal that it can ignore, and a child of it keeps every descriptor.
    """
    pids = Path(f"{path}.pids")
    path.write_text(
        f"#!/bin/sh\ntrap '' TERM\nsetsid sleep 300 &\necho $! >>{pids}\nexec sleep 300\n"
    )
    path.chmod(0o755)
    try:
        yield path
    finally:
        for pid in pids.read_text().split() if pids.exists() else ():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        pids.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-scripts-"))
    folder.chmod(0o755)
    settings = {
        "Prolog": str(folder / "gpuwarden-prolog"),
        "Epilog": str(folder / "gpuwarden-epilog"),
        "PrologFlags": "Alloc",
        "PrologEpilogTimeout": str(TIMEOUT_SECONDS),
    }
    major = write_devices(folder)
    write_program(folder, "gpuwarden")
    try:
        with running_slurm(gpu_major=major, settings=settings) as slurm:
            yield Site(slurm, folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _installed(site: Site) -> Iterator[None]:
    site.log.unlink(missing_ok=True)
    site.install()
    yield
    site.install()
    site.slurm.cancel_all()
    if site.state()[0] != "idle":
        site.resume()


def test_a_clean_job_leaves_nothing(site: Site) -> None:
    job = site.run(HOLD.replace("exec sleep 600", "true"))
    assert site.said("prolog", job) == ["minor:0: nothing is left"]
    assert site.said("epilog", job) == ["minor:0: nothing is left"]
    assert site.state() == ("idle", "none")


def test_what_a_job_leaves_is_reported_and_neither_killed_nor_the_node_drained(site: Site) -> None:
    job = site.run(LEAVE)
    try:
        (line,) = site.said("epilog", job)
        (left,) = [pid for pid in site.slurm.pids(job) if Path(f"/proc/{pid}").exists()]
        assert f"left: /dev/nvidia0: pid {left}, /usr/bin/sleep of nobody" in line
        assert "of this job, which is over" in line
        assert site.state() == ("idle", "none")
        # Its successor's prolog finds it too, when the controller says that its job has ended.
        after = site.slurm.submit("exec sleep 600", gpus=2, user="nobody")
        (line,) = site.said("prolog", after)
        assert f"pid {left}" in line
        assert "orphaned-job" in line
        site.slurm.wait_for_state(after, "RUNNING")
        assert Path(f"/proc/{left}").exists()
    finally:
        site.end_leftovers(job)


def test_a_running_neighbour_is_not_what_a_job_left(site: Site) -> None:
    neighbour = site.slurm.submit(HOLD, gpus=1, user="nobody")
    site.slurm.wait_for_state(neighbour, "RUNNING")
    job = site.run("true")
    assert site.said("prolog", job) == ["minor:1: nothing is left"]
    assert site.said("epilog", job) == ["minor:1: nothing is left"]
    assert site.state()[0] == "mixed"


def test_with_drain_an_epilog_drains_the_node_and_says_why(site: Site) -> None:
    site.install("--drain")
    job = site.run(LEAVE)
    try:
        lines = site.said("epilog", job)
        assert lines[0].startswith("left: ")
        assert lines[-1] == f"{NODE_NAME} drained"
        site.slurm.wait_for(lambda: site.state()[0] == "drained", "the node to be drained")
        assert site.state()[1].startswith(f"gpuwarden: GPUs not empty at job {job}: 1 left (")
        # Slurm's own word for a failed epilog did not replace it.
        assert f"[job {job}] epilog failed status=1:0" in site.slurm.logs()
    finally:
        site.end_leftovers(job)


def test_with_drain_a_prolog_keeps_the_job_off_a_gpu_that_is_not_empty(site: Site) -> None:
    site.install("--drain")
    stranger = holder(site)
    try:
        job = site.slurm.submit("exec sleep 600", gpus=1, user="nobody")
        assert f"pid {stranger.pid}" in site.said("prolog", job)[0]
        site.slurm.wait_for(lambda: site.state()[0] == "drained", "the node to be drained")
        assert site.state()[1].startswith(f"gpuwarden: GPUs not empty at job {job}: 1 left (")
        site.slurm.wait_for_state(job, "PENDING")
        assert stranger.poll() is None
    finally:
        stranger.communicate()


def test_a_dead_controller_makes_it_unknown_and_never_drains(site: Site) -> None:
    site.install("--drain")
    site.slurm.stop("slurmctld")
    try:
        for phase in ("prolog", "epilog"):
            code, seconds = run_script(site, phase, "4000000")
            lines = site.said(phase, "4000000")
            assert code == 0
            assert seconds < TIMEOUT_SECONDS
            assert lines
            assert all(line.startswith("unknown: ") for line in lines), lines
        # That its own job is over slurmd itself says; the exit code tells the controller later.
        own = holder(site, SLURM_JOB_ID="4000001")
        try:
            code, seconds = run_script(site, "epilog", "4000001")
        finally:
            own.communicate()
        lines = site.said("epilog", "4000001")
        assert code == 1
        assert seconds < TIMEOUT_SECONDS
        assert f"pid {own.pid}" in lines[0]
        assert lines[-1].startswith("not drained by scontrol: ")
    finally:
        site.slurm.start("slurmctld")
    assert site.state() == ("idle", "none")


def test_commands_of_slurm_that_hang_make_it_unknown_in_time(site: Site) -> None:
    with hanging(site.folder / "command") as command:
        mounts = [(command, f"/usr/bin/{name}") for name in ("scontrol", "squeue")]
        site.install("--drain", program=write_program(site.folder, "without-answer", *mounts))
        begun = time.monotonic()
        code, _ = run_script(site, "epilog", "4000000")
        assert code == 0
        assert time.monotonic() - begun < TIMEOUT_SECONDS
        lines = site.said("epilog", "4000000")
        assert all(line.startswith("unknown: what Slurm's jobs are: ") for line in lines), lines
    assert site.state() == ("idle", "none")


def test_a_check_that_hangs_does_not_hold_up_an_epilog(site: Site) -> None:
    with hanging(site.folder / "hanging") as program:
        site.install("--deadline", "4", program=str(program))
        (site.folder / "gpuwarden-prolog").write_text("#!/bin/sh\n")
        job = site.run("true")
        (line,) = site.said("epilog", job)
        assert line == "unknown: the check ended with 137 (124 or 137: out of time)"
        assert site.state() == ("idle", "none")
        # slurmd did not have to end them itself.
        assert "timeout" not in site.slurm.logs().lower()


def test_a_program_that_breaks_down_drains_nothing(site: Site) -> None:
    program = site.folder / "broken"
    program.write_text("#!/bin/sh\necho 'Traceback (most recent call last):' >&2\nexit 1\n")
    program.chmod(0o755)
    site.install("--drain", program=str(program))
    job = site.run("true")
    (line,) = site.said("epilog", job)
    assert line.startswith("unknown: the check ended with 1 and no finding")
    assert site.state() == ("idle", "none")


def test_what_stands_in_the_environment_is_not_run_and_not_believed(site: Site) -> None:
    mark = site.folder / "mark"
    code, _ = run_script(
        site,
        "epilog",
        "4000000",
        SLURM_JOB_GPUS=f"0;touch {mark}$(touch {mark})`touch {mark}`",
        PATH=str(site.folder),
        IFS="/",
        ENV=str(mark),
        PYTHONPATH=str(site.folder),
        SLURM_JOB_COMMENT=f"$(touch {mark})",
    )
    assert code == 0
    assert not mark.exists()
    assert any("every GPU is looked at" in line for line in site.said("epilog", "4000000"))
    code, _ = run_script(site, "prolog", f"12\nroot: ok; touch {mark}")
    assert code == 0
    assert not mark.exists()
    assert site.said("prolog", "0") == [
        "unknown: the check ended with 64 (124 or 137: out of time)"
    ]


def test_several_epilogs_at_once_do_not_take_each_other_for_what_is_left(site: Site) -> None:
    jobs = [str(4_000_000 + number) for number in range(3)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        done = list(pool.map(lambda job: run_script(site, "epilog", job), jobs))
    assert [code for code, _ in done] == [0] * len(jobs)
    for job in jobs:
        assert site.said("epilog", job) == ["minor:0: nothing is left"]


def test_the_scripts_are_clean_to_shellcheck(site: Site) -> None:
    require("shellcheck")
    for flags in ((), ("--drain",)):
        site.install(*flags)
        for phase in ("prolog", "epilog"):
            done = subprocess.run(
                ["shellcheck", "--shell=sh", str(site.folder / f"gpuwarden-{phase}")],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout


def holder(site: Site, **environment: str) -> subprocess.Popen[bytes]:
    """A process that Slurm did not start and that holds the first GPU until it is talked to."""
    program = f"import os, sys; os.open('{site.slurm.device(0)}', os.O_RDONLY); sys.stdin.read()"
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, env={**os.environ, **environment}
    )


def run_script(site: Site, phase: str, job: str, **environment: str) -> tuple[int, float]:
    """A script as slurmd runs it: as root, with its own variables and nothing else."""
    begun = time.monotonic()
    done = subprocess.run(
        [str(site.folder / f"gpuwarden-{phase}")],
        env={
            "SLURM_CONF": str(site.slurm.configuration),
            "SLURM_JOB_ID": job,
            "SLURM_JOB_GPUS": "0",
            "SLURMD_NODENAME": NODE_NAME,
            **environment,
        },
        cwd="/",
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
    )
    return done.returncode, time.monotonic() - begun
