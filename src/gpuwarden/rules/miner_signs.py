"""What a process's own words say about mining: one judgement per command line, line or name.

Pure and bounded: at most 4,096 arguments and 128 KiB are looked at, in linear time. Ports never
count by themselves, and of a command's words only the program's is a name; arguments that are
data (``grep xmrig``) are not. The facts are in ``miner_tables``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from gpuwarden.command_lines.shell_words import (
    MAX_DEPTH,
    MAX_TEXT,
    basename,
    decoded_bytes,
    output_of_one,
    split_commands,
    unescaped,
    without_schedule,
)
from gpuwarden.command_lines.wrappers import SHELLS, unwrap
from gpuwarden.pattern import pattern
from gpuwarden.rules import miner_tables as tables
from gpuwarden.rules.masking import masked, shown
from gpuwarden.rules.miner_arguments import MAX_ARGUMENTS, is_pool_domain, read
from gpuwarden.rules.miner_judgement import (
    NOTHING,
    CommandSigns,
    Strength,
    from_name,
    judged,
    mining_reasons,
    strongest,
)
from gpuwarden.rules.miner_names import (
    ProgramName,
    is_cisco_trex,
    known_name,
    name_reason,
)

__all__ = ["CommandSigns", "command_signs", "line_signs", "name_signs", "plain"]

MAX_ENCODED = 64
NORMALISED_AT_ONCE = 4096

_ENCODED = pattern(r"(?:[A-Za-z0-9+/]{16,}|[A-Za-z0-9_-]{16,})={0,2}")
_HOST_IN_TEXT = pattern(r"[A-Za-z0-9.-]{4,253}")
_FARMING = frozenset({"plots", "plotnft", "harvester", "farmer"})
_STEM = pattern(r"[-_. ]")


def command_signs(
    argv: Sequence[str],
    *,
    comm: str = "",
    exe: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> CommandSigns:
    """Signs in a process's arguments, names and environment.

    ``argv`` may be a title that the process wrote over itself (one string), be padded with blanks,
    or be cut at the end. ``exe`` is the path of its binary: it tells a real grep from a renamed
    miner.
    """
    words = _bounded(argv)
    best = _command(tuple(words), exe=exe, comm=comm, depth=0)
    return strongest((best, _environment_signs(environment or {}, best)))


def line_signs(text: str) -> CommandSigns:
    """Signs in a line that a shell, cron, systemd or supervisord would run."""
    return _line(without_schedule(plain(text[:MAX_TEXT])), 0)


def name_signs(name: str) -> CommandSigns:
    """Signs in a bare program name or path: a dump's process name, or a comm."""
    text = plain(name[:4096]).strip()
    known = known_name(text)
    if known is None and " -" in text:
        known = known_name(text.split(" -", 1)[0].split(maxsplit=1)[0] if text.split() else "")
    return from_name(known)


def plain(text: str) -> str:
    """Text without invisible characters, full-width forms, look-alike letters and hex escapes."""
    if not text.isascii():
        parts: list[str] = []
        left = MAX_TEXT
        for start in range(0, len(text), NORMALISED_AT_ONCE):
            # One character can normalise to 18: what grows past the bound is never made.
            part = unicodedata.normalize("NFKC", text[start : start + NORMALISED_AT_ONCE])
            parts.append(tables.INVISIBLE.sub("", part).translate(tables.LOOK_ALIKES)[:left])
            left -= len(parts[-1])
            if left <= 0:
                break
        text = "".join(parts)
    return unescaped(text)


def _bounded(argv: Sequence[str]) -> list[str]:
    words: list[str] = []
    left = MAX_TEXT
    for argument in argv[:MAX_ARGUMENTS]:
        if left <= 0:
            break
        word = plain(argument[:left])
        left -= len(argument)
        if word.strip():
            words.append(word)
    return words


def _line(text: str, depth: int) -> CommandSigns:
    if depth > MAX_DEPTH or not text.strip():
        return NOTHING
    found: list[CommandSigns] = []
    piped: str | None = None
    for command in split_commands(text):
        source = command.stdin if command.stdin is not None else piped
        if command.words:
            found.append(_command(command.words, depth=depth))
            is_shell = basename(command.words[0]).lower() in SHELLS
            if source is not None and is_shell and len(command.words) <= 2:
                found.append(_line(source, depth + 1))
        printed = output_of_one(command, source)
        piped = printed if command.feeds_next else None
        if printed is not None and source is not None:  # decoded in the open, whatever comes next
            found.append(_lowered(_line(printed, depth + 1), "decoded from the line"))
        if command.assignments:
            found.append(_environment_signs(dict(command.assignments), NOTHING))
    return strongest(found)


def _command(
    words: tuple[str, ...], *, exe: str | None = None, comm: str = "", depth: int = 0
) -> CommandSigns:
    # A title that the process wrote, or blanks that push its arguments out of sight.
    words = (*words[0].split(), *words[1:]) if words else ()
    inner = unwrap(words)
    # exe and comm belong to what runs now: the wrapper if there is one, the program otherwise.
    own_names = tuple(known_name(plain(name)) for name in (exe or "", comm) if name)
    found = [from_name(name) for name in own_names]
    if inner.assignments:
        found.append(_environment_signs(dict(inner.assignments), NOTHING))
    if inner.line is not None:
        signs = _line(inner.line, depth + 1)
        if signs != NOTHING:
            found.append(signs._replace(wrapped_by=(*inner.wrapped_by, *signs.wrapped_by)))
    elif inner.words:
        program = known_name(inner.words[0])
        if program is not None and is_cisco_trex(inner.words):
            program = None
        names = [name for name in (program, *own_names) if name is not None]
        name = max(names, key=lambda each: each.certain, default=None)
        signs = _arguments_signs(inner.words, name, exe, depth)
        if signs != NOTHING:
            found.append(signs._replace(wrapped_by=inner.wrapped_by))
        if inner.wrapped_by and signs.strength != "complete":
            found.append(_disguised(words))
    return strongest(found)


def _arguments_signs(
    words: tuple[str, ...], name: ProgramName | None, exe: str | None, depth: int
) -> CommandSigns:
    program = basename(words[0]).lower()
    if name is None and _truly(program, exe, tables.READERS):
        return _disguised(words)
    if name is None and _truly(program, exe, tables.NETWORK_CLIENTS):
        return strongest((_disguised(words), _mention(words)))
    bare = words[0].startswith("-") or "://" in words[0]
    arguments = read(words if bare else words[1:])
    found = [judged(arguments, name), _other_work(words, name), _mention(words)]
    if program in SHELLS and name is None:
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        scripted = known_name(script.removesuffix(".sh"))
        if scripted is not None and scripted.activity == "mining" and scripted.certain:
            reason = f"it runs a script named like the miner {scripted.name}"
            found.append(CommandSigns("mining", "weak", (reason,)))
    if depth < MAX_DEPTH:
        found += [_embedded(word, depth) for word in words[1:] if len(word.split(None, 2)) > 2]
        found += _encoded(words[1:], depth)
    return strongest(found)


def _truly(program: str, exe: str | None, programs: frozenset[str]) -> bool:
    """Whether it is one of those programs by name, and its binary (if known) does not deny it."""
    if program not in programs:
        return False
    if exe is None:
        return True
    binary = basename(exe).lower()
    stem = _STEM.split(binary, maxsplit=1)[0]
    multicall = {"busybox", "coreutils", "toybox", "perl", "bash", "sh", "dash"}
    return binary == program or stem in programs or stem in multicall or stem.startswith("python")


def _disguised(words: tuple[str, ...]) -> CommandSigns:
    """Mining arguments of a program whose arguments are data, such as a miner renamed to grep.

    Only a whole set of options counts, and only where options begin right after the name.
    """
    if len(words) < 2 or not words[1].startswith("-"):
        return NOTHING
    arguments = read(words[1:])
    pool = next((pool for pool in arguments.pools if pool.flag and pool.grade != "soft"), None)
    if pool is None or not arguments.accounts:
        return NOTHING
    if pool.grade == "pool" and arguments.algorithm_grade != "sure":
        return NOTHING
    return judged(arguments, None)


def _other_work(words: tuple[str, ...], name: ProgramName | None) -> CommandSigns:
    """Password recovery, volunteer computing and plotting: by name, and by hashcat's options."""
    cracking = {"-m", "--hash-type"} & set(words) and {"-a", "--attack-mode"} & set(words)
    mask = any(tables.HASH_MASK.search(word[:256]) for word in words[1:])
    if name is not None and name.activity not in {"mining", "none"}:
        strength: Strength = "name"
        reasons = [name_reason(name)]
        if name.activity == "hash-cracking" and (cracking or mask):
            strength = "strong"
            reasons.append("it is given a hash type, an attack mode or a password mask")
        elif name.activity == "plotting" and {"plots", "plotnft", "harvester", "farmer"} & set(
            words
        ):
            strength = "strong"
            reasons.append("it is told to plot or to farm")
        return CommandSigns(name.activity, strength, tuple(reasons))
    if cracking and mask:
        reason = "a hash type (-m), an attack mode (-a) and a password mask, as hashcat takes them"
        return CommandSigns("hash-cracking", "strong", (reason,))
    return NOTHING


def _mention(words: tuple[str, ...]) -> CommandSigns:
    for word in words[1:]:
        if "." not in word or len(word) > 2048:
            continue
        for match in _HOST_IN_TEXT.finditer(word):
            if is_pool_domain(match[0].strip(".-")):
                reason = f"a public pool's domain is among its arguments: {shown(match[0])}"
                return CommandSigns("mining", "weak", (reason,))
    return NOTHING


def _lowered(signs: CommandSigns, how: str) -> CommandSigns:
    """Signs that were found in an argument's text rather than in the command itself."""
    if signs.activity != "mining" or signs.strength not in {"complete", "strong"}:
        return NOTHING
    return signs._replace(
        strength="strong", reasons=(f"{how}: {signs.reasons[0]}", *signs.reasons[1:])
    )


def _embedded(word: str, depth: int) -> CommandSigns:
    """A command line inside one argument; text that only speaks of mining stays weak."""
    text = word.partition("=")[2] if re.match(r"--?[\w-]{1,40}=", word) else word
    text = text.strip().strip("\"'")
    first = text.split(maxsplit=1)[0] if text else ""
    signs = _line(text, depth + 1)
    lowered = _lowered(signs, "inside one argument")
    named = known_name(first)
    runs = first.startswith(("/", "./", "-")) or (named is not None and named.certain)
    if signs.strength == "complete" and runs:
        return lowered
    return lowered._replace(strength="weak") if lowered is not NOTHING else NOTHING


def _encoded(words: tuple[str, ...], depth: int) -> list[CommandSigns]:
    """Base64 or hexadecimal inside arguments, if a mining command or address comes out."""
    found: list[CommandSigns] = []
    for word in words:
        if len(word) < 16:
            continue
        for match in _ENCODED.finditer(word):
            if len(found) >= MAX_ENCODED:
                return found
            text = decoded_bytes(match[0])
            found.append(
                NOTHING
                if text is None
                else _lowered(_line(plain(text), depth + 1), "encoded in one argument")
            )
    return found


def _environment_signs(environment: Mapping[str, str], beside: CommandSigns) -> CommandSigns:
    """POOL_URL, POOL_USER and stratum addresses among the environment or assignments."""
    words: list[str] = []
    variables: list[str] = []
    direct = False
    for variable, raw in list(environment.items())[:256]:
        value = plain(raw[:4096])
        name = variable.upper()
        if name in tables.POOL_URL_VARIABLES:
            words += ["--url", value]
        elif name in tables.POOL_USER_VARIABLES:
            words += ["--user", value]
        elif "stratum" in value.lower():
            words += value.split()
        else:
            continue
        direct = direct or name in {"POOL_URL", "POOL_USER"}
        variables.append(shown(variable))
    if not words:
        return NOTHING
    seen = read(words)
    grades = {pool.grade for pool in seen.pools}
    database = any(pool.port in tables.DATABASE_PORTS for pool in seen.pools)
    both = bool(seen.pools and seen.accounts) and direct and not database
    strength: Strength = "none"
    if grades & {"scheme", "domain"} or both:
        strength = "strong"
        if beside.activity == "mining" and beside.algorithm:
            strength = "complete"
    elif any(account.grade == "shape" for account in seen.accounts):
        strength = "weak"
    if strength == "none":
        return NOTHING
    reasons = mining_reasons(seen, None, list(seen.pools), known=False)
    return CommandSigns(
        activity="mining",
        strength=strength,
        reasons=(f"the environment sets {', '.join(variables[:4])}", *reasons, *beside.reasons[:2]),
        miner_name=beside.miner_name,
        algorithm=beside.algorithm,
        pools=tuple((pool.host, pool.port) for pool in seen.pools),
        account=masked(seen.accounts[0].value) if seen.accounts else None,
        wrapped_by=beside.wrapped_by,
    )
