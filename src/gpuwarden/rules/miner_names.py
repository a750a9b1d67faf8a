"""Which known program a name or path stands for: released miners, malware, and their look-alikes.

A name is the weakest sign. Versions, platforms and build words after it are ignored, a comm's cut
at 15 characters is allowed for, and ``ethminer-tests`` or ``xmrig.log`` are other names.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpuwarden.command_lines.shell_words import basename
from gpuwarden.pattern import pattern
from gpuwarden.rules import miner_tables as tables
from gpuwarden.rules.masking import shown

Activity = Literal["mining", "hash-cracking", "volunteer-computing", "plotting", "none"]

COMM_LENGTH = 15
MAX_NAME = 4096

_PIECES = pattern(r"[-_. ]+")


class ProgramName(NamedTuple):
    """A known program: what it does, its name, whether the name is its alone, and as seen."""

    activity: Activity
    name: str
    certain: bool
    seen: str


def name_reason(name: ProgramName) -> str:
    """The sentence that says what a name is known for."""
    seen = shown(name.seen)
    if name.name in tables.MALWARE:
        return f"the program's name {seen} is that of known mining malware"
    if name.activity == "mining" and not name.certain:
        return f"the program's name {seen} is one that miners have, among others"
    kind = {"mining": "the miner", "plotting": "the coin-farming program"}.get(name.activity)
    return f"the program's name {seen} is that of {kind or 'the program'} {name.name}"


def known_name(path: str) -> ProgramName | None:
    """What program a path's or comm's last part names, whatever version or build follows it."""
    base = basename(path[:MAX_NAME].strip())[:256]
    lower = base.lower()
    if not lower or tables.CISCO_TREX.fullmatch(lower):
        return None
    where = path[:MAX_NAME].lower()
    for part, project in tables.VOLUNTEER_PATHS.items():
        if part in where:
            return ProgramName("volunteer-computing", project, True, base)
    pieces = [piece for piece in _PIECES.split(lower) if piece]
    joined = "".join(pieces)
    for prefix, project in tables.VOLUNTEER_PREFIXES.items():
        if lower.startswith(prefix) or joined.startswith(prefix):
            return ProgramName("volunteer-computing", project, True, base)
    stem = ""
    cut = len(base) == COMM_LENGTH
    for index, piece in enumerate(pieces[:6], start=1):
        stem += piece
        rest = pieces[index:]
        if not all(_is_suffix(word, cut=cut and word is rest[-1]) for word in rest):
            continue
        for named in (stem, stem.rstrip("0123456789")):
            found = _table_name(named, base)
            if found is not None:
                return found
    if cut:
        for known in tables.MINERS.values():
            if len(known) > COMM_LENGTH and known.startswith(lower):
                return ProgramName("mining", known, True, base)
    if joined in tables.AMBIGUOUS_NAMES or _ends_in_miner(pieces):
        return ProgramName("mining", lower, False, base)
    return None


def _table_name(stem: str, base: str) -> ProgramName | None:
    if stem == "trex" and not base.lower().startswith("t-rex"):
        return None
    if stem in tables.MINERS:
        return ProgramName("mining", tables.MINERS[stem], True, base)
    if stem in tables.MALWARE:
        return ProgramName("mining", tables.MALWARE[stem], True, base)
    others: tuple[tuple[Activity, dict[str, str]], ...] = (
        ("hash-cracking", tables.HASH_CRACKERS),
        ("volunteer-computing", tables.VOLUNTEERS),
        ("plotting", tables.PLOTTERS),
    )
    for activity, programs in others:
        if stem in programs:
            return ProgramName(activity, programs[stem], True, base)
    return None


def _is_suffix(word: str, *, cut: bool) -> bool:
    if word in tables.NAME_SUFFIXES or tables.VERSION_WORD.fullmatch(word):
        return True
    return cut and any(suffix.startswith(word) for suffix in tables.NAME_SUFFIXES)


def _ends_in_miner(pieces: list[str]) -> bool:
    words = [piece for piece in pieces if not tables.VERSION_WORD.fullmatch(piece)]
    return bool(words) and words[-1].endswith("miner") and words[-1] not in tables.NOT_MINERS


def is_cisco_trex(words: tuple[str, ...]) -> bool:
    """Whether a command is Cisco's TRex traffic generator, by its name or its options."""
    name = basename(words[0]).lower()
    if tables.CISCO_TREX.fullmatch(name):
        return True
    return name in {"t-rex", "trex"} and bool(tables.CISCO_TREX_FLAGS & set(words[1:3]))
