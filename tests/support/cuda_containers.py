"""Containers whose program calls the stand-in CUDA driver library, stepped like those of the host.

The library is the host's file, bind-mounted, as container runtimes do it: all containers have one
inode. Or it is a file of the container's own, whatever it is called there.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.containers import Podman, busybox_root, no_new_cgroups, podman, run
from tests.support.cuda_bed import FILE_NAME, SONAME, Bed, Program, bed
from tests.support.packages import require, require_root

IMAGE = "localhost/gpuwarden-test/cuda:1"
LIBRARY = f"/usr/lib64/{FILE_NAME}"
"""Where a container has it, if it is not told otherwise."""


@dataclass
class Contained(Program):
    """The program of a container: ``pid`` is the host's number of it."""

    identity: str = ""
    """The container's, 64 hexadecimal digits."""


@dataclass(frozen=True)
class CudaContainers:
    """A podman with an image that has the program."""

    engine: Podman
    of: Bed

    @contextmanager
    def running(
        self,
        *commands: str,
        library: Path | None = None,
        private_as: str | None = None,
        options: Sequence[str] = (),
        image: str = IMAGE,
    ) -> Iterator[Contained]:
        """A container that has run ``commands`` and waits for more; removed on leaving.

        ``library``: the host's file, the plain one unless it is given. ``private_as``: a path at
        which the container gets a copy of its own instead, in its own file system. ``options`` are
        podman's.
        """
        library = library or self.of.library()
        at = private_as or LIBRARY
        mounted = ("--volume", f"{library}:{at if private_as is None else '/host/library'}:ro")
        program = ["/bin/cuda_program", at, *commands, "-"]
        if private_as is not None:
            script = (
                f'mkdir -p "${{1%/*}}" && cp /host/library "$1" && shift && exec {program[0]} "$@"'
            )
            program = ["sh", "-c", script, "sh", at, *program[1:]]
        name, process = self.engine.piped(image, *mounted, *options, command=program)
        inside = Contained(process)
        try:
            inside.wait_ready()
            inside.pid = self.engine.pid(name)
            inside.identity = self.engine("inspect", "--format", "{{.Id}}", name)
            yield inside
        finally:
            self.engine("rm", "--force", "--time", "0", name, check=False)
            inside.close()

    def image(self, reference: str) -> str:
        """Another name for the same image, by which a policy can tell workloads apart."""
        self.engine("tag", IMAGE, reference)
        return reference


def root_with_program(directory: Path, of: Bed) -> Path:
    """A root directory with a shell, the program, and the libraries that it needs."""
    root = busybox_root(directory)
    for name in ("cp", "mkdir", "mv", "rm"):
        (root / "bin" / name).symlink_to("busybox")
    shutil.copy(of.program(), root / "bin/cuda_program")
    needed = re.findall(
        r"(/\S+) \(0x", run("ldd", str(of.program())) + run("ldd", str(of.library()))
    )
    for path in {*needed}:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    (root / "usr/lib64").mkdir(parents=True, exist_ok=True)
    (root / "usr/lib64" / SONAME).symlink_to(FILE_NAME)
    return root


@contextmanager
def cuda_containers(of: Bed | None = None) -> Iterator[CudaContainers]:
    """Podman with ``IMAGE``; gone afterwards with all its containers."""
    require_root()
    require("podman", "runc", "busybox-static")
    of = of or bed()
    # podman wants a short path.
    with no_new_cgroups(), tempfile.TemporaryDirectory(prefix="gpuwarden-") as scratch:
        root = root_with_program(Path(scratch, "root"), of)
        with podman(Path(scratch, "podman")) as engine:
            engine.import_image(root, IMAGE)
            yield CudaContainers(engine, of)
