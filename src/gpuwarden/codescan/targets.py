"""From a target's name to the jobs that read it: files, folders and images by name."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator

from gpuwarden.code.module import Place, Problem
from gpuwarden.code.report import ScannedProcess, TargetKind
from gpuwarden.codescan.image_names import ENGINES, Export, NamedImage, find_image
from gpuwarden.codescan.images import INDEX
from gpuwarden.codescan.tasks import FileTask
from gpuwarden.codescan.walk import OpenFile, Walk, shown
from gpuwarden.codescan.worker import Job
from gpuwarden.errors import Unavailable, UsageError

SHARED_FROM_BYTES = 64 << 20
"""Files from this size on are read by all children, each a share of them."""
LAYOUT_MARK = "oci-layout"


class Target:
    """One thing that was asked for; ``jobs`` opens it bit by bit, as there is time for it."""

    def __init__(
        self,
        name: str,
        what: TargetKind,
        jobs: Callable[[], Iterator[Job | Problem]],
        skipped: Counter[str] | None = None,
        process: Callable[[], ScannedProcess] | None = None,
    ) -> None:
        self.name = name
        self.what = what
        self.jobs = jobs
        self.skipped = skipped if skipped is not None else Counter()
        """Counted while its jobs are taken."""
        self.process = process
        """Of a process: who it is, asked when all its jobs are done."""


class Targets:
    """Makes targets of names; numbers of tasks are theirs to give, each once."""

    def __init__(self, shares: int) -> None:
        self._walk = Walk()
        self._shares = shares
        self.numbers = itertools.count()

    def target(self, name: str) -> Target:
        """What ``name`` is: a path that is there, else an image's name.

        Errors: UsageError when it is neither.
        """
        if not os.path.lexists(name) or name.partition(":")[0] in ENGINES:
            return self._image(find_image(name))
        try:
            found = self._walk.file(name)
        except OSError as error:
            raise UsageError(f"{name}: cannot be read: {error.strerror or error}") from error
        name = shown(name)
        if isinstance(found, int):
            skipped: Counter[str] = Counter()
            is_layout = all(_has(found, one) for one in (INDEX, LAYOUT_MARK))
            folder = found
            return Target(
                name, "folder", lambda: self._folder(name, folder, skipped, is_layout), skipped
            )
        opened = found
        return Target(name, "file", lambda: self._file(Place(target=name), opened, False))

    def _folder(
        self, name: str, folder: int, skipped: Counter[str], is_layout: bool
    ) -> Iterator[Job | Problem]:
        for found in self._walk.below(folder, name, skipped):
            if isinstance(found, Problem):
                yield found
            else:
                place = Place(target=name, members=("/".join(found.path),))
                yield from self._file(place, found, is_layout)

    def _file(self, place: Place, opened: OpenFile, in_layout: bool) -> Iterator[Job]:
        shares = self._shares if opened.size >= SHARED_FROM_BYTES and not in_layout else 1
        # All are open before the first is given away, and closed by whoever does the job.
        descriptors = [opened.descriptor, *(os.dup(opened.descriptor) for _ in range(shares - 1))]
        for share, descriptor in enumerate(descriptors):
            task = FileTask(
                number=next(self.numbers),
                place=place,
                size=opened.size,
                share=share,
                shares=shares,
                in_layout=in_layout,
            )
            yield Job(task, descriptor, closing(descriptor), opened.cache)

    def _image(self, image: NamedImage) -> Target:
        name = f"{image.engine}:{image.name}"

        def jobs() -> Iterator[Job | Problem]:
            try:
                export = Export(image)
            except Unavailable as error:
                yield Problem(place=Place(target=name), what="image", reason=str(error))
                return
            task = FileTask(number=next(self.numbers), place=Place(target=name))
            yield Job(task, export.descriptor, export.close)

        return Target(name, "image", jobs)


def closing(descriptor: int) -> Callable[[], str]:
    """What ends a job that is nothing but an open descriptor."""

    def close() -> str:
        os.close(descriptor)
        return ""

    return close


def _has(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True
