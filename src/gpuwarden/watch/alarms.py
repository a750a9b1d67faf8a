"""Findings of device opens for as long as they hold: the process lives and uses the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuwarden.finding import Finding

QUIET_NS = 600 * 10**9
"""How long a finding holds after the last use of a process that lives and holds nothing."""
ENDED_NS = 30 * 10**9
"""How long after the process has ended: what lived for a millisecond is still an open finding."""
LIMIT = 10_000

Key = tuple[int, int]
"""(pid, start time in ticks), as findings name a process."""


class _Alarm(Struct):
    findings: list[Finding]
    last_ns: int
    more: int = 0
    """Uses since they were last told of."""
    ended_ns: int | None = None


class Alarms:
    """One entry a process; bounded, the oldest makes room (``crowded_out`` counts them)."""

    def __init__(self) -> None:
        self._alarms: OrderedDict[Key, _Alarm] = OrderedDict()
        self.crowded_out = 0

    def __len__(self) -> int:
        return len(self._alarms)

    def restore(self, findings: Iterable[Finding], now_ns: int) -> None:
        """Takes up findings that an earlier run left open, until it shows whether they hold."""
        for finding in findings:
            subject = finding.subject
            if subject.pid is None or subject.start_time_ticks is None:
                continue
            alarm = self._alarms.setdefault(
                (subject.pid, subject.start_time_ticks), _Alarm([], now_ns)
            )
            alarm.findings.append(replace(finding, occurrences=0))

    def living(self) -> list[Key]:
        """Every process that has a finding here and is not known to have ended."""
        return [key for key, alarm in self._alarms.items() if alarm.ended_ns is None]

    def put(self, key: Key, findings: Sequence[Finding], uses: int, at_ns: int) -> list[Finding]:
        """The findings that hold of a process from now on; gives them with their new uses."""
        known = self._alarms.pop(key, None)
        if not findings:
            return []
        ended = known.ended_ns if known is not None else None
        self._alarms[key] = _Alarm(list(findings), at_ns, 0, ended)
        while len(self._alarms) > LIMIT:
            self._alarms.popitem(last=False)
            self.crowded_out += 1
        more = uses + (known.more if known is not None else 0)
        return [replace(finding, occurrences=more) for finding in findings]

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
            if over:
                del self._alarms[key]
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
