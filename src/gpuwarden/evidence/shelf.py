"""A folder of the archive: what is put there, and what had to be left out of it, in one way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.archive import ArchiveWriter
from gpuwarden.evidence.intake import Data
from gpuwarden.evidence.masks import mask_text
from gpuwarden.evidence.opened_process import OpenedProcess
from gpuwarden.host import Host
from gpuwarden.outputs.words import escape, json_text

SQUEEZED_FROM_BYTES = 256 << 10


class Shelf:
    """``folder`` is the name in the archive, ``of`` what a person calls what is in it."""

    def __init__(self, writer: ArchiveWriter, folder: str, of: str) -> None:
        self.writer = writer
        self.folder = folder
        self.of = of

    def below(self, name: str, of: str = "") -> Shelf:
        """A folder in this one."""
        return Shelf(self.writer, f"{self.folder}/{name}", of or self.of)

    def put(self, name: str, data: Data, what: str, **bounds: Any) -> bool:
        """One member; whether it is there. ``bounds`` as ``ArchiveWriter.add`` takes them."""
        stored = self.writer.add(f"{self.folder}/{name}", data, what=self._named(what), **bounds)
        return stored is not None

    def put_text(self, name: str, data: bytes, what: str, limit: int) -> bool:
        """Text up to ``limit`` bytes, which a larger one is cut at; compressed if it is long."""
        long = len(data) > SQUEEZED_FROM_BYTES
        return self.put(name, data, what, limit_bytes=limit, compress=long, cut=True)

    def put_json(self, name: str, document: Any, what: str) -> bool:
        """A document; control characters stand in it as escapes."""
        data = json_text(document).encode("utf-8", "backslashreplace")
        return self.put(name, data, what, compress=len(data) > SQUEEZED_FROM_BYTES)

    def copy(self, process: OpenedProcess, name: str, limit: int, stored: str = "") -> bool:
        """A file of a process's directory in /proc as it reads now, up to ``limit`` bytes."""
        what = f"/proc/{process.pid}/{name}"
        with self.trying(what):
            data = process.read(name, limit + 1)
            return self.put_text(stored or name.replace("/", "-"), data, what, limit)
        return False

    def copy_text(self, host: Host, path: str, limit: int, stored: str) -> bool:
        """A file of the host, regular or of /proc, secrets in it masked, up to ``limit`` bytes."""
        with self.trying(path):
            text = host.read_bytes(path, limit + 1).decode("utf-8", "backslashreplace")
            return self.put_text(stored, mask_text(text).encode(), path, limit)
        return False

    def unread(self, what: str, why: str) -> None:
        """Notes what could not be read."""
        self.writer.unread(self._named(what), escape(why))

    def left_out(self, what: str, why: str, size_bytes: int | None = None) -> None:
        """Notes what is not taken."""
        self.writer.left_out(self._named(what), escape(why), size_bytes)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What cannot be read is noted, and the rest goes on."""
        try:
            yield
        except GpuwardenError as error:
            reason = f"{error}; {error.remedy}" if error.remedy else str(error)
            self.unread(what, reason)
        except OSError as error:
            self.unread(what, error.strerror or str(error))

    def _named(self, what: str) -> str:
        return escape(f"{self.of}: {what}" if self.of else what)
