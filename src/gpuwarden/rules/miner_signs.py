"""What a process's own words say about mining: one judgement per command line, line or name.

Pure and bounded: at most 4,096 arguments and 128 KiB are looked at, in linear time. Ports never
count by themselves, and of a command's words only the program's is a name; arguments that are
data (``grep xmrig``) are not. The facts are in ``miner_tables``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpuwarden.rules import miner_tables as tables
from gpuwarden.rules.miner_arguments import MAX_ARGUMENTS, Arguments, Pool, is_pool_domain, read
from gpuwarden.rules.shell_words import (
    MAX_DEPTH,
    MAX_TEXT,
    SHELLS,
    basename,
    decoded_bytes,
    output_of_one,
    split_commands,
    unescaped,
    unwrap,
    without_schedule,
)

Activity = Literal["mining", "hash-cracking", "volunteer-computing", "plotting", "none"]
Strength = Literal["complete", "strong", "name", "weak", "none"]

STRENGTHS: tuple[Strength, ...] = ("none", "weak", "name", "strong", "complete")
COMM_LENGTH = 15
MAX_ENCODED = 64

_RUN = re.compile(r"[0-9A-Za-z]{20,}")
_ENCODED = re.compile(r"(?:[A-Za-z0-9+/]{16,}|[A-Za-z0-9_-]{16,})={0,2}")
_HOST_IN_TEXT = re.compile(r"[A-Za-z0-9.-]{4,253}")
_PIECES = re.compile(r"[-_. ]+")


class CommandSigns(NamedTuple):
    """What one command line, line or name shows, and how strongly.

    ``strength`` is ``complete`` (a pool with an account or an algorithm), ``strong`` (a stratum
    address alone, or two signs short of complete), ``name`` (only a known program's name), ``weak``
    or ``none``; activities other than mining are never ``complete``. ``reasons`` are sentences
    with the words seen; accounts are masked in them and in ``account``. ``pools`` holds hosts and
    ports as written.
    """

    activity: Activity = "none"
    strength: Strength = "none"
    reasons: tuple[str, ...] = ()
    miner_name: str | None = None
    algorithm: str | None = None
    pools: tuple[tuple[str, int | None], ...] = ()
    account: str | None = None
    wrapped_by: tuple[str, ...] = ()


NOTHING = CommandSigns()


class _Name(NamedTuple):
    activity: Activity
    name: str
    certain: bool
    seen: str


def masked(text: str) -> str:
    """An account or password as it may be shown: the first 6 and last 4 characters."""
    if len(text) > 12:
        return f"{_shown(text[:6])}…{_shown(text[-4:])}"
    return text if len(text) <= 4 else f"{text[:2]}…"


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
    if words and len(words[0].split()) != 1:
        # A title, or blanks that push the arguments out of sight: words[0] is not one word.
        words = [*words[0].split(), *words[1:]]
    best = _command(tuple(words), exe=exe, comm=comm, depth=0)
    return _strongest((best, _environment_signs(environment or {}, best)))


def line_signs(text: str) -> CommandSigns:
    """Signs in a line that a shell, cron, systemd or supervisord would run."""
    return _line(without_schedule(plain(text[:MAX_TEXT])), 0)


def name_signs(name: str) -> CommandSigns:
    """Signs in a bare program name or path: a dump's process name, or a comm."""
    text = plain(name[:4096]).strip()
    known = _known_name(text)
    if known is None and " -" in text:
        known = _known_name(text.split(" -", 1)[0].split(maxsplit=1)[0] if text.split() else "")
    return _from_name(known)


def plain(text: str) -> str:
    """Text without invisible characters, full-width forms, look-alike letters and hex escapes."""
    if not text.isascii():
        text = tables.INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
        text = text.translate(tables.LOOK_ALIKES)[:MAX_TEXT]
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


def _shown(text: str) -> str:
    return _RUN.sub(lambda run: f"{run[0][:6]}…{run[0][-4:]}", text[:120])


def _rank(signs: CommandSigns) -> tuple[int, bool]:
    return STRENGTHS.index(signs.strength), signs.activity == "mining"


def _strongest(candidates: Iterable[CommandSigns]) -> CommandSigns:
    return max(candidates, key=_rank, default=NOTHING)


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
    return _strongest(found)


def _command(
    words: tuple[str, ...], *, exe: str | None = None, comm: str = "", depth: int = 0
) -> CommandSigns:
    inner = unwrap(words)
    # exe and comm belong to what runs now: the wrapper if there is one, the program otherwise.
    own_names = tuple(_known_name(plain(name)) for name in (exe or "", comm) if name)
    found = [_from_name(name) for name in own_names]
    if inner.assignments:
        found.append(_environment_signs(dict(inner.assignments), NOTHING))
    if inner.line is not None:
        signs = _line(inner.line, depth + 1)
        found.append(signs._replace(wrapped_by=(*inner.wrapped_by, *signs.wrapped_by)))
    elif inner.words:
        program = _known_name(inner.words[0])
        if program is not None and _is_cisco(inner.words):
            program = None
        names = [name for name in (program, *own_names) if name is not None]
        name = max(names, key=lambda each: each.certain, default=None)
        signs = _arguments_signs(inner.words, name, exe, depth)
        found.append(signs._replace(wrapped_by=inner.wrapped_by))
        if inner.wrapped_by and signs.strength != "complete":
            found.append(_disguised(words))
    return _strongest(found)


def _arguments_signs(
    words: tuple[str, ...], name: _Name | None, exe: str | None, depth: int
) -> CommandSigns:
    program = basename(words[0]).lower()
    if name is None and _truly(program, exe, tables.READERS):
        return _disguised(words)
    if name is None and _truly(program, exe, tables.NETWORK_CLIENTS):
        return _strongest((_disguised(words), _mention(words)))
    arguments = read(words if words[0].startswith("-") else words[1:])
    found = [_judged(arguments, name), _other_work(words, name), _mention(words)]
    if program in SHELLS and name is None:
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        scripted = _known_name(script.removesuffix(".sh"))
        if scripted is not None and scripted.activity == "mining" and scripted.certain:
            reason = f"it runs a script named like the miner {scripted.name}"
            found.append(CommandSigns("mining", "weak", (reason,)))
    if depth < MAX_DEPTH:
        found += [_embedded(word, depth) for word in words[1:] if len(word.split(None, 2)) > 2]
        found += _encoded(words[1:], depth)
    return _strongest(found)


def _truly(program: str, exe: str | None, programs: frozenset[str]) -> bool:
    """Whether it is one of those programs by name, and its binary (if known) does not deny it."""
    if program not in programs:
        return False
    if exe is None:
        return True
    binary = basename(exe).lower()
    stem = _PIECES.split(binary, maxsplit=1)[0]
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
    return _judged(arguments, None)


def _judged(seen: Arguments, name: _Name | None) -> CommandSigns:
    """The strength of a set of arguments together with the program's name."""
    miner = name is not None and name.activity == "mining" and name.certain
    grades = {pool.grade for pool in seen.pools}
    accounts = {account.grade for account in seen.accounts}
    sure, known = seen.algorithm_grade == "sure", seen.algorithm_grade is not None
    real_account = bool(accounts & {"shape", "wallet", "user"})
    complete = (
        bool(grades & {"scheme", "domain"} and (accounts or known))
        or ("pool" in grades and (known or real_account))
        or ("soft" in grades and (sure or "shape" in accounts))
        or ("soft" in grades and known and "wallet" in accounts)
        or (bool(grades) and (miner or bool(seen.miner_flags)) and bool(accounts or known))
    )
    strength: Strength = "none"
    if complete:
        strength = "complete"
    elif (
        "scheme" in grades
        or ("domain" in grades and any(pool.flag for pool in seen.pools))
        or (seen.miner_flags and (grades or known or miner or len(seen.miner_flags) > 1))
        or (sure and real_account)
        or (miner and known)
        or (miner and grades)
    ):
        strength = "strong"
    elif miner:
        strength = "name"
    elif (
        sure
        or seen.miner_flags
        or "shape" in accounts
        or "pool" in grades
        or (name is not None and name.activity == "mining")
    ):
        strength = "weak"
    if strength == "none":
        return NOTHING
    shown = [pool for pool in seen.pools if pool.grade != "soft" or complete or miner]
    account = next(iter(seen.accounts), None) if complete or accounts & {"shape"} else None
    return CommandSigns(
        activity="mining",
        strength=strength,
        reasons=_mining_reasons(seen, name, shown, known=known),
        miner_name=name.name if name is not None and miner else None,
        algorithm=_shown(seen.algorithm) if seen.algorithm else None,
        pools=tuple(dict.fromkeys((pool.host, pool.port) for pool in shown)),
        account=masked(account.value) if account else None,
    )


def _mining_reasons(
    seen: Arguments, name: _Name | None, pools: list[Pool], *, known: bool
) -> tuple[str, ...]:
    reasons: list[str] = []
    if name is not None and name.activity == "mining":
        reasons.append(_name_reason(name))
    for pool in pools[:4]:
        address = pool.host if pool.port is None else f"{pool.host}:{pool.port}"
        kind = "pool address"
        if pool.grade == "scheme":
            kind = "mining-protocol address"
        elif pool.grade == "domain":
            kind = "address of a public pool"
        after = f" after {pool.flag}" if pool.flag else ""
        reasons.append(f"{kind} {_shown(pool.scheme + address)}{after}")
    if known and seen.algorithm:
        sure = "mining algorithm" if seen.algorithm_grade == "sure" else "algorithm or coin"
        reasons.append(f"{sure} {_shown(seen.algorithm)} after {_shown(seen.algorithm_flag)}")
    for account in seen.accounts[:2]:
        kind = {"shape": "wallet", "worker": "worker"}.get(account.grade, "account")
        after = f" after {account.flag}" if account.flag else ""
        reasons.append(f"{kind} {masked(account.value)}{after}")
    reasons += [
        f"{flag} is an option of {tables.MINER_FLAGS[flag]}" for flag in seen.miner_flags[:4]
    ]
    return tuple(reasons)


def _other_work(words: tuple[str, ...], name: _Name | None) -> CommandSigns:
    """Password recovery, volunteer computing and plotting: by name, and by hashcat's options."""
    cracking = {"-m", "--hash-type"} & set(words) and {"-a", "--attack-mode"} & set(words)
    mask = any(tables.HASH_MASK.search(word[:256]) for word in words[1:])
    if name is not None and name.activity not in {"mining", "none"}:
        strength: Strength = "name"
        reasons = [_name_reason(name)]
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
                reason = f"a public pool's domain is among its arguments: {_shown(match[0])}"
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
    named = _known_name(first)
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
            words.append(value)
        else:
            continue
        direct = direct or name in {"POOL_URL", "POOL_USER"}
        variables.append(_shown(variable))
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
    reasons = _mining_reasons(seen, None, list(seen.pools), known=False)
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


def _is_cisco(words: tuple[str, ...]) -> bool:
    name = basename(words[0]).lower()
    if tables.CISCO_TREX.fullmatch(name):
        return True
    return name in {"t-rex", "trex"} and bool(tables.CISCO_TREX_FLAGS & set(words[1:3]))


def _from_name(name: _Name | None) -> CommandSigns:
    if name is None:
        return NOTHING
    return CommandSigns(
        activity=name.activity,
        strength="name" if name.certain else "weak",
        reasons=(_name_reason(name),),
        miner_name=name.name if name.activity == "mining" and name.certain else None,
    )


def _name_reason(name: _Name) -> str:
    seen = _shown(name.seen)
    if name.name in tables.MALWARE:
        return f"the program's name {seen} is that of known mining malware"
    if name.activity == "mining" and not name.certain:
        return f"the program's name {seen} is one that miners have, among others"
    kind = {"mining": "the miner", "plotting": "the coin-farming program"}.get(name.activity)
    return f"the program's name {seen} is that of {kind or 'the program'} {name.name}"


def _known_name(path: str) -> _Name | None:
    """What program a path's or comm's last part names, whatever version or build follows it."""
    base = basename(path[:4096].strip())[:256]
    lower = base.lower()
    if not lower or tables.CISCO_TREX.fullmatch(lower):
        return None
    where = path[:4096].lower()
    for part, project in tables.VOLUNTEER_PATHS.items():
        if part in where:
            return _Name("volunteer-computing", project, True, base)
    pieces = [piece for piece in _PIECES.split(lower) if piece]
    joined = "".join(pieces)
    for prefix, project in tables.VOLUNTEER_PREFIXES.items():
        if lower.startswith(prefix) or joined.startswith(prefix):
            return _Name("volunteer-computing", project, True, base)
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
                return _Name("mining", known, True, base)
    if joined in tables.AMBIGUOUS_NAMES or _ends_in_miner(pieces):
        return _Name("mining", lower, False, base)
    return None


def _table_name(stem: str, base: str) -> _Name | None:
    if stem == "trex" and not base.lower().startswith("t-rex"):
        return None
    if stem in tables.MINERS:
        return _Name("mining", tables.MINERS[stem], True, base)
    if stem in tables.MALWARE:
        return _Name("mining", tables.MALWARE[stem], True, base)
    others: tuple[tuple[Activity, dict[str, str]], ...] = (
        ("hash-cracking", tables.HASH_CRACKERS),
        ("volunteer-computing", tables.VOLUNTEERS),
        ("plotting", tables.PLOTTERS),
    )
    for activity, programs in others:
        if stem in programs:
            return _Name(activity, programs[stem], True, base)
    return None


def _is_suffix(word: str, *, cut: bool) -> bool:
    if word in tables.NAME_SUFFIXES or tables.VERSION_WORD.fullmatch(word):
        return True
    return cut and any(suffix.startswith(word) for suffix in tables.NAME_SUFFIXES)


def _ends_in_miner(pieces: list[str]) -> bool:
    words = [piece for piece in pieces if not tables.VERSION_WORD.fullmatch(piece)]
    return bool(words) and words[-1].endswith("miner") and words[-1] not in tables.NOT_MINERS
