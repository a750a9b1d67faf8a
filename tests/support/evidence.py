"""Evidence collected for tests: an archive of a real subject, and what is in it."""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import zstandard

from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.collect import collect
from gpuwarden.evidence.manifest import Manifest
from gpuwarden.evidence.verify import verify
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.policy import Policy

LIMIT_BYTES = 512 << 20


class Collected(NamedTuple):
    """A sealed archive that verifies."""

    path: Path
    manifest: Manifest
    files: dict[str, bytes]
    """Decompressed, under the names that they were given."""

    def json(self, name: str) -> Any:
        """A document in it."""
        return json.loads(self.files[name])

    def of(self, pid: int, name: str) -> Any:
        """A document about a process."""
        return self.json(f"processes/{pid}/{name}.json")

    @property
    def noted(self) -> str:
        """All that was left out or not read, with the reasons."""
        notes = (*self.manifest.left_out, *self.manifest.unread)
        return "\n".join(f"{one.what}: {one.why}" for one in notes)


def collected(
    path: Path,
    wanted: Wanted,
    policy: Policy | None = None,
    *,
    tell: Callable[[str], None] = lambda line: None,
    limit_bytes: int = LIMIT_BYTES,
    deadline_seconds: float | None = None,
) -> Collected:
    """What ``collect`` comes to; it verifies. Errors: as ``collect``."""
    with ArchiveWriter(
        str(path), limit_bytes=limit_bytes, deadline_seconds=deadline_seconds
    ) as writer:
        account = collect(wanted, writer, policy=policy or Policy(), policy_path=None, tell=tell)
        sealed = writer.close(account, None)
    assert verify(str(path)).holds(key_named=False)
    files: dict[str, bytes] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            data = file.read()
            if member.name.endswith(".zst"):
                data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
            files[member.name.removesuffix(".zst")] = data
    return Collected(path, sealed.manifest, files)


@contextmanager
def python(program: str, *argv: str, **options: Any) -> Iterator[Popen[str]]:
    """A Python process that runs ``program``, once that has printed a line; ended on leaving."""
    words = [sys.executable, "-c", program, *argv]
    process = Popen(words, stdin=PIPE, stdout=PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()
