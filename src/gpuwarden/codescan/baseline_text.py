"""Baselines, differences and what was learnt, as text for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gpuwarden.code.baseline.difference import Difference
from gpuwarden.code.baseline.known import Known
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.module import Record
from gpuwarden.codescan.known_code import described
from gpuwarden.codescan.learning import Candidate
from gpuwarden.outputs.words import escape, moment

CANDIDATES_SHOWN = 200
VERSIONS_SHOWN = 4


class PackageCount(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What a baseline knows of one version of a package."""

    package: str
    version: str
    source: str
    files: int
    modules: int
    notes: tuple[str, ...] = ()


class Summary(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A baseline as a document."""

    schema: str = "gpuwarden.baseline"
    version: int = 1
    path: str
    name: str
    baseline_version: str
    created: int
    tool: str
    trust: str
    key: str
    digest_bytes: int
    digests: int
    code_digests: int
    packages: tuple[PackageCount, ...]
    asked: dict[str, Known | None] = {}


def summarise(baseline: Baseline, asked: Sequence[str] = ()) -> Summary:
    """Counts by package, and the origins of the digests asked for. Errors: Malformed."""
    modules: Counter[tuple[str, str, str]] = Counter()
    files: dict[tuple[str, str, str], set[str]] = {}
    notes: dict[tuple[str, str, str], set[str]] = {}
    for entry in baseline.entries():
        origin = entry.provenance
        key = (origin.package, origin.version, origin.source)
        modules[key] += 1
        files.setdefault(key, set()).add(origin.file)
        notes.setdefault(key, set()).add(origin.note)
    head = baseline.head
    return Summary(
        path=baseline.path,
        name=head.name,
        baseline_version=head.version,
        created=head.created,
        tool=head.tool,
        trust=baseline.signer.trust,
        key=baseline.signer.key,
        digest_bytes=head.digest_bytes,
        digests=head.digests,
        code_digests=head.codes,
        packages=tuple(
            PackageCount(
                package=package,
                version=version,
                source=source,
                files=len(files[package, version, source]),
                modules=count,
                notes=tuple(sorted(notes[package, version, source] - {""})),
            )
            for (package, version, source), count in sorted(modules.items())
        ),
        asked={digest: _known(baseline, digest) for digest in asked},
    )


def _known(baseline: Baseline, digest: str) -> Known | None:
    origin: Provenance | None = baseline.lookup(digest)
    return Known(provenance=origin, baseline=baseline.name) if origin is not None else None


def summary_text(baseline: Baseline, summary: Summary) -> str:
    """A baseline for a person."""
    made = moment(summary.created * 10**9) if summary.created else "at a time that is not told"
    lines = [
        described(baseline),
        f"made {made} by {summary.tool or 'an unnamed tool'}; "
        f"{summary.digest_bytes} bytes of each digest; {summary.code_digests} code digests",
        "",
    ]
    rows = [("package", "version", "source", "files", "modules", "")]
    rows += [
        (p.package, p.version, p.source, str(p.files), str(p.modules), "; ".join(p.notes))
        for p in summary.packages
    ]
    lines += columns(rows, right=(3, 4))
    for digest, known in summary.asked.items():
        lines.append(f"{digest}: {known.provenance.title if known else 'not known'}")
    return text_of(lines)


def difference_text(found: Difference) -> str:
    """A difference for a person; packages without a change are counted alone."""
    rows: list[tuple[str, ...]] = [("package", "versions", "added", "removed", "rebuilt", "same")]
    unchanged = 0
    for package in found.packages:
        if not (package.added or package.removed or package.rebuilt):
            unchanged += 1
            continue
        before, after = (
            ", ".join(versions[:VERSIONS_SHOWN]) + ("…" if len(versions) > VERSIONS_SHOWN else "")
            for versions in (package.versions_before, package.versions_after)
        )
        versions = before if before == after else f"{before or 'none'} → {after or 'none'}"
        numbers = (package.added, package.removed, package.rebuilt, package.same)
        rows.append((package.package, versions, *map(str, numbers)))
    lines = columns(rows, right=(2, 3, 4, 5)) if len(rows) > 1 else []
    if unchanged:
        lines.append(f"packages that are the same in both: {unchanged}")
    return text_of(lines or ["both know the same modules"])


def candidates_text(candidates: Sequence[Candidate], *, accept_flagged: bool) -> str:
    """What was learnt and what was not, and why, for a person."""
    counts = Counter(candidate.decision for candidate in candidates)
    lines = [
        f"{counts['take']} learnt, {counts['known']} known already, "
        f"{counts['refuse']} refused, {counts['flag']} flagged"
        + (f", {counts['leave']} left to baselines of their files" if counts["leave"] else "")
    ]
    told = [candidate for candidate in candidates if candidate.decision in ("refuse", "flag")]
    told.sort(key=lambda candidate: candidate.decision != "refuse")
    for candidate in told[:CANDIDATES_SHOWN]:
        module = candidate.found.module
        word = "refused" if candidate.decision == "refuse" else "flagged"
        names = ", ".join(kernel.name for kernel in module.kernels[:3])
        lines.append(
            f"  {word}: {module.kind} {module.arch} {module.digest[:16]}"
            + (f" ({names[:160]})" if names else "")
            + f": {candidate.why}"
        )
    if len(told) > CANDIDATES_SHOWN:
        lines.append(f"  and {len(told) - CANDIDATES_SHOWN} more")
    if counts["flag"] and not accept_flagged:
        lines.append("  nobody can say what flagged code computes; --accept-flagged takes it in")
    return text_of(lines)


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows as lines of equally wide columns."""
    at_right = frozenset(right)
    shown = [[escape(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in at_right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    ]


def text_of(lines: Iterable[str]) -> str:
    """Lines as text, whatever is in them escaped; one may hold several."""
    return "".join(f"{escape(line)}\n" for joined in lines for line in joined.split("\n"))
