"""Loads that wait to be examined: bounded, the same bytes once, small apart from large ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import OrderedDict, deque

from msgspec import Struct

from gpuwarden.cuda.loaded_modules import Examined

SMALL_BYTES = 1 << 20
"""Up to this a load is hashed where it arrives, in less than a millisecond."""
KEPT_ANSWERS = 4096
KEPT_MODULES = 32_768
PIECE_BYTES = 4 << 20

Content = tuple[str, bool]
"""SHA-256 of the bytes, and whether they are only a part of what was loaded."""


class QueueLimits(Struct, frozen=True, kw_only=True):
    """How much may wait."""

    loads: int = 4096
    size_bytes: int = 1 << 30
    """Of captured bytes, which are held in memory."""


class Waiting(Struct):
    """Bytes to be examined, and the loads that they are of; owns ``descriptor``."""

    numbers: list[int]
    descriptor: int
    size: int
    is_cut: bool
    digest: str = ""
    """Empty until it is known."""

    @property
    def content(self) -> Content:
        return self.digest, self.is_cut


class Answers:
    """What was found in bytes that have been examined; those asked for longest ago make room."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Content, tuple[int, Examined]] = OrderedDict()
        self._modules = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, content: Content) -> Examined | None:
        found = self._kept.get(content)
        if found is None:
            return None
        self._kept.move_to_end(content)
        self.hits += 1
        return found[1]

    def keep(self, content: Content, size: int, examined: Examined) -> None:
        self._forget(content)
        self._kept[content] = size, examined
        self._modules += len(examined.modules)
        while self._kept and (len(self._kept) > KEPT_ANSWERS or self._modules > KEPT_MODULES):
            self._forget(next(iter(self._kept)))

    def _forget(self, content: Content) -> None:
        _, examined = self._kept.pop(content, (0, Examined()))
        self._modules -= len(examined.modules)

    def has_size(self, size: int) -> bool:
        """Whether something of so many bytes is kept."""
        return any(kept == size for kept, _ in self._kept.values())

    def clear(self) -> None:
        self._kept.clear()
        self._modules = 0


class LoadQueue:
    """What is not answered yet, at work or not."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._small: deque[Waiting] = deque()
        self._large: deque[Waiting] = deque()
        self._undigested: deque[Waiting] = deque()
        self._by_content: dict[Content, Waiting] = {}
        self._sizes: dict[int, int] = {}
        """Size → how many of it have a known digest."""
        self.loads = 0
        self.size_bytes = 0

    def refusal(self, size: int) -> str:
        """Why so many bytes more cannot wait; empty when they can."""
        if self.loads >= self._limits.loads:
            return f"not examined: {self.loads} loads were waiting already"
        if self.size_bytes and self.size_bytes + size > self._limits.size_bytes:
            return f"not examined: {self.size_bytes >> 20} MiB of loads were waiting already"
        return ""

    def has_size(self, size: int) -> bool:
        """Whether bytes of that size wait whose digest is known."""
        return size in self._sizes

    def has(self, content: Content) -> bool:
        """Whether these bytes wait."""
        return content in self._by_content

    def join(self, waiting: Waiting) -> bool:
        """Adds its loads to bytes that wait and are the same; whether there are any."""
        same = self._by_content.get(waiting.content)
        if same is None or self.loads + len(waiting.numbers) > self._limits.loads:
            return False
        same.numbers += waiting.numbers
        self.loads += len(waiting.numbers)
        return True

    def add(self, waiting: Waiting) -> None:
        """Bytes that nobody has seen; large ones without a digest get one first."""
        self.loads += len(waiting.numbers)
        self.size_bytes += waiting.size
        self._file(waiting)

    def _file(self, waiting: Waiting) -> None:
        if not waiting.digest:
            self._undigested.append(waiting)
            return
        self._by_content[waiting.content] = waiting
        self._sizes[waiting.size] = self._sizes.get(waiting.size, 0) + 1
        (self._small if waiting.size <= SMALL_BYTES else self._large).append(waiting)

    def next_for(self, *, quick: bool) -> Waiting | None:
        """What to do next; who is ``quick`` never begins with what takes long."""
        order = (
            (self._small, self._undigested)
            if quick
            else (self._large, self._undigested, self._small)
        )
        return next((one.popleft() for one in order if one), None)

    def put_back(self, waiting: Waiting) -> None:
        """It was not begun."""
        if not waiting.digest:
            self._undigested.appendleft(waiting)
        else:
            (self._small if waiting.size <= SMALL_BYTES else self._large).appendleft(waiting)

    def digested(self, waiting: Waiting) -> None:
        """Its digest is known now, and no other has the same bytes."""
        self._file(waiting)

    def done(self, waiting: Waiting) -> None:
        """It is answered; its descriptor is closed."""
        self.loads -= len(waiting.numbers)
        self.size_bytes -= waiting.size
        if self._by_content.get(waiting.content) is waiting:
            del self._by_content[waiting.content]
            self._sizes[waiting.size] -= 1
            if not self._sizes[waiting.size]:
                del self._sizes[waiting.size]
        with contextlib.suppress(OSError):
            os.close(waiting.descriptor)

    def all_waiting(self) -> list[Waiting]:
        """Those that nobody is at, which are taken out."""
        found = [*self._small, *self._undigested, *self._large]
        for part in (self._small, self._undigested, self._large):
            part.clear()
        return found


def digest_of(descriptor: int, size: int) -> str:
    """SHA-256 of the bytes behind a descriptor. Errors: OSError."""
    digest = hashlib.sha256()
    for offset in range(0, size, PIECE_BYTES):
        digest.update(os.pread(descriptor, min(PIECE_BYTES, size - offset), offset))
    return digest.hexdigest()
