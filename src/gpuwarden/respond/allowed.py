"""What may be done about each verdict: the one place where that is decided.

The table is the design's. A step needs one of four powers; a verdict grants some of them, some only
once a person has confirmed the owner or the state.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from msgspec import Struct

from gpuwarden.finding import Verdict

Power = Literal["evidence", "freeze", "deny", "kill"]
POWERS: tuple[Power, ...] = get_args(Power)
Condition = Literal["always", "owner-confirmed", "hung-confirmed"]


class Grant(Struct, frozen=True):
    """One power that a verdict gives, and what must be confirmed before it is used."""

    power: Power
    condition: Condition = "always"


_EVIDENCE = (Grant("evidence"),)
_ACCUSED = (
    Grant("evidence"),
    Grant("freeze"),
    Grant("deny"),
    Grant("kill", "owner-confirmed"),
)

GRANTS: Final[dict[Verdict, tuple[Grant, ...]]] = {
    "expected": _EVIDENCE,
    "system": _EVIDENCE,
    "wrong-gpu": _EVIDENCE,
    "other-team": _EVIDENCE,
    "orphaned-job": (Grant("evidence"), Grant("kill")),
    "zombie-context": (Grant("evidence"), Grant("kill", "hung-confirmed")),
    "leaked-memory": _EVIDENCE,
    "rogue-container": _ACCUSED,
    "suspicious": _ACCUSED,
    "cryptominer": (Grant("evidence"), Grant("freeze"), Grant("deny"), Grant("kill")),
    "unattributed": (Grant("evidence"), Grant("kill", "owner-confirmed")),
    "unreadable": _EVIDENCE,
}


def grant(verdict: Verdict | None, power: Power) -> Grant | None:
    """What a verdict says of a power; None when it does not give it. No verdict gives evidence."""
    if verdict is None:
        return _EVIDENCE[0] if power == "evidence" else None
    return next((one for one in GRANTS[verdict] if one.power == power), None)


def refusal(
    verdict: Verdict | None, power: Power, *, owner_confirmed: bool, hung_confirmed: bool
) -> str:
    """Why that power may not be used now; empty when it may."""
    found = grant(verdict, power)
    if found is None:
        return f"the verdict {verdict or 'is not known, which'} does not allow it"
    if found.condition == "owner-confirmed" and not owner_confirmed:
        return "the owner is to be asked first; then --owner-confirmed"
    if found.condition == "hung-confirmed" and not hung_confirmed:
        return "it is not shown that the process is dead or hung"
    return ""
