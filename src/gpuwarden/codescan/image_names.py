"""Images by name: which container engine has one, and the engine's own export of it as a stream.

The stream is read by a confined child like any other archive; nothing is written by us. Engines
are found by ``PATH`` and configured by their own environment (``DOCKER_HOST``,
``CONTAINER_HOST``, ``CONTAINERD_ADDRESS``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from msgspec import Struct

from gpuwarden.errors import Unavailable, UsageError
from gpuwarden.pattern import pattern

ENGINES = ("podman", "docker", "containerd")
ASK_SECONDS = 30
END_SECONDS = 30
PIPE_BYTES = 1 << 20
COMPLAINT_LIMIT = 400
NAMESPACES_LIMIT = 64
# A reference: [host[:port]/]path[:tag][@algorithm:digest], or an id (distribution/reference).
_REFERENCE = pattern(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}\Z")


class NamedImage(Struct, frozen=True):
    """An image that an engine has, and the command that exports it to its standard output."""

    engine: str
    name: str
    command: tuple[str, ...]


class Export:
    """A running export; ``descriptor`` is the stream."""

    def __init__(self, image: NamedImage) -> None:
        """Starts it. Errors: Unavailable."""
        self._complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
        self.descriptor, writer = os.pipe2(os.O_CLOEXEC)
        # More at once, where the user's share of pipes allows it (pipe(7)).
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self._process = subprocess.Popen(
                image.command,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=self._complaints,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._complaints)
            os.close(self.descriptor)
            raise Unavailable(f"{image.engine}: {error.strerror}") from error
        finally:
            os.close(writer)

    def close(self) -> str:
        """Ends it; why the export is not complete, empty when it is."""
        os.close(self.descriptor)
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        said = os.pread(self._complaints, COMPLAINT_LIMIT, 0).decode("utf-8", "replace").strip()
        os.close(self._complaints)
        return f"the export ended with status {code}: {said}" if code != 0 else ""


def find_image(target: str) -> NamedImage:
    """The image that ``target`` names: ``podman:NAME``, ``docker:NAME``, ``containerd:NAME``, or a
    name that the first of these that has it is asked for.

    Errors: UsageError when no engine here has it.
    """
    engine, colon, name = target.partition(":")
    engines: Sequence[str] = (engine,) if colon and engine in ENGINES else ENGINES
    name = name if colon and engine in ENGINES else target
    if not _REFERENCE.match(name):
        raise UsageError(f"{target}: no such file, and not an image's name")
    asked: list[str] = []
    for one in engines:
        if shutil.which(_PROGRAMS[one]) is None:
            continue
        asked.append(one)
        if (image := _FINDERS[one](name)) is not None:
            return image
    if not asked:
        raise UsageError(f"{target}: no such file, and no container engine to ask for an image")
    raise UsageError(
        f"{target}: no such file, and no image of that name in {', '.join(asked)}",
        remedy="images are not pulled: pull it first, or export it to a file",
    )


def _podman(name: str) -> NamedImage | None:
    if _says(("podman", "image", "exists", name)) is None:
        return None
    # The archive of one image is written as a stream; oci-archive would be written to disk first.
    command = ("podman", "save", "--quiet", "--format", "docker-archive", name)
    return NamedImage("podman", name, command)


def _docker(name: str) -> NamedImage | None:
    if _says(("docker", "image", "inspect", "--format", "{{.Id}}", name)) is None:
        return None
    return NamedImage("docker", name, ("docker", "save", name))


def _containerd(name: str) -> NamedImage | None:
    """In any of its namespaces; Kubernetes' images are in ``k8s.io``."""
    namespaces = (_says(("ctr", "namespaces", "list", "--quiet")) or "").split()
    for namespace in namespaces[:NAMESPACES_LIMIT]:
        known = (
            _says(("ctr", "--namespace", namespace, "images", "list", "--quiet")) or ""
        ).split()
        if full := next((one for one in known if _is_called(one, name)), None):
            command = ("ctr", "--namespace", namespace, "images", "export", "-", full)
            return NamedImage("containerd", full, command)
    return None


def _is_called(full: str, name: str) -> bool:
    """Whether a short name, without a registry and with the usual tag left out, means this one."""
    last = name.rpartition("/")[2]
    tagged = name if ":" in last or "@" in last else f"{name}:latest"
    return full in (name, tagged) or full.endswith(f"/{tagged}")


def _says(command: Sequence[str]) -> str | None:
    """What it prints; None when it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


_PROGRAMS = {"podman": "podman", "docker": "docker", "containerd": "ctr"}
_FINDERS: dict[str, Callable[[str], NamedImage | None]] = {
    "podman": _podman,
    "docker": _docker,
    "containerd": _containerd,
}
