"""Several baselines asked in order, and sets of digests that are in memory only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.module import Module, Record


class Known(Record, frozen=True, kw_only=True):
    """A digest that is known: its origin, and the baseline that knows it."""

    provenance: Provenance
    baseline: str


class Lookup(Protocol):
    """What can be asked for a digest."""

    @property
    def name(self) -> str: ...

    def lookup(self, digest: str) -> Provenance | None: ...

    def lookup_code(self, code_digest: str) -> Provenance | None: ...


class KnownSet:
    """Digests of modules that were looked at just now, such as those of the installed driver."""

    def __init__(self, name: str, modules: Iterable[tuple[Module, Provenance]] = ()) -> None:
        self.name = name
        self._digests: dict[str, Provenance] = {}
        self._codes: dict[str, Provenance] = {}
        for module, provenance in modules:
            self._digests.setdefault(module.digest, provenance)
            if module.code_digest:
                self._codes.setdefault(module.code_digest, provenance)

    def __len__(self) -> int:
        return len(self._digests)

    def lookup(self, digest: str) -> Provenance | None:
        """The origin of a module's digest, None when it is not known."""
        return self._digests.get(digest)

    def lookup_code(self, code_digest: str) -> Provenance | None:
        """The origin of a code digest, None when it is not known."""
        return self._codes.get(code_digest)


class Baselines:
    """Baselines in the order in which they are asked; the first that knows a digest answers."""

    def __init__(self, baselines: Sequence[Lookup] = ()) -> None:
        self.baselines = tuple(baselines)

    def __len__(self) -> int:
        return len(self.baselines)

    def lookup(self, digest: str) -> Known | None:
        """Who knows this module. Errors: Malformed when a baseline is damaged where it is asked."""
        for baseline in self.baselines:
            provenance = baseline.lookup(digest)
            if provenance is not None:
                return Known(provenance=provenance, baseline=baseline.name)
        return None

    def lookup_code(self, code_digest: str) -> Known | None:
        """Who knows this code from another build. Errors: as ``lookup``."""
        for baseline in self.baselines:
            provenance = baseline.lookup_code(code_digest) if code_digest else None
            if provenance is not None:
                return Known(provenance=provenance, baseline=baseline.name)
        return None
