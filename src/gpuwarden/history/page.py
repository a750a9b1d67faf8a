"""A past as text for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gpuwarden.finding import severity_rank
from gpuwarden.history.remembered import STATE_REMEDY, KnownFinding
from gpuwarden.history.summary import SECOND_NS, Amount, Interval, Judged, Past
from gpuwarden.outputs.sheet import cut, pad, wrap
from gpuwarden.outputs.words import age, escape, memory, moment

if TYPE_CHECKING:
    from gpuwarden.history import History

NARROWEST = 80
TABLE = 64
"""Columns of the table of intervals without its bar."""
PROCESSES_SHOWN = 20
ALIKE_SHOWN = 3
LISTED_SHOWN = 8
MOMENT = 20


def render(history: History, width: int) -> str:
    """The snapshot's part, then the memory's; nothing in it acts on the terminal."""
    width = max(width, NARROWEST)
    lines = [*_snapshot(history, width)]
    if history.memory.state != "not-asked":
        lines += _remembered(history, width)
    return "\n".join(lines) + "\n"


def _snapshot(history: History, width: int) -> Iterator[str]:
    if history.pid is None:
        missing = "" if history.is_here else "not in this snapshot"
        yield escape(f"GPU {history.gpu}: {missing or history.gpu_name or 'unnamed'}")
    elif not history.is_here and not history.rows:
        last = (
            "what is remembered of this number follows"
            if history.pasts or history.findings
            else "and nothing of it is recorded"
        )
        yield f"pid {history.pid}: not on a GPU in this snapshot, {last}"
        return
    elif history.started_at_ns is not None:
        since = age(history.started_at_ns, history.taken_at_ns)
        yield f"pid {history.pid}: since {moment(history.started_at_ns)}, {since} ago"
    else:
        yield f"pid {history.pid}: since when is not known"
    for row in history.rows:
        yield escape(f"  on GPU {row.gpu}: pid {row.pid or '-'}, {row.verdict}")
    for one in history.moments:
        yield from _wrapped(f"{moment(one.at_ns):<{MOMENT}}  {one.text}", width, 2, MOMENT + 2)
    if not history.accounting:
        yield "  The driver's accounting is off: it tells nothing of what has ended."
    yield f"  {moment(history.taken_at_ns):<{MOMENT}}  this snapshot"


# -------------------------------------------------------------------- the memory


def _remembered(history: History, width: int) -> Iterator[str]:
    about = history.memory
    yield ""
    if about.state == "none":
        text = f"No memory in {about.directory}: {STATE_REMEDY}."
        yield from _wrapped(text, width)
        return
    since = f" since {moment(about.since_ns)}" if about.since_ns else ""
    yield from _wrapped(f"Remembered in {about.directory}{since}:", width)
    if about.state == "failed":
        yield "  Not all of it could be read: what is missing here may have been."
    if history.pid is None:
        yield from _gpu(history, width)
    else:
        yield from _pid(history, width)
    if history.findings:
        yield ""
        yield from _findings(history, width)


def _pid(history: History, width: int) -> Iterator[str]:
    if not history.pasts and history.memory.state == "ok":
        yield "  No samples of it on a GPU."
    elif history.pasts and history.is_here and not any(one.is_current for one in history.pasts):
        yield "  No samples of this process, only of others that had its number before."
    for past in history.pasts:
        yield ""
        yield from _wrapped(f"{_who(past, history)} on GPU {past.gpu}, {_when(past)}", width, 2)
        if past.binary is not None:
            yield from _fact("binary", past.binary, width)
        yield from _fact("parents", " < ".join(past.parents[:LISTED_SHOWN]), width)
        yield from _fact("peers", ", ".join(past.peers[:LISTED_SHOWN]), width)
        yield from _measured(past, width)


def _who(past: Past, history: History) -> str:
    if past.is_current:
        return "This process"
    who = "Another process of this number" if history.is_here else "The process"
    if past.started_at_ns is not None:
        return f"{who}, started {moment(past.started_at_ns)},"
    if past.start_time_ticks is None:
        return f"{who}, whose start is not known,"
    return f"{who}, of boot {past.boot_id[:8]}," if past.boot_id else f"{who}, of a boot not known,"


def _gpu(history: History, width: int) -> Iterator[str]:
    if not history.pasts and history.memory.state == "ok":
        yield "  No samples of it in that time."
    # Those that were there last come last, however long ago they came.
    processes = sorted(
        (past for past in history.pasts if past.pid is not None), key=lambda one: one.last_ns or 0
    )
    for past in history.pasts:
        if past.pid is None:
            yield ""
            yield from _wrapped(f"The GPU as a whole, {_when(past)}", width, 2)
            yield from _measured(past, width)
    if not processes:
        return
    yield ""
    yield f"    {'pid':>8}  {'from':<{MOMENT}}  {'for':<10} {'SM mean':>8} {'max':>4} {'memory':>9}"
    shown = processes[-PROCESSES_SHOWN:]
    yield from _left_out(len(processes) - len(shown), "earlier ones")
    for past in shown:
        yield from _process(past, width)


def _process(past: Past, width: int) -> Iterator[str]:
    sm, used = past.sm_percent, past.memory_bytes
    yield cut(
        f"    {past.pid:>8}  {moment(past.first_ns):<{MOMENT}}  "
        f"{age(past.first_ns, past.last_ns or 0):<10} "
        f"{'?' if sm is None else sm.mean:>7}% {'?' if sm is None else sm.max:>3}% "
        f"{memory(None if used is None else used.max):>9}",
        width,
    )
    verdict = _last_verdict(past.verdicts) or "not judged"
    now = "" if past.is_current else ", gone"
    binary = past.binary or "binary not known"
    yield " " * 14 + cut(escape(f"{verdict}{now}: {binary}"), width - 14)


def _when(past: Past) -> str:
    if past.first_ns is None or past.last_ns is None:
        return "no samples in that time"
    text = f"seen {moment(past.first_ns)} to {moment(past.last_ns)}"
    span = max((past.last_ns - past.first_ns) / SECOND_NS, 0.0)
    if span - past.covered_seconds > 120:
        missing = age(0, int((span - past.covered_seconds) * SECOND_NS))
        text += f", with {missing} between in which it was not"
    if past.older_left_out:
        text += ", and before that"
    return text


def _measured(past: Past, width: int) -> Iterator[str]:
    if past.first_ns is None:
        return
    yield from _fact("SM", _percent(past.sm_percent), width)
    yield from _fact("memory", _bytes(past.memory_bytes), width)
    yield from _fact("verdict", ", then ".join(_changes(past.verdicts)), width)
    if len(past.intervals) > 1:
        yield from _table(past.intervals, width)


def _percent(amount: Amount | None) -> str:
    if amount is None:
        return "not known"
    return f"min {amount.min}%, mean {amount.mean}%, max {amount.max}%"


def _bytes(amount: Amount | None) -> str:
    if amount is None:
        return "not known"
    return f"min {memory(amount.min)}, mean {memory(amount.mean)}, max {memory(amount.max)}"


def _runs(verdicts: Iterable[Judged]) -> list[Judged]:
    """Without the moments in which there was no verdict yet."""
    runs: list[Judged] = []
    for one in verdicts:
        if one.verdict is None:
            continue
        if runs and runs[-1].verdict == one.verdict:
            runs[-1] = Judged(verdict=one.verdict, from_ns=runs[-1].from_ns, until_ns=one.until_ns)
        else:
            runs.append(one)
    return runs


def _changes(verdicts: Iterable[Judged]) -> list[str]:
    runs = _runs(verdicts)
    shown = runs[-LISTED_SHOWN:]
    texts = [f"{one.verdict} from {moment(one.from_ns)}" for one in shown]
    return [f"{len(runs) - len(shown)} changes", *texts] if len(runs) > len(shown) else texts


def _last_verdict(verdicts: Iterable[Judged]) -> str | None:
    runs = _runs(verdicts)
    return runs[-1].verdict if runs else None


def _table(intervals: Iterable[Interval], width: int) -> Iterator[str]:
    room = min(max(width - TABLE, 10), 50)
    yield ""
    yield f"    {'from':<{MOMENT}}  SM min mean  max  {'':<{room}} {'memory max':>10}  seen"
    before: Interval | None = None
    for one in intervals:
        if before is not None and one.from_ns > before.until_ns:
            yield f"    {moment(before.until_ns):<{MOMENT}}  not seen"
        before = one
        sm, used = one.sm_percent, one.memory_bytes
        numbers = (
            f"{'?':>6} {'?':>4} {'?':>4}" if sm is None else f"{sm.min:>6} {sm.mean:>4} {sm.max:>4}"
        )
        yield cut(
            f"    {moment(one.from_ns):<{MOMENT}}  {numbers}  {pad(_bar(sm, room), room)} "
            f"{memory(None if used is None else used.max):>10} {_seen(one):>5}",
            width,
        )


def _seen(one: Interval) -> str:
    """How much of the interval was seen."""
    span = (one.until_ns - one.from_ns) / SECOND_NS
    return f"{min(round(100 * one.covered_seconds / span), 100)}%"


def _bar(sm: Amount | None, room: int) -> str:
    """The mean as ``#``, up to the most as ``-``: a load that pauses shows."""
    if sm is None:
        return ""
    mean, most = (min(max(round(value * room / 100), 0), room) for value in (sm.mean, sm.max))
    return "#" * mean + "-" * (most - mean)


def _findings(history: History, width: int) -> Iterator[str]:
    """The gravest first; many of one rule together, so that a flood hides no other."""
    by_rule: dict[str, list[KnownFinding]] = {}
    for known in sorted(history.findings, key=_weight):
        by_rule.setdefault(known.finding.rule, []).append(known)
    yield "  Findings"
    for same in by_rule.values():
        if len(same) > ALIKE_SHOWN:
            yield from _many(same, width)
            continue
        for known in same:
            yield from _finding(known, history, width)


def _weight(known: KnownFinding) -> tuple[int, bool, int]:
    return -severity_rank(known.finding.severity), not known.is_open, -known.first_seen_ns


def _many(same: Sequence[KnownFinding], width: int) -> Iterator[str]:
    worst = same[0].finding
    first, last = (min(k.first_seen_ns for k in same), max(k.last_seen_ns for k in same))
    yield from _wrapped(
        f"{moment(first)}  {worst.severity.upper()}  {len(same)} findings: {worst.title}", width, 4
    )
    pids = list(dict.fromkeys(k.finding.subject.pid for k in same))
    shown = ", ".join(str(pid) for pid in pids[:LISTED_SHOWN] if pid is not None)
    more = f" and {len(pids) - LISTED_SHOWN} more" if len(pids) > LISTED_SHOWN else ""
    for text in (
        f"{sum(k.is_open for k in same)} open, last seen {moment(last)}",
        f"of pid {shown}{more}; --format json has all" if shown else "",
        f"[{worst.rule}]",
    ):
        if text:
            yield from _wrapped(text, width, 6)


def _finding(known: KnownFinding, history: History, width: int) -> Iterator[str]:
    finding, subject = known.finding, known.finding.subject
    until = "open" if known.is_open else f"resolved {moment(known.resolved_at_ns)}"
    # Of an open one the memory notes only now and then that it is still there.
    last = "noted" if known.is_open else "seen"
    who = f"pid {subject.pid}: " if history.pid is None and subject.pid is not None else ""
    times = f"{known.count} times, " if known.count > 1 else ""
    yield from _wrapped(
        f"{moment(known.first_seen_ns)}  {finding.severity.upper()}  {who}{finding.title}", width, 4
    )
    for text in (
        f"{until}, {times}last {last} {moment(known.last_seen_ns)}",
        f"silenced by {finding.silenced_by}" if finding.silenced_by else "",
        *_other(known, history),
        f"[{finding.rule} {finding.id}]",
    ):
        if text:
            yield from _wrapped(text, width, 6)


def _other(known: KnownFinding, history: History) -> Iterator[str]:
    """Whose it is, where several processes had the pid."""
    subject = known.finding.subject
    if history.pid is None:
        return
    identity = (subject.start_time_ticks, subject.boot_id)
    if history.is_here:
        if identity != (history.start_time_ticks, history.boot_id):
            yield "of another process of this number"
        return
    processes = {(past.start_time_ticks, past.boot_id): past for past in history.pasts}
    past = processes.get(identity)
    if past is None:
        yield "of a process without samples"
    elif len(processes) > 1:
        yield f"of {_who(past, history).rstrip(',').replace('The', 'the')}"


def _fact(name: str, text: str, width: int) -> Iterator[str]:
    if text:
        lines = wrap(escape(text), width - 13)
        yield f"    {name:<8} {lines[0].rstrip()}"
        yield from (f"{'':<13}{line.rstrip()}" for line in lines[1:])


def _wrapped(text: str, width: int, indent: int = 0, hang: int = 2) -> Iterator[str]:
    for line in wrap(escape(text), width - indent, hang):
        yield " " * indent + line.rstrip()


def _left_out(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"    {count} {what} are left out; --format json has them"
