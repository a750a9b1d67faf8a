"""How strongly a set of arguments and a program's name speak of mining, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from gpuwarden.rules import miner_tables as tables
from gpuwarden.rules.masking import masked, shown
from gpuwarden.rules.miner_arguments import Arguments, Pool
from gpuwarden.rules.miner_names import Activity, ProgramName, name_reason

Strength = Literal["complete", "strong", "name", "weak", "none"]

STRENGTHS: tuple[Strength, ...] = ("none", "weak", "name", "strong", "complete")


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


def _rank(signs: CommandSigns) -> tuple[int, bool]:
    return STRENGTHS.index(signs.strength), signs.activity == "mining"


def strongest(candidates: Iterable[CommandSigns]) -> CommandSigns:
    """The strongest of several; mining wins a tie."""
    return max(candidates, key=_rank, default=NOTHING)


def judged(seen: Arguments, name: ProgramName | None) -> CommandSigns:
    """The strength of a set of arguments together with the program's name."""
    miner = name is not None and name.activity == "mining" and name.certain
    grades = {pool.grade for pool in seen.pools}
    accounts = {account.grade for account in seen.accounts}
    sure, known = seen.algorithm_grade == "sure", seen.algorithm_grade is not None
    real_account = bool(accounts & {"shape", "wallet", "user"})
    bare_url = any(pool.flag == "--url" and not pool.scheme for pool in seen.pools)
    complete = (
        bool(grades & {"scheme", "domain"} and (accounts or known))
        or ("pool" in grades and (known or real_account))
        or ("soft" in grades and (sure or "shape" in accounts))
        or ("soft" in grades and known and "wallet" in accounts)
        or (bare_url and known and real_account and seen.password)
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
        or (bare_url and known and real_account)
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
        or any(pool.grade == "pool" and pool.flag not in {"", "-o"} for pool in seen.pools)
        or (name is not None and name.activity == "mining")
    ):
        strength = "weak"
    if strength == "none":
        return NOTHING
    counted = [pool for pool in seen.pools if pool.grade != "soft" or complete or miner]
    account = next(iter(seen.accounts), None) if complete or accounts & {"shape"} else None
    return CommandSigns(
        activity="mining",
        strength=strength,
        reasons=mining_reasons(seen, name, counted, known=known),
        miner_name=name.name if name is not None and miner else None,
        algorithm=shown(seen.algorithm) if seen.algorithm else None,
        pools=tuple(dict.fromkeys((pool.host, pool.port) for pool in counted)),
        account=masked(account.value) if account else None,
    )


def mining_reasons(
    seen: Arguments, name: ProgramName | None, pools: list[Pool], *, known: bool
) -> tuple[str, ...]:
    """One sentence for each thing seen, the telling ones first; accounts masked."""
    reasons: list[str] = []
    if name is not None and name.activity == "mining":
        reasons.append(name_reason(name))
    for pool in pools[:4]:
        address = pool.host if pool.port is None else f"{pool.host}:{pool.port}"
        kind = "pool address"
        if pool.grade == "scheme":
            kind = "mining-protocol address"
        elif pool.grade == "domain":
            kind = "address of a public pool"
        after = f" after {pool.flag}" if pool.flag else ""
        reasons.append(f"{kind} {shown(pool.scheme + address)}{after}")
    if known and seen.algorithm:
        sure = "mining algorithm" if seen.algorithm_grade == "sure" else "algorithm or coin"
        reasons.append(f"{sure} {shown(seen.algorithm)} after {shown(seen.algorithm_flag)}")
    for account in seen.accounts[:2]:
        kind = {"shape": "wallet", "worker": "worker"}.get(account.grade, "account")
        after = f" after {account.flag}" if account.flag else ""
        reasons.append(f"{kind} {masked(account.value)}{after}")
    reasons += [
        f"{flag} is an option of {tables.MINER_FLAGS[flag]}" for flag in seen.miner_flags[:4]
    ]
    return tuple(reasons)


def from_name(name: ProgramName | None) -> CommandSigns:
    """What a name alone is worth."""
    if name is None:
        return NOTHING
    return CommandSigns(
        activity=name.activity,
        strength="name" if name.certain else "weak",
        reasons=(name_reason(name),),
        miner_name=name.name if name.activity == "mining" and name.certain else None,
    )
