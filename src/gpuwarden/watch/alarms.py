"""Findings of device opens for as long as they hold: the process lives and uses the device."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.finding import Evidence, Finding, Subject, finding_id

QUIET_NS = 600 * 10**9
"""How long a finding holds after the last use of a process that lives and holds nothing."""
ENDED_NS = 30 * 10**9
"""How long after the process has ended: what lived for a millisecond is still an open finding."""
LIMIT = 10_000

Key = tuple[int, int]
"""(pid, start time in ticks), as findings name a process."""


ALIKE = 20
"""Processes of one program in one place that are told of one by one; those after them together."""
TOGETHER = -1
"""Stands for a pid where processes are told of together."""


class _Alarm(Struct):
    findings: list[Finding]
    last_ns: int
    more: int = 0
    """Uses since they were last told of."""
    ended_ns: int | None = None
    place: str = ""


def _together(finding: Finding, place: str) -> Finding:
    """The finding that stands for all further processes like this one's."""
    subject = Subject(
        kind="node",
        name=f"more processes of {place}",
        boot_id=finding.subject.boot_id,
        gpu_ids=finding.subject.gpu_ids,
        gpu=finding.subject.gpu,
    )
    last = Evidence(
        source="watch", text=f"the last of them: pid {finding.subject.pid} {finding.subject.name}"
    )
    return replace(
        finding,
        id=finding_id(finding.rule, subject),
        subject=subject,
        evidence=(last, *finding.evidence),
    )


def _key_of(finding: Finding) -> Key | None:
    """Where a finding stands here; None for one that is no process's."""
    subject = finding.subject
    if subject.kind == "node":
        return TOGETHER, int(finding.id[:12], 16)
    if subject.pid is None or subject.start_time_ticks is None:
        return None
    return subject.pid, subject.start_time_ticks


class Alarms:
    """One entry a process; bounded, the oldest makes room (``crowded_out`` counts them)."""

    def __init__(self) -> None:
        self._alarms: OrderedDict[Key, _Alarm] = OrderedDict()
        self._alike: Counter[tuple[str, str]] = Counter()
        """Processes that are told of one by one, by rule and place."""
        self.crowded_out = 0

    def __len__(self) -> int:
        return len(self._alarms)

    def restore(self, findings: Iterable[Finding], now_ns: int) -> None:
        """Takes up findings that an earlier run left open, until it shows whether they hold."""
        for finding in findings:
            key = _key_of(finding)
            if key is not None:
                alarm = self._alarms.setdefault(key, _Alarm([], now_ns))
                alarm.findings.append(replace(finding, occurrences=0))

    def living(self) -> list[Key]:
        """Every process that has a finding here and is not known to have ended."""
        return [
            key
            for key, alarm in self._alarms.items()
            if alarm.ended_ns is None and key[0] != TOGETHER
        ]

    def put(
        self, key: Key, findings: Sequence[Finding], uses: int, at_ns: int, place: str = ""
    ) -> list[Finding]:
        """The findings that hold of a process from now on; gives them with their new uses.

        ``place`` names its program and where it runs: a crowd of processes that are alike in that
        is one finding, after the first ``ALIKE`` of them.
        """
        known = self._alarms.pop(key, None)
        if known is not None:
            self._leave(known)
        told_before = set() if known is None else {finding.rule for finding in known.findings}
        own: list[Finding] = []
        alike: list[Finding] = []
        for finding in findings:
            crowd = place and self._alike[finding.rule, place] >= ALIKE
            (alike if crowd and finding.rule not in told_before else own).append(finding)
        news = [self._put_together(_together(one, place), uses, at_ns) for one in alike]
        if not own:
            return news
        ended = known.ended_ns if known is not None else None
        self._alarms[key] = alarm = _Alarm(own, at_ns, 0, ended, place)
        self._alike.update((finding.rule, alarm.place) for finding in own)
        while len(self._alarms) > LIMIT:
            self._leave(self._alarms.popitem(last=False)[1])
            self.crowded_out += 1
        more = uses + (known.more if known is not None else 0)
        return [*(replace(finding, occurrences=more) for finding in own), *news]

    def _put_together(self, finding: Finding, uses: int, at_ns: int) -> Finding:
        key = TOGETHER, int(finding.id[:12], 16)
        self._alarms.pop(key, None)
        self._alarms[key] = _Alarm([finding], at_ns)
        return replace(finding, occurrences=uses)

    def _leave(self, alarm: _Alarm) -> None:
        for finding in alarm.findings:
            self._alike[finding.rule, alarm.place] -= 1
            if self._alike[finding.rule, alarm.place] <= 0:
                del self._alike[finding.rule, alarm.place]

    def used(self, key: Key, times: int, at_ns: int) -> None:
        """More uses of the kind that was told of already."""
        alarm = self._alarms.get(key)
        if alarm is not None:
            alarm.more += times
            alarm.last_ns = at_ns

    def ended(self, key: Key, at_ns: int) -> None:
        """The process has ended."""
        alarm = self._alarms.get(key)
        if alarm is not None and alarm.ended_ns is None:
            alarm.ended_ns = at_ns

    def current(self, now_ns: int, holders: Iterable[Key]) -> list[Finding]:
        """What holds now, each with its uses since the last call; drops what no longer does."""
        holding = set(holders)
        found: list[Finding] = []
        for key, alarm in list(self._alarms.items()):
            if alarm.ended_ns is not None:
                over = now_ns - alarm.ended_ns >= ENDED_NS
            else:
                over = key not in holding and now_ns - alarm.last_ns >= QUIET_NS
            # Uses that came since the last call are told once more before it is dropped.
            if over and not alarm.more:
                self._leave(self._alarms.pop(key))
                continue
            if alarm.more:
                found += [replace(finding, occurrences=alarm.more) for finding in alarm.findings]
                alarm.more = 0
            else:
                found += [_none(finding) for finding in alarm.findings]
                alarm.findings = found[-len(alarm.findings) :]
        return found


def _none(finding: Finding) -> Finding:
    return finding if finding.occurrences == 0 else replace(finding, occurrences=0)
