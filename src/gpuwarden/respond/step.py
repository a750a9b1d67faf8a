"""A step of a plan, what it is done to, and what came of it: the words that all steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from gpuwarden.finding import Row, Verdict
from gpuwarden.model import Container, Fact, Gpu, Process, Snapshot, Workload
from gpuwarden.policy import Policy
from gpuwarden.respond.allowed import Power
from gpuwarden.respond.step_names import StepName


class Identity(Fact, frozen=True, kw_only=True):
    """A process as it was when it was judged: what an action is held against.

    ``exec_count`` is the kernel's own, where a probe could read it; ``exec_mark`` a digest of what
    the kernel lays down anew at each exec (the auxiliary vector, where stack, arguments and code
    begin). At least one of the two is needed before anything is done.
    """

    pid: int
    start_time_ticks: int
    boot_id: str | None
    exe_device: str | None = None
    exe_inode: int | None = None
    exec_count: int | None = None
    exec_mark: str | None = None


class Target(Struct, frozen=True, kw_only=True):
    """What a plan is about: one process with its verdict, and where it belongs."""

    verdict: Verdict | None
    identity: Identity | None
    """None for a finding about a GPU alone."""
    process: Process | None
    rows: tuple[Row, ...]
    container: Container | None
    workload: Workload | None
    gpus: tuple[Gpu, ...]
    snapshot: Snapshot
    policy: Policy
    finding_id: str | None = None
    owner: str | None = None
    contact: str | None = None


class Step(Fact, frozen=True, kw_only=True):
    """One step as the plan shows it; ``refused`` says why it may not or cannot be done now."""

    name: StepName
    power: Power
    title: str
    changes: str
    """What is another afterwards, in one sentence."""
    hurts: tuple[str, ...] = ()
    """Who else is touched, each with what happens to it; empty: nobody."""
    undo: str = ""
    """The command, or why there is none."""
    commands: tuple[str, ...] = ()
    """To be run by hand where this program cannot do the step itself."""
    refused: str = ""
    automatic: bool = True
    """False: only the printed commands do it."""


class Outcome(Fact, frozen=True, kw_only=True):
    """What a step did; ``done`` False with the reason in ``lines``."""

    step: StepName
    done: bool
    lines: tuple[str, ...] = ()
    undo: str = ""
    complete: bool = True
    """False when it was done and what it should bring about could not be seen, or did not come."""


Tell = Callable[[str], None]
"""Takes a line for the person who waits."""


class Actor(Protocol):
    """One kind of step: says what it would do, and does it. It decides nothing about verdicts."""

    def step(self, target: Target) -> Step | None:
        """The step for this target; None where it does not apply (no pod, no Slurm here)."""
        ...

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Does it now; the identity was checked right before, and is held by the caller's pidfd.

        Errors: GpuwardenError when it could not be tried.
        """
        ...
