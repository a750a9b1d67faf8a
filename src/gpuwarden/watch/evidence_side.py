"""Archives that `watch` writes by itself: when a finding about a process opens as critical.

A child of its own writes each, one after the other, at low priority and with a deadline; here it is
only started, waited for and told of. Each finding is taken up once, restarts included. A finding
about a process whose archive is waiting or being written gets none of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.directory import held_bytes
from gpuwarden.finding import Finding
from gpuwarden.outputs.words import MIB
from gpuwarden.watch import evidence_findings

if TYPE_CHECKING:
    from gpuwarden.policy import Policy
    from gpuwarden.watch.options import WatchOptions

MEMORY_FILE = "evidence_ids.json"
IDS_LIMIT = 8192
"""Findings that are remembered as taken up; the oldest is forgotten first."""
QUEUE_LIMIT = 32
DEADLINE_SECONDS = 120
GRACE_SECONDS = 20.0
"""For the seal, after which the child is killed."""
END_SECONDS = 2.0
PRIORITY = 5
"""Below the workload, and still a quarter of a CPU that a miner saturates: at 10 it is a tenth."""
TOLD_NS = 3600 * 10**9
"""How long an outcome stays among the findings."""
TOLD_LIMIT = 64
ROOM_SECONDS = 30.0
"""Between two looks at a directory that is full."""
SMALLEST_MIB = 1
SAID_BYTES = 16 << 10
_MEMORY_BYTES = 1 << 20

Say = Callable[[str], None]


class _Case(Struct, frozen=True):
    """A process that an archive is to be written of."""

    finding: str
    rule: str
    pid: int
    start_time_ticks: int
    boot_id: str | None

    @property
    def process(self) -> tuple[int, int, str | None]:
        return self.pid, self.start_time_ticks, self.boot_id

    @property
    def text(self) -> str:
        return f"{self.rule} about pid {self.pid}"


class _Outcome(Struct, frozen=True):
    finding: Finding
    at_ns: int


class _Child:
    """One `gpuwarden evidence` at work."""

    def __init__(self, case: _Case, argv: Sequence[str]) -> None:
        self.case = case
        self.late_at = time.monotonic() + DEADLINE_SECONDS + GRACE_SECONDS
        self._said = os.memfd_create("evidence", os.MFD_CLOEXEC)
        self._told = os.memfd_create("evidence", os.MFD_CLOEXEC)
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self._told, stderr=self._said
            )
        except OSError:
            self.close()
            raise
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, PRIORITY)

    def told(self) -> bytes:
        """Its standard output."""
        return os.pread(self._told, SAID_BYTES, 0)

    def last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        size = os.fstat(self._said).st_size
        said = os.pread(self._said, SAID_BYTES, max(0, size - SAID_BYTES))
        lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")[:400]

    def close(self) -> None:
        """Lets go of what it said."""
        for handle in (self._said, self._told):
            os.close(handle)


class EvidenceSide:
    """For one thread, the agent's; ``policy`` is asked anew each round."""

    def __init__(self, options: WatchOptions, *, is_kept: bool, say: Say) -> None:
        """``is_kept``: whether the state directory is ours to write."""
        self._options = options
        self._say = say
        self._memory = os.path.join(options.state_directory, MEMORY_FILE) if is_kept else None
        self._ids: OrderedDict[str, bool] = OrderedDict()
        """Findings that were taken up, and whether a restart is to know it."""
        self._waiting: deque[_Case] = deque()
        self._child: _Child | None = None
        self._outcomes: deque[_Outcome] = deque(maxlen=TOLD_LIMIT)
        self._no_room = ""
        self._look_at = 0.0
        self._recall()

    @property
    def pids(self) -> set[int]:
        """Of the child that is at work."""
        return set() if self._child is None else {self._child.process.pid}

    def observing(
        self, observe: Callable[[Sequence[Finding]], None], policy: Callable[[], Policy]
    ) -> Callable[[Sequence[Finding]], None]:
        """``observe``, and what has just come up is taken up at once."""

        def both(findings: Sequence[Finding]) -> None:
            observe(findings)
            self.came_up(findings, policy())

        return both

    def came_up(self, findings: Iterable[Finding], policy: Policy) -> None:
        """What is critical among findings that have just come up need not wait for a round."""
        self._take_up(findings, policy)
        self._go_on(policy)

    def round(self, current: Iterable[Finding], policy: Policy, now_ns: int) -> list[Finding]:
        """Once a second: ``current`` are the open findings; what became of archives."""
        self._take_up(current, policy)
        self._mind(now_ns)
        self._go_on(policy)
        while self._outcomes and now_ns - self._outcomes[0].at_ns > TOLD_NS:
            self._outcomes.popleft()
        found = {one.finding.id: one.finding for one in self._outcomes}
        if self._no_room and self._waiting:
            texts = [self._no_room, *(one.text for one in list(self._waiting)[:8])]
            trouble = evidence_findings.failed("of several", texts)
            found[trouble.id] = trouble
        return list(found.values())

    def close(self) -> None:
        """Ends the child, whose archive then stays partial: the next start writes it anew."""
        child, self._child = self._child, None
        if child is None:
            return
        self._remember(child.case, begun=False)
        child.process.terminate()
        try:
            child.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.close()

    # ------------------------------------------------------------------------- what to write

    def _take_up(self, findings: Iterable[Finding], policy: Policy) -> None:
        if policy.evidence.when != "critical":
            return
        news = [
            case for one in findings if (case := _case_of(one)) and case.finding not in self._ids
        ]
        for case in news:
            at_work = None if self._child is None else self._child.case.process
            self._ids[case.finding] = False
            if case.process == at_work or any(case.process == one.process for one in self._waiting):
                self._say(f"evidence: {case.text} has the archive of that process")
            elif len(self._waiting) >= QUEUE_LIMIT:
                self._fail(case, f"{QUEUE_LIMIT} archives are waiting already", time.time_ns())
            else:
                self._waiting.append(case)
        while len(self._ids) > IDS_LIMIT:
            self._ids.popitem(last=False)

    def _go_on(self, policy: Policy) -> None:
        """Starts the next child when none is at work and there is room."""
        if self._child is not None or not self._waiting:
            return
        if self._no_room and time.monotonic() < self._look_at:
            return
        room_mib, self._no_room = self._room(policy)
        if self._no_room:
            self._look_at = time.monotonic() + ROOM_SECONDS
            return
        case = self._waiting.popleft()
        self._remember(case, begun=True)
        try:
            self._child = _Child(case, self._argv(case, policy, room_mib))
        except OSError as error:
            self._fail(case, f"cannot be started: {error.strerror}", time.time_ns())

    def _room(self, policy: Policy) -> tuple[int, str]:
        """How many MiB the next archive may have, or why there is none."""
        bounds = policy.evidence
        try:
            held = held_bytes(bounds.directory)
        except GpuwardenError as error:
            return 0, str(error)
        room = bounds.keep_mib - -(-held // MIB)
        if room < SMALLEST_MIB:
            return 0, (
                f"{bounds.directory} holds {held // MIB} MiB, and the policy's evidence.keep_mib "
                f"is {bounds.keep_mib}: no further archive is written"
            )
        return min(room, bounds.archive_mib), ""

    def _argv(self, case: _Case, policy: Policy, room_mib: int) -> list[str]:
        options = self._options
        argv = [
            # Nothing of the directory that it is started in is imported.
            sys.executable, "-P", "-m", "gpuwarden", "evidence", str(case.pid),
            "--start-time", str(case.start_time_ticks), "--finding", case.finding, "--by-watch",
            "--output", policy.evidence.directory, "--max-mib", str(room_mib),
            "--deadline", str(DEADLINE_SECONDS), "--root", options.root,
            "--state", options.state_directory, "--format", "json",
        ]  # fmt: skip
        for flag, value in (
            ("--boot-id", case.boot_id),
            ("--policy", options.policy_path),
            ("--nvml-library", options.nvml_library),
        ):
            if value is not None:
                argv += [flag, value]
        return argv

    # ------------------------------------------------------------------------ what became of it

    def _mind(self, now_ns: int) -> None:
        child = self._child
        if child is None:
            return
        code = child.process.poll()
        if code is None:
            if time.monotonic() < child.late_at:
                return
            child.process.kill()
            code = child.process.wait()
            self._fail(child.case, f"not done after {DEADLINE_SECONDS} s: killed", now_ns)
        elif code == 0:
            self._succeed(child, now_ns)
        else:
            why = child.last_words() or f"ended with {code}"
            self._fail(child.case, why.removeprefix("gpuwarden: "), now_ns)
        self._child = None
        child.close()

    def _succeed(self, child: _Child, now_ns: int) -> None:
        try:
            sealed = msgspec.json.decode(child.told(), type=_Sealed)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._fail(child.case, "it did not say what it has written", now_ns)
            return
        by = f"signed by {sealed.fingerprint}" if sealed.fingerprint else "unsigned"
        texts = [
            f"{child.case.text}: {sealed.path}",
            f"{sealed.members} files, {sealed.size_bytes} bytes, {sealed.left_out} left out, "
            f"{sealed.unread} could not be read",
            f"manifest sha256 {sealed.manifest_sha256}, {by}",
        ]
        self._say(f"evidence: {texts[0]}")
        finding = evidence_findings.written(child.case.finding, texts)
        self._outcomes.append(_Outcome(finding, now_ns))

    def _fail(self, case: _Case, why: str, now_ns: int) -> None:
        text = f"{case.text}: {why}"
        self._say(f"evidence: none of {text}")
        self._outcomes.append(_Outcome(evidence_findings.failed(case.finding, [text]), now_ns))

    # --------------------------------------------------------------------------- over restarts

    def _recall(self) -> None:
        if self._memory is None:
            return
        try:
            with open(self._memory, "rb") as file:
                ids = msgspec.json.decode(file.read(_MEMORY_BYTES), type=list[str])
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._say(
                f"evidence: {self._memory} does not read, so archives may be written twice: {error}"
            )
            return
        self._ids.update(dict.fromkeys(ids[-IDS_LIMIT:], True))

    def _remember(self, case: _Case, *, begun: bool) -> None:
        """Before the archive is begun: one that ends the agent is not begun again and again."""
        self._ids[case.finding] = begun
        if self._memory is None:
            return
        ids = [one for one, is_begun in self._ids.items() if is_begun]
        temporary = self._memory + ".new"
        try:
            with open(temporary, "wb") as file:
                file.write(msgspec.json.encode(ids))
            os.replace(temporary, self._memory)
        except OSError as error:
            self._say(f"evidence: {self._memory}: {error.strerror}")


class _Sealed(Struct):
    """What the child says of its archive."""

    path: str
    size_bytes: int
    manifest_sha256: str
    fingerprint: str
    members: int
    left_out: int
    unread: int


def _case_of(finding: Finding) -> _Case | None:
    subject = finding.subject
    if finding.severity != "critical" or finding.silenced_by is not None:
        return None
    if subject.kind != "process" or subject.pid is None or subject.start_time_ticks is None:
        return None
    return _Case(finding.id, finding.rule, subject.pid, subject.start_time_ticks, subject.boot_id)
