"""`gpuwarden respond` as a command of its own, which takes char major 203 for a GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuwarden.probes import pinning
from tests.support.probes import ROOT, run
from tests.support.watching import devices_file

SECONDS = 120


def respond(
    directory: Path, *arguments: str, state: Path | None = None, check: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it with its evidence and its memory below ``directory``; ``check``: its exit code."""
    state = state or directory / "state"
    argv = [
        "unshare", "--mount", "--propagation", "private", "sh", "-c",
        f'mount --bind {devices_file(directory)} /proc/devices && exec "$@"', "sh",
        sys.executable, "-m", "gpuwarden", "respond", "--state", str(state),
        "--evidence-dir", str(directory / "evidence"), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "140"},
    )
    if check is not None:
        assert done.returncode == check, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@contextmanager
def bpf_file_system() -> Iterator[None]:
    """A BPF file system that a command's own mount namespace shares; as it was afterwards."""
    was_there = pinning._is_bpf(pinning.FILE_SYSTEM)
    if not was_there:
        run("mount", "-t", "bpf", "bpf", pinning.FILE_SYSTEM, check=True)
    try:
        yield
    finally:
        if not was_there:
            run("umount", pinning.FILE_SYSTEM, check=True)
