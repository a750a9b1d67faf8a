"""What the daemon does for responses: requests on its socket, archives, the journal's head."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from gpuwarden.finding import Finding
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.exec_count import ExecCounts
from gpuwarden.respond.identity import read_identity
from gpuwarden.watch import control
from gpuwarden.watch.evidence_findings import EVIDENCE_RULES
from gpuwarden.watch.evidence_side import EvidenceSide
from gpuwarden.watch.exec_subjects import ExecSubjects
from gpuwarden.watch.journal_head import JOURNAL_FILE, JOURNAL_RULES, KEPT_FILE, JournalHead

if TYPE_CHECKING:
    from gpuwarden.watch.agent import Agent

Observe = Callable[[Sequence[Finding]], None]

RESPONSE_RULES = EVIDENCE_RULES | JOURNAL_RULES


class ResponseSide:
    """For the agent's own thread; what it starts ends with the stack."""

    def __init__(self, agent: Agent, stack: ExitStack) -> None:
        self._agent = agent
        counts = stack.enter_context(ExecCounts())
        host = agent.host
        agent.telling.fill = ExecSubjects(lambda pid: read_identity(host, pid, counts)).filled
        self._control = control.started(agent, stack)
        directory = agent.options.state_directory
        kept = os.path.join(directory, KEPT_FILE) if agent.telling.is_kept else None
        self._journal = JournalHead(os.path.join(directory, JOURNAL_FILE), kept)
        self._evidence = EvidenceSide(agent.options, is_kept=agent.telling.is_kept, say=agent.say)
        stack.callback(self._evidence.close)

    def observing(self, observe: Observe) -> Observe:
        """``observe``, and an archive is begun at once for what comes up as critical."""
        return self._evidence.observing(observe, lambda: self._agent.policy)

    def came_up(self, findings: Sequence[Finding]) -> None:
        """An archive is begun at once for what is critical among these."""
        self._evidence.came_up(findings, self._agent.policy)

    @property
    def pids(self) -> set[int]:
        """Processes of our own."""
        return self._evidence.pids

    def is_asked_for(self, group: GroupKey) -> bool:
        """Whether somebody asked for a group's denial, which the policy's side leaves alone."""
        return group in self._control.denials

    def turn(self) -> None:
        """Answers what was asked."""
        self._control.turn()

    def findings(self, now_ns: int) -> list[Finding]:
        """What is denied on request, what became of archives, the journal's head; once a round."""
        agent = self._agent
        current = agent.telling.view.findings
        return [
            *self._control.findings(),
            *self._evidence.round(current, agent.policy, now_ns),
            *self._journal.findings(now_ns),
        ]
