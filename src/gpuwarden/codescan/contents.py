"""What a file holds, down through its archives: told as modules, problems, layers and images.

Runs in a confined child. Whatever the bytes are, every one of them is looked at or is a Problem.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from gpuwarden.code import ar
from gpuwarden.code.extract import modules_in
from gpuwarden.code.located import Located, place_at
from gpuwarden.code.module import Place, Problem
from gpuwarden.codescan import images, tar, zips
from gpuwarden.codescan.board import Board
from gpuwarden.codescan.memory_windows import Memory, Scratch, memory_modules
from gpuwarden.codescan.module_answers import ModuleAnswers
from gpuwarden.codescan.share import Share
from gpuwarden.codescan.streams import (
    Budget,
    Buffered,
    Chained,
    DescriptorStream,
    Exhausted,
    MemoryStream,
    Stream,
    Unpacked,
    compression,
    read_up_to,
)
from gpuwarden.codescan.tasks import (
    DOCUMENT_LIMIT_BYTES,
    Answer,
    Assess,
    Digest,
    DigestTask,
    Document,
    DocumentsTask,
    Done,
    FileTask,
    LoadTask,
    MemoryTask,
    Settings,
    Trouble,
)
from gpuwarden.codescan.windows import WINDOW_LIMIT_BYTES, windows
from gpuwarden.errors import Malformed

HEAD_BYTES = tar.BLOCK
DEBIAN_PACKAGE = b"debian-binary"
WHEEL_MEMBER = ".dist-info/WHEEL"
NAME_LIMIT = 4096
PROBLEMS_LIMIT = 1000
SMALLEST_MODULE_BYTES = 16
PIECE_BYTES = 4 << 20
_scratch = Scratch()
"""A child is at one task at a time, and keeps it for the next."""


class Examiner:
    """One task's reading of one descriptor; ``send`` takes its answers."""

    def __init__(
        self,
        settings: Settings,
        assess: Assess | None,
        send: Callable[[Answer], None],
        board: Board,
    ) -> None:
        self._settings = settings
        self._bounds = settings.bounds
        self._send = send
        self._board = board
        self._budget = Budget(settings.bounds.total_bytes)
        self._answers = ModuleAnswers(settings, assess, send, self.trouble, self._budget)
        self._share = Share()
        self._what = "file"
        self._skipped: dict[str, int] = {}
        self._problems = 0

    # ------------------------------------------------------------------------------ tasks

    def file(self, task: FileTask, descriptor: int) -> None:
        """Answers for a file or a stream."""
        self._share = Share(task.share, task.shares)
        place = task.place
        with self._trouble_of(place, is_task=True):
            stream = Buffered(DescriptorStream(descriptor, task.size, self._board.count))
            head = stream.peek(HEAD_BYTES)
            layout = images.ArchiveNotes() if task.in_layout else None
            if task.in_layout and head.startswith(b"{"):
                stream = self._layout_document(task, stream)
            if task.size is None or compression(head) or tar.is_tar(head):
                self._content(stream, place, 0, layout)
            else:
                self._mapped(descriptor, task.size, place)
            for layer, notes in layout.layers if layout is not None else ():
                self._layer(layer, notes)
        self._done(task.number)

    def documents(self, task: DocumentsTask) -> None:
        """Answers with the images of a layout of which these are the documents."""
        self._images(task.documents, {}, task.place)
        self._done(task.number)

    def memory(self, task: MemoryTask, descriptor: int) -> None:
        """Answers for a process's memory."""
        self._what = "process"
        memory = Memory(descriptor, task.spans, task.stop, self._board.count, scratch=_scratch)
        with self._trouble_of(task.place, is_task=True):
            self._found(memory_modules(memory, task, self._bounds))
        self._done(task.number)

    def load(self, task: LoadTask, descriptor: int) -> None:
        """Answers for what a driver was given to load: it opens no archives of ours."""
        self._what = "load"
        with self._trouble_of(task.place, is_task=True):
            if task.size >= SMALLEST_MODULE_BYTES:
                # Private: older kernels refuse to share what is sealed against writing.
                mapped = mmap.mmap(descriptor, task.size, mmap.MAP_PRIVATE, mmap.PROT_READ)
                modules = modules_in(memoryview(mapped), task.place, self._bounds)
                self._found(modules, is_mapped=True)
        self._done(task.number)

    def digest(self, task: DigestTask, descriptor: int) -> None:
        """The digest of a file as it is."""
        digest = hashlib.sha256()
        with self._trouble_of(task.place, is_task=True):
            for offset in range(0, task.size, PIECE_BYTES):
                piece = os.pread(descriptor, min(PIECE_BYTES, task.size - offset), offset)
                digest.update(piece)
                self._board.count(len(piece))
            self._send(Digest(digest=digest.hexdigest()))
        self._done(task.number)

    def _layout_document(self, task: FileTask, stream: Buffered) -> Buffered:
        name = task.place.members[-1] if task.place.members else ""
        if not images.is_document(name, task.size or 0):
            return stream
        text = bytes(read_up_to(stream, DOCUMENT_LIMIT_BYTES))
        self._send(Document(name=name, text=text))
        return Buffered(MemoryStream(text))

    def _done(self, number: int) -> None:
        if self._problems > PROBLEMS_LIMIT:
            self._skip("problem beyond those told", self._problems - PROBLEMS_LIMIT)
        self._send(
            Done(
                number=number,
                what=self._what,
                read_bytes=self._board.read_bytes,
                files=self._board.files,
                skipped=self._skipped,
            )
        )

    # ------------------------------------------------------------------------------ troubles

    def trouble(self, place: Place, what: str, reason: str) -> None:
        """Tells of something that could not be read."""
        self._problem(Problem(place=place, what=what, reason=reason))

    def _problem(self, problem: Problem) -> None:
        if self._share.is_first:
            self._problems += 1
            if self._problems <= PROBLEMS_LIMIT:
                self._send(Trouble(problem=problem))

    @contextmanager
    def _trouble_of(self, place: Place, *, is_task: bool = False) -> Iterator[None]:
        """Whatever cannot be read within is a problem of this place, and what follows goes on."""
        try:
            yield
        except Exhausted as error:
            if not is_task:
                raise
            self.trouble(place, "contents", str(error))
        except Malformed as error:
            self.trouble(place, "contents", str(error))
        except MemoryError:
            self.trouble(place, "contents", "more memory is needed than is allowed")
        except Exception as error:  # noqa: BLE001
            # A parser's mistake must not end the task; it is one all the same, and is told.
            self.trouble(place, "contents", f"{type(error).__name__}: {error}")

    def _skip(self, what: str, count: int = 1) -> None:
        self._skipped[what] = self._skipped.get(what, 0) + count

    # ------------------------------------------------------------------------------ contents

    def _mapped(self, descriptor: int, size: int, place: Place) -> None:
        if self._share.is_first:
            self._board.begin(place)
        if size < SMALLEST_MODULE_BYTES:
            return
        view = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        before = self._board.read_bytes
        self._buffer(view, place, 0, is_mapped=True)
        self._board.count(size - (self._board.read_bytes - before))

    def _buffer(
        self, view: memoryview, place: Place, depth: int, *, is_mapped: bool = False
    ) -> None:
        if zips.is_zip(view):
            self._zip(view, place, depth)
        elif is_debian(bytes(view[:HEAD_BYTES])):
            self._debian(view, place, depth)
        else:
            self._found(modules_in(view, place, self._bounds), is_mapped=is_mapped)

    def _content(
        self, stream: Buffered, place: Place, depth: int, outer: images.ArchiveNotes | None = None
    ) -> None:
        """What a stream holds; ``outer`` is the archive that it is a member of."""
        head = stream.peek(HEAD_BYTES)
        method = compression(head)
        is_tar = not method and tar.is_tar(head)
        in_memory = zips.starts_zip(head) or is_debian(head)
        if (method or is_tar or in_memory) and depth >= self._bounds.nesting:
            self.trouble(place, "archive", f"nested deeper than {self._bounds.nesting}")
        elif method:
            # Not shared out: each worker would unpack all of it.
            if self._share.is_first:
                inner = Buffered(Unpacked(stream, method, self._budget))
                with self._alone():
                    self._content(inner, place, depth + 1, outer)
        elif is_tar:
            self._tar(stream, place, depth, outer)
        elif in_memory:
            data = read_up_to(stream, WINDOW_LIMIT_BYTES + 1)
            if len(data) <= WINDOW_LIMIT_BYTES:
                self._buffer(memoryview(data), place, depth)
            else:
                reason = f"of more than {WINDOW_LIMIT_BYTES >> 20} MiB inside another archive"
                self.trouble(place, "archive", reason)
                self._plain(Chained(data, stream), place)
        else:
            self._plain(stream, place)

    def _plain(self, stream: Stream, place: Place) -> None:
        for window in windows(stream):
            if len(window.data) >= SMALLEST_MODULE_BYTES:
                here = place_at(place, window.offset) if window.offset else place
                self._found(modules_in(window.data, here, self._bounds))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """What comes within is this worker's, all of it."""
        held, self._share = self._share, Share()
        try:
            yield
        finally:
            self._share = held

    # ------------------------------------------------------------------------------ archives

    def _tar(
        self, stream: Buffered, place: Place, depth: int, outer: images.ArchiveNotes | None
    ) -> None:
        self._is_archive(place)
        notes = images.LayerNotes(self._settings.path_key)
        archive = images.ArchiveNotes()
        try:
            for member in tar.members(stream, self._bounds.members):
                notes.note(member)
                if member.kind in ("hard link", "symbolic link"):
                    archive.link(member)
                elif member.kind in ("device", "FIFO"):
                    self._skip(f"{member.kind}s in archives")
                elif member.size:
                    self._tar_member(member, inside(place, member.name), depth, archive)
        finally:
            if outer is not None:
                outer.layers.append((place, notes))
            self._images(archive.documents, archive.links, place, archive.layers)

    def _tar_member(
        self, member: tar.TarMember, place: Place, depth: int, archive: images.ArchiveNotes
    ) -> None:
        is_mine = self._share.is_mine(member.size)
        is_document = archive.wants(member)
        if not is_mine and not is_document:
            return
        stream: Stream = member.data
        with self._alone() if is_mine else nullcontext(), self._trouble_of(place):
            if is_document:
                text = bytes(read_up_to(stream, member.size))
                archive.keep(member.name, text)
                stream = MemoryStream(text)
            if is_mine:
                self._board.begin(place)
                self._content(Buffered(stream), place, depth + 1, archive)

    def _zip(self, view: memoryview, place: Place, depth: int) -> None:
        self._is_archive(place)
        try:
            archive = zips.ZipArchive(view, self._budget, self._bounds.members)
        except Malformed:
            # What cannot be read as an archive is looked at as bytes, and a problem all the same.
            self._found(modules_in(view, place, self._bounds))
            raise
        for member in archive.members():
            if place.members == () and member.name.endswith(WHEEL_MEMBER):
                self._what = "wheel"
            if not self._share.is_mine(member.packed):
                continue
            here = inside(place, member.name)
            self._board.begin(here)
            with self._alone():
                if member.refusal:
                    self.trouble(here, "member", member.refusal)
                    continue
                with self._trouble_of(here):
                    self._content(Buffered(member.data), here, depth + 1)
        if archive.has_gaps or not zips.starts_zip(bytes(view[:4])):
            self._found(modules_in(view, place, self._bounds))

    def _debian(self, view: memoryview, place: Place, depth: int) -> None:
        self._is_archive(place)
        for member in ar.members(view, self._bounds):
            here = inside(place, member.name)
            if self._share.is_mine(member.end - member.start):
                with self._alone(), self._trouble_of(here):
                    stream = MemoryStream(view[member.start : member.end])
                    self._content(Buffered(stream), here, depth + 1)

    def _is_archive(self, place: Place) -> None:
        if not place.members:
            self._what = "archive"

    # ------------------------------------------------------------------------------ images

    def _images(
        self,
        documents: Mapping[str, bytes],
        links: Mapping[str, str],
        place: Place,
        layers: Iterable[tuple[Place, images.LayerNotes]] = (),
    ) -> None:
        if images.INDEX not in documents and images.DOCKER_MANIFEST not in documents:
            return
        told = False
        with self._trouble_of(place, is_task=True):
            for image in images.manifests(documents, links, place.members):
                told = True
                if self._share.is_first:
                    self._send(image)
        if told:
            self._what = self._what if place.members else "image"
            for layer, notes in layers:
                self._layer(layer, notes)

    def _layer(self, place: Place, notes: images.LayerNotes) -> None:
        self._send(notes.layer(place.members))
        if notes.overfull:
            reason = f"{notes.overfull}: what it hides of the layers below is not all known"
            self.trouble(place, "layer", reason)

    # ------------------------------------------------------------------------------ modules

    def _found(self, found: Iterable[Located | Problem], *, is_mapped: bool = False) -> None:
        reached = 0
        for one in found:
            # How far it has come in a file that is mapped, where nothing is read piece by piece.
            offset = one.place.offset or 0
            self._board.count(offset - reached if is_mapped and offset > reached else 0)
            reached = max(reached, offset)
            if isinstance(one, Problem):
                self._problem(one)
            elif self._share.is_mine(len(one.stored)):
                self._answers.tell(one)


def inside(place: Place, name: str) -> Place:
    """A member of the archive at ``place``."""
    return Place(target=place.target, members=(*place.members, name[:NAME_LIMIT]))


def is_debian(head: bytes) -> bool:
    """Whether a file that begins so is a Debian package, whose members are tar archives."""
    start = len(ar.MAGIC)
    return head.startswith(ar.MAGIC) and head.startswith(DEBIAN_PACKAGE, start)
