"""The exec count in the daemon's findings: of the exec that was judged, or none."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from gpuwarden.errors import Unavailable
from gpuwarden.finding import Finding, Severity, Subject, finding_id
from gpuwarden.respond.step import Identity
from gpuwarden.watch import exec_subjects
from gpuwarden.watch.exec_subjects import ExecSubjects

NOW = Identity(
    pid=77,
    start_time_ticks=5,
    boot_id="b",
    exe_device="8:1",
    exe_inode=9,
    exec_count=3,
    exec_mark="a" * 32,
)


@dataclass
class Machine:
    """The processes there are, and how often one was looked at."""

    processes: dict[int, Identity] = field(default_factory=lambda: {77: NOW})
    looks: int = 0

    def read(self, pid: int) -> Identity:
        self.looks += 1
        if pid not in self.processes:
            raise Unavailable(f"no process {pid}")
        return self.processes[pid]


def finding(severity: Severity = "critical", **more: object) -> Finding:
    subject = Subject(
        kind="process",
        pid=77,
        start_time_ticks=5,
        boot_id="b",
        exe_device="8:1",
        exe_inode=9,
        exec_mark="a" * 32,
    )
    subject = replace(subject, **more)
    return Finding(
        id=finding_id("r", subject),
        rule="r",
        severity=severity,
        title="t",
        explanation="e",
        subject=subject,
    )


def counts(machine: Machine, *findings: Finding) -> list[int | None]:
    told = ExecSubjects(machine.read).filled(findings)
    assert [one.id for one in told] == [one.id for one in findings]
    return [one.subject.exec_count for one in told]


def test_the_exec_that_was_judged_has_its_count() -> None:
    assert counts(Machine(), finding(), finding("error")) == [3, 3]


def test_a_process_is_looked_at_once_an_exec() -> None:
    machine = Machine()
    subjects = ExecSubjects(machine.read)
    for _ in range(3):
        subjects.filled([finding()])
    assert machine.looks == 1
    machine.processes[77] = replace(NOW, exec_mark="b" * 32, exec_count=4)
    [again] = subjects.filled([finding(exec_mark="b" * 32)])
    assert (machine.looks, again.subject.exec_count) == (2, 4)
    # What was judged before is still that exec's.
    [before] = subjects.filled([finding()])
    assert before.subject.exec_count == 3


def test_another_exec_another_binary_or_another_process_gives_none() -> None:
    for change in (
        {"exec_mark": "b" * 32, "exec_count": 4},
        {"exe_inode": 10},
        {"start_time_ticks": 6},
        {"boot_id": "c"},
        {"exec_count": None},
    ):
        assert counts(Machine({77: replace(NOW, **change)}), finding()) == [None]
    assert counts(Machine({}), finding()) == [None]


def test_what_nobody_acts_on_and_what_has_no_mark_is_not_looked_at() -> None:
    machine = Machine()
    gpu = replace(finding(), subject=Subject(kind="gpu", name="GPU 0"))
    found = counts(machine, finding("warning"), finding("info"), finding(exec_mark=None), gpu)
    assert (found, machine.looks) == ([None] * 4, 0)


def test_what_is_remembered_is_bounded() -> None:
    machine = Machine({})
    subjects = ExecSubjects(machine.read)
    for number in range(exec_subjects.KNOWN_LIMIT + 1):
        subjects.filled([finding(exec_mark=f"{number:032x}")])
    subjects.filled([finding(exec_mark=f"{0:032x}")])
    assert machine.looks == exec_subjects.KNOWN_LIMIT + 2
