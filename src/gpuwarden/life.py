"""Findings with a life: opened once, updated when they change, resolved when they are gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpuwarden.finding import Evidence, Finding, Severity, Status, severity_rank
from gpuwarden.pattern import pattern
from gpuwarden.store import FindingState, News, Store

TRANSITION_SCHEMA = "gpuwarden.finding"
TRANSITION_VERSION = 1

ROUNDS_TO_RESOLVE = 3
UPDATE_INTERVAL_NS = 60 * 10**9
REMEMBER_INTERVAL_NS = 60 * 10**9
MAX_OPEN = 10_000

# What is measured differs in every round: a finding is another one when something else changes.
MEASURE = pattern(r"\d+(?:[.,]\d+)?(?=\s?(?:%|[KMGT]i?B\b|B\b|ms\b|s\b|min\b|h\b|d\b|W\b|°C))")


class Transition(Finding, frozen=True, kw_only=True, omit_defaults=False):
    """A finding at a turn of its life: what sinks get.

    ``sequence`` has no gap within a ``stream``; a new stream begins only with a new database.
    """

    schema: str = TRANSITION_SCHEMA
    version: int = TRANSITION_VERSION
    stream: str = ""
    node: str = ""
    at_ns: int = 0
    first_seen_ns: int = 0
    last_seen_ns: int = 0
    count: int = 1
    """How often it was seen since it was opened."""


class _Told(msgspec.Struct, frozen=True):
    """What was last told of a finding, as far as a change of it is news."""

    severity: Severity
    owner: str | None
    verdict: str | None
    evidence: frozenset[tuple[str, ...]]


class _Life(msgspec.Struct):
    """One open finding, in memory."""

    finding: Finding
    """As last seen."""
    told: _Told
    worst: int
    """The highest rank of severity told since it was opened."""
    first_seen_ns: int
    last_seen_ns: int
    told_at_ns: int
    count: int
    opened_sequence: int
    missed: int = 0
    remembered_at_ns: int = 0
    untold: bool = False
    """It has changed, and it is too early to tell so."""


class _Seen(NamedTuple):
    finding: Finding
    times: int


_encoder = msgspec.json.Encoder()


def encode(finding: Finding) -> bytes:
    """One transition as JSON, without a newline."""
    return _encoder.encode(finding)


def decode(body: bytes) -> Transition:
    """The transition of a spooled body."""
    return msgspec.json.decode(body, type=Transition)


def _evidence_key(evidence: Evidence) -> tuple[str, ...]:
    text = MEASURE.sub("#", evidence.text)
    return (evidence.kind or "", evidence.strength, evidence.source, text)


def _told(finding: Finding) -> _Told:
    return _Told(
        severity=finding.severity,
        owner=finding.owner,
        verdict=finding.verdict,
        evidence=frozenset(map(_evidence_key, finding.evidence)),
    )


def _merged(findings: Iterable[Finding]) -> tuple[dict[str, _Seen], dict[str, Finding]]:
    """Findings of a round by id: those that count (the gravest of each), and silenced ones."""
    seen: dict[str, _Seen] = {}
    silenced: dict[str, Finding] = {}
    for finding in findings:
        if finding.silenced_by is not None:
            silenced[finding.id] = finding
            continue
        before = seen.get(finding.id)
        if before is None:
            seen[finding.id] = _Seen(finding, finding.occurrences)
        else:
            graver = severity_rank(finding.severity) > severity_rank(before.finding.severity)
            seen[finding.id] = _Seen(
                finding if graver else before.finding, before.times + finding.occurrences
            )
    return seen, silenced


class FindingLife:
    """Turns the findings of each round into news; what it knows survives a restart.

    ``observe`` returns when state and news are in the store, so whatever a sink tells afterwards
    is not told again as ``opened`` after a crash. One thread observes; others may ask ``current``.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: str = "",
        rounds_to_resolve: int = ROUNDS_TO_RESOLVE,
        update_interval_ns: int = UPDATE_INTERVAL_NS,
    ) -> None:
        """``node`` is the name of the machine, as sinks tell it."""
        self._ledger = store.findings
        self._node = node
        self._rounds_to_resolve = rounds_to_resolve
        self._update_interval_ns = update_interval_ns
        self.overflowed = 0
        """Findings that were not opened because ``MAX_OPEN`` others are."""
        self._open: dict[str, _Life] = {}
        self.forgotten = 0
        """Open findings of the store that this version cannot read; they are opened anew."""
        for state in self._ledger.states():
            try:
                self._open[state.id] = msgspec.json.decode(state.state, type=_Life)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.forgotten += 1

    @property
    def open(self) -> Mapping[str, Finding]:
        """The open findings by id, as last seen."""
        return {key: life.finding for key, life in self._open.items()}

    def current(self) -> list[Transition]:
        """The open findings as they are now, for sinks that want them repeated."""
        return [
            self._transition(
                life,
                "opened" if life.told_at_ns == life.first_seen_ns else "updated",
                life.opened_sequence,
                life.last_seen_ns,
            )
            for life in list(self._open.values())
        ]

    def observe(
        self, findings: Iterable[Finding], at_ns: int, evaluated_rules: frozenset[str]
    ) -> list[Finding]:
        """The news of one round, in sequence; empty when nothing changed.

        ``findings`` are all that hold now, of any rule; several with one id count as one.
        ``evaluated_rules`` are the rules that could be evaluated in this round: only their
        findings can be missed. An update comes at most once in the update interval, but a severity
        that was never told before comes at once. A silenced finding is none.
        """
        seen, silenced = _merged(findings)
        news: list[Transition] = []
        changed: set[str] = set()
        closed: dict[str, _Life] = {}
        for key, (finding, times) in seen.items():
            life = self._open.get(key)
            if life is None:
                # A crowd must not keep our own troubles from being told: those are few.
                if len(self._open) >= MAX_OPEN and finding.subject.kind != "source":
                    self.overflowed += 1
                    continue
                news.append(self._opened(finding, times, at_ns, len(news)))
                changed.add(key)
                continue
            told = life.told
            self._again(life, finding, times, at_ns)
            if life.told is not told:
                news.append(self._told_again(life, "updated", at_ns, len(news)))
                changed.add(key)
            elif not 0 <= at_ns - life.remembered_at_ns < REMEMBER_INTERVAL_NS:
                changed.add(key)
        for key, life in list(self._open.items()):
            if key in seen:
                continue
            if key in silenced:
                life.finding = silenced[key]
            elif life.finding.rule not in evaluated_rules:
                continue
            else:
                life.missed += 1
                if life.missed < self._rounds_to_resolve:
                    continue
            news.append(self._told_again(life, "resolved", at_ns, len(news)))
            closed[key] = self._open.pop(key)
        self._commit(changed, closed, news, at_ns)
        return list(news)

    def _opened(self, finding: Finding, count: int, at_ns: int, ahead: int) -> Transition:
        life = _Life(
            finding=finding,
            told=_told(finding),
            worst=severity_rank(finding.severity),
            first_seen_ns=at_ns,
            last_seen_ns=at_ns,
            told_at_ns=at_ns,
            count=count,
            opened_sequence=self._ledger.last_sequence + 1 + ahead,
        )
        self._open[finding.id] = life
        return self._transition(life, "opened", life.opened_sequence, at_ns)

    def _again(self, life: _Life, finding: Finding, count: int, at_ns: int) -> None:
        unchanged = finding is life.finding and not life.untold
        life.missed = 0
        life.finding = finding
        life.last_seen_ns = at_ns
        life.count += count
        if unchanged:
            return
        told = _told(finding)
        rank = severity_rank(finding.severity)
        waited = not 0 <= at_ns - life.told_at_ns < self._update_interval_ns
        life.untold = told != life.told
        if life.untold and (waited or rank > life.worst):
            life.told = told
            life.worst = max(life.worst, rank)
            life.untold = False

    def _told_again(self, life: _Life, status: Status, at_ns: int, ahead: int) -> Transition:
        life.told_at_ns = at_ns
        return self._transition(life, status, self._ledger.last_sequence + 1 + ahead, at_ns)

    def _transition(self, life: _Life, status: Status, sequence: int, at_ns: int) -> Transition:
        fields = {name: getattr(life.finding, name) for name in Finding.__struct_fields__}
        fields |= {
            "status": status,
            "sequence": sequence,
            "stream": self._ledger.stream,
            "node": self._node,
            "at_ns": at_ns,
            "first_seen_ns": life.first_seen_ns,
            "last_seen_ns": life.last_seen_ns,
            "count": life.count,
        }
        return Transition(**fields)

    def _commit(
        self, changed: set[str], closed: dict[str, _Life], news: list[Transition], at_ns: int
    ) -> None:
        states = []
        for key in changed | closed.keys():
            life = closed.get(key) or self._open[key]
            life.remembered_at_ns = at_ns
            states.append(
                FindingState(key, key not in closed, life.last_seen_ns, _encoder.encode(life))
            )
        # With nothing new it still has to run while a former round is unwritten.
        if states or news or self._ledger.trouble is not None:
            self._ledger.commit(states, [News(t.sequence, at_ns, encode(t)) for t in news])
