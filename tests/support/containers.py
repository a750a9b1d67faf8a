"""Real containers for tests: podman and bare runc around a busybox root, made and removed here."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.packages import require

RUN_SECONDS = 60


def run(*argv: str, check: bool = True) -> str:
    """Runs a command; what it printed. Errors: AssertionError with its complaint."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Polls until ``condition`` holds. Errors: AssertionError naming ``what``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.02)


def busybox_root(directory: Path) -> Path:
    """A root directory with a static busybox in it; needs the package busybox-static."""
    (directory / "bin").mkdir(parents=True)
    for empty in ("proc", "sys", "dev", "tmp", "etc"):
        (directory / empty).mkdir()
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy2(busybox, directory / "bin/busybox")
    for name in ("sh", "sleep", "cat", "true"):
        (directory / "bin" / name).symlink_to("busybox")
    return directory


def root_archive(root: Path, archive: Path) -> Path:
    """The root directory as an uncompressed tar, for image imports."""
    with tarfile.open(archive, "w") as tar:
        for entry in sorted(root.iterdir()):
            tar.add(entry, arcname=entry.name)
    return archive


def fake_node(path: Path, major: int = 1, minor: int = 3) -> Path:
    """A character device under another name; (1, 3) is /dev/null, so that it opens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    return path


def cgroup_mounts() -> dict[str, Path]:
    """Where each hierarchy is mounted: controller or ``name=…`` → directory, ``""`` for v2."""
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            mounts.setdefault("", Path(where))
        elif kind == "cgroup":
            for option in options.split(","):
                mounts.setdefault(option, Path(where))
    return mounts


def cgroup_directories(pid: int) -> list[Path]:
    """The process's group in each hierarchy that is mounted here, the root group left out."""
    mounts = cgroup_mounts()
    found: list[Path] = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = mounts.get(controllers.split(",")[0])
        if mount is not None and path != "/" and (directory := mount / path[1:]).is_dir():
            found.append(directory)
    assert found
    return found


@contextmanager
def no_new_cgroups() -> Iterator[None]:
    """Removes the empty groups that runtimes leave behind, and only those made meanwhile."""

    def present() -> set[Path]:
        tops = ("kubepods", "gpuwarden-test", "docker", "libpod_parent")
        return {
            Path(directory)
            for mount in set(cgroup_mounts().values())
            for top in tops
            for directory, _, _ in os.walk(mount / top)
        }

    before = present()
    try:
        yield
    finally:
        for directory in sorted(present() - before, key=lambda d: len(d.parts), reverse=True):
            with suppress(OSError):
                directory.rmdir()


class Podman:
    """podman with its own storage, its containers and their removal."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._names: list[str] = []
        self._arguments = [
            "podman",
            "--root",
            str(scratch / "storage"),
            "--runroot",
            str(scratch / "runroot"),
            "--storage-driver",
            "vfs",
            "--cgroup-manager",
            "cgroupfs",
            "--events-backend",
            "file",
            "--runtime",
            "runc",
        ]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        return run(*self._arguments, *arguments, check=check)

    def import_image(self, root: Path, reference: str) -> None:
        archive = root_archive(root, self.scratch / "root.tar")
        self("import", str(archive), reference)

    def start(self, image: str, *options: str, command: Sequence[str] = ("sleep", "1000")) -> str:
        """Starts a container in the background; its id."""
        name = f"gpuwarden-test-{secrets.token_hex(4)}"
        self._names.append(name)
        whole = ("--detach", "--name", name, *options)
        return self.run(image, *whole, command=command).splitlines()[-1]

    def run(self, image: str, *options: str, command: Sequence[str], check: bool = True) -> str:
        """Runs a container; what it, or podman, printed."""
        return self(*self._running(options, image, command), check=check)

    def piped(
        self, image: str, *options: str, command: Sequence[str]
    ) -> tuple[str, subprocess.Popen[str]]:
        """Starts a container whose input and output are pipes; its name, and the podman of it."""
        name = f"gpuwarden-test-{secrets.token_hex(4)}"
        self._names.append(name)
        options = ("--interactive", "--name", name, *options)
        argv = [*self._arguments, *self._running(options, image, command)]
        pipe = subprocess.PIPE
        return name, subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)

    @staticmethod
    def _running(options: Sequence[str], image: str, command: Sequence[str]) -> tuple[str, ...]:
        limits = ("--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1024:1024")
        fixed = ("run", "--network", "none", *limits, "--pids-limit", "-1")
        return *fixed, *options, image, *command

    def pid(self, identity: str) -> int:
        return int(self("inspect", "--format", "{{.State.Pid}}", identity))

    def close(self) -> None:
        for name in self._names:
            self("rm", "--force", "--time", "0", name, check=False)
        self("rmi", "--all", "--force", check=False)


@contextmanager
def podman(scratch: Path) -> Iterator[Podman]:
    """A Podman that removes what it started."""
    scratch.mkdir(parents=True, exist_ok=True)
    engine = Podman(scratch)
    try:
        yield engine
    finally:
        engine.close()


class Dockerd:
    """A Docker daemon of our own: its socket, its containers and their removal."""

    def __init__(self, scratch: Path, socket: Path) -> None:
        self.socket = socket
        self.log = scratch / "dockerd.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "dockerd",
                    "--host",
                    f"unix://{socket}",
                    "--data-root",
                    str(scratch / "data"),
                    "--exec-root",
                    str(scratch / "exec"),
                    "--pidfile",
                    str(scratch / "pid"),
                    "--bridge",
                    "none",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--storage-driver",
                    "vfs",
                    "--exec-opt",
                    "native.cgroupdriver=cgroupfs",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __call__(self, *arguments: str, check: bool = True) -> str:
        return run("docker", "--host", f"unix://{self.socket}", *arguments, check=check)

    def wait(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            return self("version", "--format", "{{.Server.Version}}", check=False) != ""

        wait_until(answers, "dockerd answering")

    def close(self) -> None:
        for identity in self("ps", "--all", "--quiet", check=False).split():
            self("rm", "--force", identity, check=False)
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def require_docker() -> None:
    """Makes sure that Docker's daemon and its client are here, else skips or fails."""
    if shutil.which("dockerd") is None:
        require("docker.io")
    if shutil.which("docker") is None:
        # Debian 13 has the client in a package of its own.
        require("docker-cli")


@contextmanager
def dockerd(scratch: Path, socket: Path) -> Iterator[Dockerd]:
    """A Docker daemon that answers, and is gone with its containers afterwards."""
    scratch.mkdir(parents=True, exist_ok=True)
    socket.parent.mkdir(parents=True, exist_ok=True)
    engine = Dockerd(scratch, socket)
    try:
        engine.wait()
        yield engine
    finally:
        engine.close()


def _bundle(
    directory: Path,
    root: Path,
    cgroup: str,
    devices: Sequence[str],
    *,
    number: tuple[int, int],
    command: Sequence[str],
    capabilities: Sequence[str],
) -> Path:
    directory.mkdir(parents=True)
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    nodes = [
        {"path": path, "type": "c", "major": number[0], "minor": number[1], "fileMode": 0o666}
        for path in devices
    ]
    # What a container's configuration allows must be said beside the nodes themselves.
    allowed = [
        {"allow": True, "type": "c", "major": number[0], "minor": number[1], "access": "rwm"}
    ]
    held = {kind: list(capabilities) for kind in ("bounding", "effective", "permitted")}
    spec = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(command),
            **({"capabilities": held} if capabilities else {}),
            "env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "JOB_NAME=resnet"],
            "cwd": "/",
        },
        "root": {"path": str(root)},
        "mounts": mounts,
        "linux": {
            "cgroupsPath": cgroup,
            "devices": nodes,
            "namespaces": [{"type": kind} for kind in ("pid", "mount", "ipc", "uts", "network")],
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}, *(allowed if devices else ())]
            },
        },
    }
    (directory / "config.json").write_text(json.dumps(spec))
    return directory


@contextmanager
def bare_runc(
    scratch: Path,
    root: Path,
    *,
    identity: str,
    cgroup: str,
    devices: Sequence[str] = (),
    number: tuple[int, int] = (1, 3),
    command: Sequence[str] = ("/bin/sleep", "1000"),
    capabilities: Sequence[str] = (),
    state: Path | None = None,
) -> Iterator[int]:
    """A container of runc alone, in any cgroup path that ``cgroup`` names; its pid.

    ``number`` is what its ``devices`` stand for; ``state`` a directory for runc's own records,
    which nobody knows of but the caller.
    """
    bundle = _bundle(
        scratch / f"bundle-{identity[:12]}",
        root,
        cgroup,
        devices,
        number=number,
        command=command,
        capabilities=capabilities,
    )
    pid_file = bundle / "pid"
    runc = ["runc", *(() if state is None else ("--root", str(state)))]
    subprocess.run(
        [*runc, "run", "--detach", "--pid-file", str(pid_file), "--bundle", str(bundle), identity],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(bundle / "log").open("wb"),
        check=True,
        timeout=RUN_SECONDS,
    )
    try:
        yield int(pid_file.read_text())
    finally:
        run(*runc, "delete", "--force", identity, check=False)
        shutil.rmtree(bundle, ignore_errors=True)
