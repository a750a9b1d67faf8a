"""Asks the examiner about processes whose container or job is not known, and keeps its answers."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.errors import GpuwardenError
from gpuwarden.model import Process
from gpuwarden.watch import examiner
from gpuwarden.watch.counts import Counts
from gpuwarden.watch.examiner import Examination, Examined
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.open_judge import Surroundings
from gpuwarden.watch.waiting import Key, Waiting
from gpuwarden.watch.workers import Worker


class Asking:
    """One question at a time, about all who wait; times are monotonic seconds."""

    def __init__(
        self,
        worker: Worker,
        surroundings: Surroundings,
        identities: Identities,
        counts: Counts,
    ) -> None:
        self.waiting = Waiting()
        self._worker = worker
        self._surroundings = surroundings
        self._identities = identities
        self._counts = counts
        self._has_asked = False

    def next_time(self) -> float | None:
        """When somebody is to be asked about; None when nobody waits."""
        return self.waiting.next_time(busy=self._worker.busy)

    def ask(self, now: float, process_of: Callable[[Key], Process | None]) -> None:
        """Asks about those whose time it is, if the examiner is free."""
        if self._worker.busy:
            return
        due = self.waiting.due(now)
        if not due and self._has_asked:
            return
        # The first question is asked before anybody waits for it: it loads what speaks to a
        # kubelet and to runtimes, which takes longer than any answer.
        self._has_asked = True
        processes: dict[int, Process] = {}
        for key in due:
            process = process_of(key)
            if process is None:
                self.waiting.forget(key)
                continue
            processes[process.pid] = process
            for parent in self._identities.lineage(process):
                processes.setdefault(parent.pid, parent)
        question = Examination(
            processes=tuple(processes.values()),
            gpus=self._surroundings.gpus,
            device_nodes=self._surroundings.device_nodes,
        )
        asked = False
        try:
            asked = self._worker.request(examiner.encode(question))
        except GpuwardenError:
            self._counts.ask_failures += 1
        if asked:
            self.waiting.asking(due)
        else:
            self.waiting.refused(due, now)

    def answered(self) -> list[Key]:
        """Takes the answer, if it is there; those that waited for it."""
        try:
            body = self._worker.take()
        except GpuwardenError:
            self._counts.ask_failures += 1
            return list(self.waiting.answered())
        if body is None:
            return []
        self._keep(examiner.decode(body))
        return list(self.waiting.answered())

    def _keep(self, answer: Examined) -> None:
        around = self._surroundings
        around.keep(answer.containers, answer.asked_at_ns)
        if answer.sources_at_ns:
            around.sources, around.workloads = answer.sources, answer.workloads
            around.sources_at_ns = answer.sources_at_ns
