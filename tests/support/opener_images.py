"""A podman of its own with images whose one program opens devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.containers import Podman, busybox_root, no_new_cgroups, podman
from tests.support.packages import require
from tests.support.probes import ROOT, build, run


@contextmanager
def opener_images(scratch: Path, *images: str) -> Iterator[Podman]:
    """Podman with ``images``, each a busybox and ``/bin/opener``; gone afterwards."""
    build()
    require("podman", "runc", "busybox-static", "gcc", "libc6-dev")
    with no_new_cgroups():
        root = busybox_root(scratch / "root")
        source = ROOT / "tests/support/openers.c"
        run("gcc", "-O2", "-static", "-o", root / "bin/opener", source, check=True)
        with podman(scratch / "podman") as made:
            for image in images:
                made.import_image(root, image)
            yield made
