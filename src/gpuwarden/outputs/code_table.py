"""CodeReport → text: a line a target, then what is not known with its reasons, then what was not
read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from gpuwarden.code.module import Kind, Module, Place
from gpuwarden.code.report import CodeReport, FoundModule, ScannedTarget, Sighting, Standing
from gpuwarden.outputs.sheet import Sheet
from gpuwarden.outputs.words import MIB, escape
from gpuwarden.pattern import pattern

NARROWEST = 60
PLACES_SHOWN = 3
PLACES_LISTED = 10
UNKNOWN_SHOWN = 5
FILES_SHOWN = 10
PROBLEMS_SHOWN = 20
DIGEST_SHOWN = 16
KERNEL_NAME_SHOWN = 200
NAMES: dict[Kind, str] = {
    "cubin": "cubin",
    "ptx": "PTX",
    "lto-ir": "LTO-IR",
    "tile-ir": "Tile IR",
    "amdgpu": "AMD",
    "unknown": "of a kind that is not known",
}
_NUMBER = pattern(r"\d+")
_DIGEST = pattern(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
# Of most to least concern; empty is where nothing was judged.
ANSWERS = (
    "hash-like",
    "unreadable",
    "unknown opcodes",
    "architecture unknown",
    "form not judged",
    "architecture too old",
    "not enough code",
    "not hash-like",
    "",
)
BY_ITSELF = (
    "hash-like here is no alarm: of so many unknown modules of one file, some look so by chance"
)
QUIET_ANSWERS = frozenset({"not hash-like", "not enough code", ""})
"""What there are thousands of in any framework."""


class Wanted(Struct, frozen=True, kw_only=True):
    """What a person asked to see."""

    every_module: bool = False
    kernels: bool = False
    all_layers: bool = False


def render(
    report: CodeReport, *, width: int, colour: bool, exit_code: int, wanted: Wanted | None = None
) -> str:
    """The report as text, ``width`` columns wide."""
    wanted = wanted or Wanted()
    sheet = Sheet(max(width, NARROWEST), colour=colour)
    _targets(sheet, report, wanted)
    shown = [one for one in report.modules if wanted.all_layers or not one.is_hidden]
    _alarming(sheet, [one for one in shown if one.is_alarming], wanted)
    if wanted.every_module:
        _every(sheet, shown, wanted)
    else:
        _unknown(sheet, [one for one in shown if _is_unknown(one)], wanted)
    _problems(sheet, report)
    for one in report.unconfined:
        sheet.lead("less confined: ", one, hang=2, style="yellow")
    sheet.blank()
    sheet.add(f"{_verdict(report, shown)}; exit code {exit_code}")
    return sheet.text()


# ---------------------------------------------------------------------------------- targets


def _targets(sheet: Sheet, report: CodeReport, wanted: Wanted) -> None:
    seen: dict[str, list[Module]] = {}
    alarming: Counter[str] = Counter()
    for one in report.modules:
        for sighting in one.sightings:
            if wanted.all_layers or not sighting.hidden:
                seen.setdefault(sighting.place.target, []).append(one.module)
            elif one.is_alarming:
                alarming[sighting.place.target] += 1
    for target in report.targets:
        modules = seen.get(target.name, [])
        lead = f"{escape(target.name)}: "
        sheet.lead(lead, _line(target, modules, wanted), hang=2, style="bold")
        for line in _notes(target, alarming[target.name], wanted):
            sheet.add(line, indent=2, hang=2, style="dim")


def _line(target: ScannedTarget, modules: Sequence[Module], wanted: Wanted) -> str:
    kinds = Counter(NAMES[module.kind] for module in modules)
    told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    distinct = len({module.digest for module in modules})
    head = f"{_plural(len(modules), 'module')}" + (f" ({told})" if told else "")
    parts = [head] if modules else ["no GPU code"]
    if modules:
        if span := architectures(module.arch for module in modules):
            parts.append(span)
        if distinct != len(modules):
            parts.append(f"{distinct:,} different")
    what = target.what if target.what != "file" else ""
    size = f"{_mib(target.read_bytes)} in {target.seconds:.1f} s"
    read = f"{_plural(target.files, 'file')}, {size}" if target.files > 1 else size
    return ", ".join(parts) + f"; {what + ' of ' if what else ''}{read}"


def _notes(target: ScannedTarget, alarming: int, wanted: Wanted) -> Iterator[str]:
    if target.digest:
        yield f"image {target.digest}"
    if target.hidden and not wanted.all_layers:
        hash_like = f" ({alarming:,} HASH-LIKE)" if alarming else ""
        yield (
            f"{_plural(target.hidden, 'module')} more{hash_like} in files that a later layer "
            "replaces or deletes: --all-layers tells of them"
        )
    if target.skipped:
        yield "left out: " + ", ".join(target.skipped)
    process = target.process
    if process is not None:
        told = (process.exe or process.comm, process.user, process.container)
        yield ", ".join(part for part in told if part)
        yield f"{_plural(process.files, 'mapped file')}, {_mib(process.memory_bytes)} of memory"
        if process.swapped_bytes:
            yield f"{_mib(process.swapped_bytes)} in swap or on a device were not read"
        if process.incomplete:
            yield f"not all was read: {process.incomplete}"
        yield from process.limits


def architectures(names: Iterable[str]) -> str:
    """``sm_75…sm_120 (11)``: the lowest and the highest, and how many there are between."""
    families: dict[str, set[str]] = {}
    for name in names:
        if name:
            families.setdefault(re.split(r"\d", name, maxsplit=1)[0], set()).add(name)
    spans = []
    for members in families.values():
        ordered = sorted(members, key=_arch_key)
        spans.append(
            ", ".join(ordered)
            if len(ordered) <= 2
            else f"{ordered[0]}…{ordered[-1]} ({len(ordered)})"
        )
    return ", ".join(spans)


def _arch_key(name: str) -> tuple[int, str]:
    found = _NUMBER.search(name)
    return (int(found[0][:9]) if found else 0, name)


# ---------------------------------------------------------------------------------- modules


def _is_unknown(one: FoundModule) -> bool:
    return one.standing in ("unknown", "") and not one.is_alarming


def _alarming(sheet: Sheet, found: Sequence[FoundModule], wanted: Wanted) -> None:
    if not found:
        return
    sheet.blank()
    sheet.add(f"HASH-LIKE CODE THAT IS NOT KNOWN: {_plural(len(found), 'module')}", style="red")
    alike: dict[tuple[str, ...], list[FoundModule]] = {}
    for one in sorted(found, key=lambda one: -_score(one)):
        alike.setdefault((_file(one), *_what_is_told(one)), []).append(one)
    for some in alike.values():
        _told(sheet, some[0], wanted, style="bold red")
        if wanted.every_module:
            for one in some[1:]:
                _told(sheet, one, wanted, style="bold red")
        elif len(some) > 1:
            more = f"and {len(some) - 1:,} more there of which the same is told: --list"
            sheet.add(more, indent=4, hang=2)


def _unknown(sheet: Sheet, found: Sequence[FoundModule], wanted: Wanted) -> None:
    """Those that nobody knows: one by one where that says something, else by their files."""
    looked_up = [one for one in found if one.standing == "unknown"]
    if not looked_up:
        return
    by_answer = Counter(_answer(one) for one in looked_up)
    counts = ", ".join(
        f"{by_answer[answer]:,} {answer or 'not judged'}" for answer in ANSWERS if by_answer[answer]
    )
    sheet.blank()
    sheet.add(f"Not known: {_plural(len(looked_up), 'module')}: {counts}", style="yellow")
    if any(_answer(one) == "hash-like" for one in looked_up):
        sheet.add(BY_ITSELF, indent=2, hang=2)
    telling = [one for one in looked_up if _answer(one) not in QUIET_ANSWERS]
    ordered = sorted(telling, key=lambda one: (ANSWERS.index(_answer(one)), -_score(one)))
    alike: dict[tuple[str, ...], list[FoundModule]] = {}
    for one in ordered:
        alike.setdefault(_what_is_told(one), []).append(one)
    for some in list(alike.values())[:UNKNOWN_SHOWN]:
        _told(sheet, some[0], wanted, style="")
        if len(some) > 1:
            sheet.add(f"and {len(some) - 1:,} of which the same is told", indent=4)
    if len(alike) > UNKNOWN_SHOWN:
        more = sum(map(len, list(alike.values())[UNKNOWN_SHOWN:]))
        sheet.add(f"and {more:,} more: --list tells of them", indent=2)
    files = Counter(_file(one) for one in looked_up if _answer(one) in QUIET_ANSWERS)
    for file, count in files.most_common(FILES_SHOWN):
        sheet.add(f"{count:,} in {file}", indent=2, hang=2)
    if len(files) > FILES_SHOWN:
        sheet.add(f"and in {len(files) - FILES_SHOWN:,} files more: --list tells of them", indent=2)


def _what_is_told(one: FoundModule) -> tuple[str, ...]:
    """What makes it worth a line of its own: what it computes, not which one it is."""
    reasons = one.judgement.reasons if one.judgement is not None else ()
    return (one.module.kind, _answer(one), one.known_as, *reasons)


def _file(one: FoundModule) -> str:
    """The file, or the mapping in a process, where it was first seen."""
    place = one.sightings[0].place if one.sightings else one.module.place
    where = _members(place)
    return f"{where}, {place.mapping or 'anonymous memory'}" if _is_memory(place) else where


def _is_memory(place: Place) -> bool:
    return bool(place.mapping) or place.target.startswith("pid ")


def _told(sheet: Sheet, one: FoundModule, wanted: Wanted, style: str) -> None:
    module = one.module
    score = f", score {_score(one):.1f}" if _score(one) else ""
    head = f"{NAMES[module.kind]} {module.arch} {module.digest[:DIGEST_SHOWN]}".replace("  ", " ")
    word = "hash-like" if one.is_alarming else _answer(one) or "not judged"
    sheet.lead(f"{escape(head)}: ", word + score, indent=2, hang=2, style=style)
    if one.known_as:
        sheet.add(one.known_as, indent=4, hang=2)
    if one.judgement is not None:
        for reason in one.judgement.reasons:
            sheet.add(reason, indent=4, hang=2)
    _sightings(sheet, one, PLACES_SHOWN)
    if wanted.kernels:
        _kernels(sheet, module)


def _every(sheet: Sheet, found: Sequence[FoundModule], wanted: Wanted) -> None:
    sheet.blank()
    for one in found:
        module = one.module
        standing = one.standing or "not looked up"
        known = f"{standing}: {one.known_as}" if one.known_as else standing
        sheet.add(f"{NAMES[module.kind]} {module.arch}".strip() + f" {module.digest}", hang=2)
        facts = [known] if one.standing else []
        if _answer(one):
            facts.append(_answer(one))
        if module.code_digest:
            facts.append(f"code {module.code_digest[:DIGEST_SHOWN]}")
        facts.append(_plural(module.kernel_count, "kernel"))
        facts.append(_size(module))
        facts.extend(part for part in (module.toolkit, module.identifier) if part)
        if module.broken:
            facts.append(f"BROKEN: {module.broken}")
        sheet.add(", ".join(facts), indent=2, hang=2)
        _sightings(sheet, one, PLACES_LISTED)
        if wanted.kernels:
            _kernels(sheet, module)


def _sightings(sheet: Sheet, one: FoundModule, most: int) -> None:
    for sighting in one.sightings[:most]:
        sheet.add(_place(sighting), indent=4, hang=2)
    if len(one.sightings) > most:
        sheet.add(f"and {len(one.sightings) - most:,} places more", indent=4)


def _place(sighting: Sighting) -> str:
    notes = []
    if sighting.cache:
        notes.append(f"{sighting.cache} cache")
    if sighting.in_no_mapped_file:
        notes.append("in no mapped file")
    if sighting.hidden:
        notes.append(sighting.hidden)
    return place_text(sighting.place) + (f" ({', '.join(notes)})" if notes else "")


def place_text(place: Place) -> str:
    """``image.tar ! usr/lib/x.so, .nv_fatbin at 0x1c40``."""
    where = _members(place)
    if place.mapping:
        where += f", {place.mapping}"
    if place.section:
        where += f", {place.section}"
    return where if place.offset is None else f"{where} at {place.offset:#x}"


def _members(place: Place) -> str:
    """Names from the outside in; of a layer's digest, that it has for a name, the beginning."""
    return " ! ".join((place.target, *(_DIGEST.sub(r"\1…", one) for one in place.members)))


def _kernels(sheet: Sheet, module: Module) -> None:
    for kernel in module.kernels:
        facts = [
            f"{value:,} {unit}"
            for value, unit in (
                (kernel.registers, "registers"),
                (kernel.shared_bytes, "bytes shared"),
                (kernel.instructions, "instructions"),
            )
            if value is not None
        ]
        name = kernel.name[:KERNEL_NAME_SHOWN]
        sheet.add(f"{name}: {', '.join(facts)}" if facts else name, indent=6, hang=2)
    if module.kernel_count > len(module.kernels):
        sheet.add(f"and {module.kernel_count - len(module.kernels):,} kernels more", indent=6)


# ---------------------------------------------------------------------------------- the end


def _problems(sheet: Sheet, report: CodeReport) -> None:
    if not report.problems:
        return
    sheet.blank()
    sheet.add(f"Not read: {len(report.problems):,}", style="yellow")
    alike: dict[tuple[str, str], list[Place]] = {}
    for one in report.problems:
        alike.setdefault((one.what, one.reason), []).append(one.place)
    for (what, reason), places in list(alike.items())[:PROBLEMS_SHOWN]:
        more = f" (and {len(places) - 1:,} places more)" if len(places) > 1 else ""
        sheet.add(f"{place_text(places[0])}: {what}: {reason}{more}", indent=2, hang=2)
    if len(alike) > PROBLEMS_SHOWN:
        sheet.add(f"and {len(alike) - PROBLEMS_SHOWN:,} other reasons: --format json", indent=2)


def _verdict(report: CodeReport, shown: Sequence[FoundModule]) -> str:
    standings = Counter(one.standing for one in shown)
    words: dict[Standing, str] = {
        "known": "known",
        "rebuilt": "known code rebuilt",
        "driver": "the driver's",
    }
    words |= {"jit": "allowed JIT code", "unknown": "not known", "": "not looked up"}
    told = [f"{standings[key]:,} {word}" for key, word in words.items() if standings[key]]
    alarming = sum(one.is_alarming for one in shown)
    told += [f"{alarming:,} hash-like"] if alarming else []
    counts = f" ({', '.join(told)})" if told else ""
    return f"{_plural(len(shown), 'different module')}{counts} in {report.seconds:.1f} s"


def _answer(one: FoundModule) -> str:
    return one.judgement.answer if one.judgement is not None else ""


def _score(one: FoundModule) -> float:
    return (one.judgement.score or 0.0) if one.judgement is not None else 0.0


def _size(module: Module) -> str:
    if module.codec == "none":
        return f"{module.image_bytes:,} bytes"
    return f"{module.stored_bytes:,} bytes of {module.codec}, {module.image_bytes:,} unpacked"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB" if size >= MIB // 10 else f"{size / 1024:,.1f} KiB"
