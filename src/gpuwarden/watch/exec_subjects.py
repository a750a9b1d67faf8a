"""The kernel's count of execs in findings that may be acted on: no later exec passes for it.

It is read once a process and exec, in the thread that tells, and only while the mark of the
addresses is still the one that was judged: else the count would be of another exec.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError
from gpuwarden.finding import Finding, Subject, severity_rank
from gpuwarden.respond.identity import difference, of_subject
from gpuwarden.respond.step import Identity

KNOWN_LIMIT = 4096
LEAST_RANK = severity_rank("error")

_Key = tuple[int | None, int | None, str | None]


class ExecSubjects:
    """For one thread; the exec that was read longest ago is forgotten first."""

    def __init__(self, read: Callable[[int], Identity]) -> None:
        """``read`` gives a pid's identity now, count and mark; errors: GpuwardenError."""
        self._read = read
        self._known: OrderedDict[_Key, int | None] = OrderedDict()

    def filled(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings, those of error and above about a process with its exec count."""
        return [self._with_count(one) for one in findings]

    def _with_count(self, finding: Finding) -> Finding:
        subject = finding.subject
        if severity_rank(finding.severity) < LEAST_RANK or subject.exec_mark is None:
            return finding
        count = self._count(subject)
        if count is None:
            return finding
        return replace(finding, subject=replace(subject, exec_count=count))

    def _count(self, subject: Subject) -> int | None:
        key = (subject.pid, subject.start_time_ticks, subject.exec_mark)
        if key not in self._known:
            self._known[key] = self._look(subject)
            if len(self._known) > KNOWN_LIMIT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    def _look(self, subject: Subject) -> int | None:
        judged = of_subject(subject)
        if judged is None:
            return None
        try:
            now = self._read(judged.pid)
        except GpuwardenError:
            return None
        return None if difference(judged, now) else now.exec_count
