"""What a step is held against, kept in and written to on a real machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import GpuwardenError
from gpuwarden.journal.book import Journal
from gpuwarden.journal.entry import Entry
from gpuwarden.journal.signing import signing_key
from gpuwarden.respond.doing import Confirmations, Tried
from gpuwarden.respond.evidence_step import Evidence
from gpuwarden.respond.identity import HeldProcess, hold
from gpuwarden.respond.settings import Settings
from gpuwarden.respond.step import Identity, Target, Tell
from gpuwarden.respond.step_names import StepName
from gpuwarden.respond.untouchable import Untouchable

if TYPE_CHECKING:
    from gpuwarden.policy import Policy

JUDGED_AGAIN = "judged-again"


class RealMeans:
    """The machine, its journal and its evidence; see ``doing.Means``."""

    def __init__(self, settings: Settings, policy: Policy, given: Confirmations) -> None:
        """Errors: UsageError for a signing key that cannot be used."""
        self._settings = settings
        self._given = given
        self._evidence = Evidence(settings)
        self._journal = Journal(settings.journal, key=signing_key(policy.signing_key))

    def protected(self, target: Target) -> str:
        """Why nothing is ever done to this process; empty when something may be."""
        identity = target.identity
        if identity is None:
            return ""
        try:
            untouchable = Untouchable(
                self._settings.host, socket_path=self._settings.control_socket
            )
            reason = untouchable.reason(identity.pid)
        except GpuwardenError as error:
            return f"whether it is one that nothing is done to could not be seen: {error}"
        if reason:
            return f"nothing is done to it: it is {reason}"
        return belongs(target)

    def hold(self, identity: Identity) -> AbstractContextManager[HeldProcess]:
        """Errors: Changed, Denied, Unavailable."""
        return hold(self._settings.host, identity)

    def evidence(self, target: Target, tell: Tell) -> str:
        """The archive of this process and exec: the one there is, else one taken now."""
        return self._evidence.before(target) or self._evidence.take(target, tell)

    def intent(self, step: StepName, target: Target) -> Entry | None:
        """None for evidence, which writes down its own tries."""
        if step == "evidence":
            return None
        return self._journal.intend(step, self._subject(target), self._settings.reason)

    def outcome(self, intent: object, step: StepName, target: Target, tried: Tried) -> None:
        """Writes down what came of a try."""
        if not isinstance(intent, Entry):
            return
        lines = tried.outcome.lines if tried.outcome is not None else ()
        text = "; ".join(part for part in (tried.state, tried.why, *lines, tried.archive) if part)
        self._journal.conclude(intent, text, done=tried.state in ("done", "incomplete"))

    def judged_again(self, target: Target, before: str | None, why: str) -> None:
        """Writes down that a finding is of another exec or process. Errors: GpuwardenError."""
        subject = {**self._subject(target), "asked": before}
        self._journal.append(JUDGED_AGAIN, subject, f"{why}; now {target.verdict or 'no verdict'}")

    def lifted(self, groups: str, text: str, *, done: bool) -> None:
        """Writes down that denials were taken back by number. Errors: GpuwardenError."""
        subject = {"groups": groups, "reason": self._settings.reason}
        self._journal.append("allow", subject, text, stage="done" if done else "failed")

    def _subject(self, target: Target) -> dict[str, Any]:
        identity = target.identity
        container = target.container
        values = {
            "pid": identity.pid if identity is not None else None,
            "start_time_ticks": identity.start_time_ticks if identity is not None else None,
            "boot_id": identity.boot_id if identity is not None else None,
            "exe_device": identity.exe_device if identity is not None else None,
            "exe_inode": identity.exe_inode if identity is not None else None,
            "exec_count": identity.exec_count if identity is not None else None,
            "verdict": target.verdict,
            "finding": target.finding_id,
            "container": container.id if container is not None else None,
            "gpus": [gpu.id for gpu in target.gpus][:16] or None,
            "owner_confirmed": self._given.owner_confirmed or None,
            "yes": self._given.yes or None,
        }
        return {name: value for name, value in values.items() if value is not None}


def belongs(target: Target) -> str:
    """Why a process belongs here on one of its GPUs, whatever it does on others; else empty.

    A miner inside an expected workload is a miner.
    """
    for row in target.rows:
        if row.silenced_by is not None:
            return f"the policy excepts it: {row.silenced_by}"
        if row.verdict in ("expected", "system") and target.verdict != "cryptominer":
            return f"it is {row.verdict} on GPU {row.gpu}"
    return ""
