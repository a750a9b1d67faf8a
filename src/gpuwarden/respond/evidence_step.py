"""The step ``evidence``: one archive of everything about the process; and whether there is one."""

from __future__ import annotations

from contextlib import suppress

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.evidence import writing
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.respond.identity import difference, of_subject
from gpuwarden.respond.settings import Settings
from gpuwarden.respond.step import Identity, Outcome, Step, Target, Tell


class Evidence:
    """Takes an archive of the target: its process, or its GPU where there is no process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def step(self, target: Target) -> Step | None:
        """The step; None where there is neither a process nor one GPU to look at."""
        if _wanted(target, self._settings) is None:
            return None
        directory = self._directory(target)
        there = "" if target.identity is None else self.before(target)
        return Step(
            name="evidence",
            power="evidence",
            title="keep everything about it in one archive",
            changes=f"nothing of it; an archive is written in {directory}"
            + (f" (there is one already: {there})" if there else ""),
            undo="delete the archive",
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Takes an archive now. Errors: GpuwardenError."""
        path = self.take(target, tell)
        return Outcome(
            step="evidence",
            done=True,
            lines=(path, f"verify it: gpuwarden evidence verify {path}"),
            undo="delete the archive",
        )

    def take(self, target: Target, tell: Tell) -> str:
        """The path of an archive that is taken now. Errors: GpuwardenError."""
        wanted = _wanted(target, self._settings)
        if wanted is None:
            raise Unavailable("there is neither a process nor a GPU to keep evidence of")
        tell(f"evidence is taken first: {self._directory(target)}")
        sealed = writing.write(
            wanted,
            target.policy,
            self._settings.policy_path,
            tell=tell,
            why=self._settings.reason or "gpuwarden respond",
            directory=self._settings.evidence_directory,
        )
        return sealed.path

    def before(self, target: Target) -> str:
        """The archive that there is of this very process and exec of it; empty if none is."""
        identity = target.identity
        if identity is None:
            return ""
        with suppress(GpuwardenError):
            path = writing.written_before(
                self._directory(target),
                pid=identity.pid,
                start_time_ticks=identity.start_time_ticks,
                boot_id=identity.boot_id,
            )
            if path is not None:
                archived = _identity_in(path)
                if archived is not None and not difference(archived, identity):
                    return path
        return ""

    def _directory(self, target: Target) -> str:
        return self._settings.evidence_directory or target.policy.evidence.directory


def _wanted(target: Target, settings: Settings) -> Wanted | None:
    identity = target.identity
    if identity is not None:
        return Wanted(
            pid=identity.pid,
            start_time_ticks=identity.start_time_ticks,
            boot_id=identity.boot_id,
            finding=target.finding_id,
            root=settings.host.root,
            nvml_library=settings.nvml_library,
            state=settings.state_directory,
        )
    if not target.gpus:
        return None
    return Wanted(
        gpu=target.gpus[0].id,
        finding=target.finding_id,
        root=settings.host.root,
        nvml_library=settings.nvml_library,
        state=settings.state_directory,
    )


def _identity_in(path: str) -> Identity | None:
    """What process the manifest of an archive says that it is about."""
    subject = writing.subject_of(path)
    return None if subject is None else of_subject(subject)
