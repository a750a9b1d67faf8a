"""What one baseline knows that another does not, by package."""

from __future__ import annotations

from collections import defaultdict

from gpuwarden.code.baseline.entries import Entry
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.module import Record


class PackageDifference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The modules of one package: only in the second, only in the first, rebuilt, in both.

    A module of the second is rebuilt when the first knows its code and not its digest; one of the
    first is removed unless the second knows its code.
    """

    package: str
    versions_before: tuple[str, ...] = ()
    versions_after: tuple[str, ...] = ()
    added: int = 0
    removed: int = 0
    rebuilt: int = 0
    same: int = 0


class Difference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """All packages of two baselines, in order of their names."""

    schema: str = "gpuwarden.baseline-diff"
    version: int = 1
    packages: tuple[PackageDifference, ...]

    @property
    def is_empty(self) -> bool:
        """Whether both know exactly the same modules."""
        return not any(p.added or p.removed or p.rebuilt for p in self.packages)


def difference(before: Baseline, after: Baseline) -> Difference:
    """What changes from ``before`` to ``after``; digests are compared in the shorter one's length.

    Errors: Malformed when one of them is damaged.
    """
    size = min(before.head.digest_bytes, after.head.digest_bytes)
    old, new = _by_digest(before, size), _by_digest(after, size)
    old_codes = {entry.code[:size] for entry in old.values()} - {b""}
    new_codes = {entry.code[:size] for entry in new.values()} - {b""}
    counts: defaultdict[str, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("added", "removed", "rebuilt", "same"), 0)
    )
    versions: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for digest, entry in new.items():
        package = entry.provenance.package
        versions[package, "after"].add(entry.provenance.version)
        if digest in old:
            counts[package]["same"] += 1
        else:
            counts[package]["rebuilt" if entry.code[:size] in old_codes else "added"] += 1
    for digest, entry in old.items():
        package = entry.provenance.package
        versions[package, "before"].add(entry.provenance.version)
        if digest not in new and entry.code[:size] not in new_codes:
            counts[package]["removed"] += 1
    return Difference(
        packages=tuple(
            PackageDifference(
                package=package,
                versions_before=tuple(sorted(versions[package, "before"])),
                versions_after=tuple(sorted(versions[package, "after"])),
                **counts[package],
            )
            for package in sorted({package for package, _ in versions})
        )
    )


def _by_digest(baseline: Baseline, size: int) -> dict[bytes, Entry]:
    return {entry.digest[:size]: entry for entry in baseline.entries()}
