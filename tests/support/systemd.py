"""A real systemd as the first process of its own pid, mount and cgroup namespaces.

    with running_systemd({"job.service": "[Service]\\nExecStart=/bin/sleep 60\\n"}) as machine:
        machine.run("systemctl", "is-active", "job.service")

It boots in about a second from an overlay of this machine's own root, with the given units and
nothing else, in a cgroup2 group made for it. Needs root and a kernel that lets us mount; the
namespaces end with it. ``machine.root`` is its root directory as seen from here.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.packages import require, require_root

BOOT_SECONDS = 60.0
TARGET = "gpuwarden-test.target"

# Runs in fresh mount, network, ipc and uts namespaces; nothing that it mounts is seen elsewhere.
_OUTER = r"""
set -e
mount --make-rprivate /
mkdir -p "$F/root" "$F/cgroup"
mount -t tmpfs none "$F/root"
mkdir "$F/root/upper" "$F/root/work" "$F/root/m"
mount -t overlay overlay \
    -o "lowerdir=/,upperdir=$F/root/upper,workdir=$F/root/work" "$F/root/m"
mount -t cgroup2 none "$F/cgroup"
# Below our own group: the root of a container's delegated tree may hold processes, ours may not.
G="$F/cgroup/$NAME"
mkdir "$G"
(
    echo "$BASHPID" > "$G/cgroup.procs"
    exec unshare --pid $CGROUP --mount --fork --kill-child /bin/bash -e -c "$INNER"
) || code=$?
for try in $(seq 100); do
    find "$G" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    [ -d "$G" ] || break
    sleep 0.05
done
exit "${code:-0}"
"""

_INNER = r"""
M="$F/root/m"
mount -t proc proc "$M/proc"
mount -t sysfs sysfs "$M/sys"
mount -t tmpfs tmpfs "$M/sys/fs/cgroup"
mount -t cgroup2 none "$M/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$M/run"
mount -t tmpfs -o mode=755 tmpfs "$M/dev"
mkdir "$M/dev/pts" "$M/dev/shm"
mknod -m 666 "$M/dev/null" c 1 3
mknod -m 666 "$M/dev/zero" c 1 5
mknod -m 666 "$M/dev/random" c 1 8
mknod -m 666 "$M/dev/urandom" c 1 9
mknod -m 666 "$M/dev/nvidia0" c 195 0
mknod -m 666 "$M/dev/nvidia1" c 195 1
mknod -m 666 "$M/dev/nvidiactl" c 195 255
touch "$M/dev/console" "$F/console"
mount --bind "$F/console" "$M/dev/console"
if [ -z "$CGROUP" ]; then
    mount -t bpf -o mode=700 bpf "$M/sys/fs/bpf"
    mount -t tracefs tracefs "$M/sys/kernel/tracing"
    mknod -m 600 "$M/dev/kmsg" c 1 11
fi
for tree in $TREES; do
    mkdir -p "$M$tree"
    mount --bind "$tree" "$M$tree"
done
cp -a "$F/units/." "$M/etc/systemd/system/"
exec chroot "$M" /usr/bin/env -i container=podman PATH=/usr/bin:/usr/sbin:/bin:/sbin \
    /lib/systemd/systemd --unit=gpuwarden-test.target --log-target=console --show-status=no
"""


@dataclass(frozen=True)
class SystemdMachine:
    """The booted systemd; ``init_pid`` is its pid here."""

    init_pid: int
    group: str
    folder: Path

    @property
    def root(self) -> str:
        return f"/proc/{self.init_pid}/root"

    def command(self, *argv: str) -> list[str]:
        """``argv`` as run on that machine: its root, processes, network and cgroups."""
        inside = [f"--target={self.init_pid}", "--all", f"--root={self.root}", "--wd=/"]
        return ["nsenter", *inside, *argv]

    def run(self, *argv: str) -> str:
        """What a command on that machine printed; fails if it failed."""
        done = subprocess.run(
            self.command(*argv), capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{shlex.join(argv)}: {done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def running_systemd(
    units: Mapping[str, str],
    *,
    own_cgroups: bool = True,
    own_network: bool = True,
    wanted: Sequence[str] = (),
) -> Iterator[SystemdMachine]:
    """A machine with these unit files (name → text), all started; ended on the way out.

    Without ``own_cgroups`` it sees the whole hierarchy, as a host does, has what probes need
    mounted, and the kernel's log. ``wanted`` are units of the system's own that are started too.
    """
    require_root()
    require("systemd", "util-linux")
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-systemd-"))
    folder.chmod(0o755)
    _write_units(folder / "units", units, wanted)
    trees = {str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix} - {"/usr", "/"}
    environment = {
        **os.environ,
        "F": str(folder),
        "NAME": folder.name,
        "INNER": _INNER,
        "TREES": " ".join(sorted(trees)),
        "CGROUP": "--cgroup" if own_cgroups else "",
    }
    unshare = ["unshare", "--mount", "--ipc", "--uts", *(["--net"] if own_network else [])]
    outer = subprocess.Popen(
        [*unshare, "/bin/bash", "-c", _OUTER],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    init_pid = None
    try:
        init_pid = _wait_for_init(outer, folder)
        machine = SystemdMachine(init_pid, folder.name, folder)
        _wait_until_started(machine)
        yield machine
    finally:
        if init_pid is not None:
            # The first process of a pid namespace takes all the others with it.
            _kill(init_pid)
        else:
            # Whoever is left over would keep the pipe open that is read below.
            for pid in [*_descendants(outer.pid), outer.pid]:
                _kill(pid)
        try:
            outer.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            outer.kill()
            outer.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _write_units(folder: Path, units: Mapping[str, str], wanted: Sequence[str]) -> None:
    folder.mkdir()
    for name, text in units.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    started = [name for name in units if name.endswith(".service") and "@." not in name]
    (folder / TARGET).write_text(
        f"[Unit]\nDefaultDependencies=no\nAllowIsolate=yes\nWants={' '.join([*started, *wanted])}\n"
    )


def _wait_for_init(outer: subprocess.Popen[bytes], folder: Path) -> int:
    """Our pid for the namespace's first process, once it is systemd."""
    deadline = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < deadline:
        if outer.poll() is not None:
            said = (outer.stdout.read() if outer.stdout else b"").decode("utf-8", "replace")
            pytest.skip(f"systemd cannot be started in namespaces here: {said.strip()[-300:]}")
        for pid in _descendants(outer.pid):
            try:
                if os.readlink(f"/proc/{pid}/root") == f"{folder}/root/m" and (
                    Path(f"/proc/{pid}/comm").read_text() == "systemd\n"
                ):
                    return pid
            except OSError:
                continue
        time.sleep(0.02)
    raise AssertionError("systemd did not come up")


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except OSError:
            continue
        found += map(int, children)
        pending += map(int, children)
    return found


def _wait_until_started(machine: SystemdMachine) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while True:
        done = subprocess.run(
            machine.command("systemctl", "is-active", TARGET),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.stdout.strip() == "active" and not _has_jobs(machine):
            return
        if time.monotonic() > deadline:
            console = (machine.folder / "console").read_text(errors="replace")
            raise AssertionError(f"{done.stdout}{done.stderr}\n{console[-3000:]}")
        time.sleep(0.05)


def _has_jobs(machine: SystemdMachine) -> bool:
    """Whether units are still being started: the target waits for none of them."""
    done = subprocess.run(
        machine.command("systemctl", "list-jobs", "--no-legend", "--no-pager"),
        capture_output=True,
        timeout=30,
        check=False,
    )
    waiting = [
        line for line in done.stdout.splitlines() if line.strip() and line.split()[0].isdigit()
    ]
    return done.returncode != 0 or bool(waiting)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
