"""Where a known digest comes from, and which of two origins of one digest is kept."""

from __future__ import annotations

from typing import Literal, get_args

from gpuwarden.code.module import Record

Source = Literal["library", "driver", "jit", "learned"]
"""From a release; from a driver's files; compiled from known sources; seen in a known-good run."""

SOURCES: tuple[Source, ...] = get_args(Source)
"""In the order of how much each is worth, which is also how a file numbers them."""


class Provenance(Record, frozen=True, kw_only=True):
    """The origin of a digest; texts are as the package or image gives them, so escape them."""

    package: str
    """A package's name, an image's reference, or a path when it is only a file."""
    version: str = ""
    file: str = ""
    """Inside the package or image; its members down to the module."""
    container: str = ""
    container_digest: str = ""
    source: Source = "library"
    when: int = 0
    """Seconds since 1970 when it was built or learned; 0: not told."""
    tool: str = ""
    note: str = ""
    """What a person should know: ``accepted although it could not be judged``."""

    @property
    def order(self) -> tuple[int, str, str, str, str, str, str, str, int]:
        """What sorts origins; of two of one digest the lower one is kept."""
        return (
            SOURCES.index(self.source),
            self.package,
            self.version,
            self.file,
            self.container,
            self.container_digest,
            self.tool,
            self.note,
            self.when,
        )

    @property
    def title(self) -> str:
        """``package version file`` without what is not told."""
        return " ".join(part for part in (self.package, self.version, self.file) if part)
