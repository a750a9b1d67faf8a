"""Steps of `respond` without a machine: targets from a few lines, actors and means that record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpuwarden.errors import Unavailable
from gpuwarden.finding import VERDICT_SEVERITY, Row, Verdict
from gpuwarden.judge import judge
from gpuwarden.policy import Policy
from gpuwarden.respond.allowed import Power
from gpuwarden.respond.doing import Tried
from gpuwarden.respond.identity import Changed
from gpuwarden.respond.means import belongs
from gpuwarden.respond.order import NEEDS
from gpuwarden.respond.step import Identity, Outcome, Step, Target, Tell
from gpuwarden.respond.step_names import StepName
from gpuwarden.respond.target import Found, of_process_now
from tests.support.nodes import BOOT_ID, NodeBuilder

PID = 4242
IDENTITY = Identity(
    pid=PID, start_time_ticks=100, boot_id=BOOT_ID, exe_device="8:1", exe_inode=7, exec_count=3
)


def target_of(verdict: Verdict | None, **fields: Any) -> Target:
    """A process with this verdict, and nothing else known of it."""
    rows: tuple[Row, ...] = ()
    if verdict is not None:
        severity = VERDICT_SEVERITY[verdict]
        rows = (Row(gpu_id="GPU-0", gpu="0", pid=PID, verdict=verdict, severity=severity),)
    values: dict[str, Any] = {
        "verdict": verdict,
        "identity": IDENTITY,
        "process": None,
        "rows": rows,
        "container": None,
        "workload": None,
        "gpus": (),
        "snapshot": NodeBuilder().snapshot(),
        "policy": Policy(),
    }
    return Target(**{**values, **fields})


WORDS: dict[str, tuple[str, str, str]] = {
    "evidence": (
        "keep everything about it in one archive",
        "nothing of it; an archive is written in /var/lib/gpuwarden/evidence",
        "delete the archive",
    ),
    "freeze": (
        "freeze it",
        "everything in its control group stands still; its GPU memory stays its own",
        "gpuwarden respond 4242 --do thaw",
    ),
    "deny": (
        "deny it further opens of accelerators",
        "opens of accelerators by its control group fail; what is open already stays open",
        "gpuwarden respond --allow 0:4711",
    ),
    "kill": ("end it", "it gets SIGTERM and, 5 s later, SIGKILL", "there is none"),
    "drain-node": (
        "drain this node in Slurm",
        "no new job starts here; jobs that run here go on",
        "scontrol update nodename=node1 state=resume",
    ),
}
"""Title, change and undo of steps, for pages that a person reads."""


class RecordingActor:
    """An actor that only writes down that it was told to act."""

    def __init__(
        self, name: StepName, done: list[str], *, power: Power | None = None, refused: str = ""
    ) -> None:
        self.name = name
        self.done = done
        self.power = power or NEEDS[name]
        self.refused = refused

    def step(self, target: Target) -> Step | None:
        """A step that changes nothing."""
        title, changes, undo = WORDS.get(self.name, (self.name, "something", ""))
        return Step(
            name=self.name,
            power=self.power,
            title=title,
            changes=changes,
            undo=undo,
            refused=self.refused,
        )

    def do(self, target: Target, tell: Tell) -> Outcome:
        """Says that it was done."""
        self.done.append(self.name)
        return Outcome(step=self.name, done=True, lines=(f"{self.name} is done",))


class RecordingMeans:
    """Means that hold everything, keep everything, and write down in which order they were asked.

    ``fails`` are the names of those that fail: hold, evidence, intent, outcome.
    """

    def __init__(self, *, fails: Sequence[str] = (), untouchable: str = "") -> None:
        self.fails = fails
        self.untouchable = untouchable
        self.calls: list[str] = []
        self.tried: list[Tried] = []
        self.holds = 0

    def protected(self, target: Target) -> str:
        """As the real one says of who belongs here."""
        return self.untouchable or belongs(target)

    @contextmanager
    def hold(self, identity: Identity) -> Iterator[None]:
        """Errors: Changed when it is to fail, or from the second time on for ``hold later``."""
        self._call("hold")
        self.holds += 1
        if "hold later" in self.fails and self.holds > 1:
            raise Changed("it has executed a program since")
        yield
        self.calls.append("let go")

    def evidence(self, target: Target, tell: Tell) -> str:
        """An archive."""
        self._call("evidence")
        return "/evidence/archive.tar"

    def intent(self, step: StepName, target: Target) -> object:
        """Something that names it."""
        self._call("intent")
        return "intent"

    def outcome(self, intent: object, step: StepName, target: Target, tried: Tried) -> None:
        """Keeps what came of it."""
        self._call("outcome")
        self.tried.append(tried)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise Changed(f"{name} fails") if name == "hold" else Unavailable(f"{name} fails")


def found_in(
    node: NodeBuilder, pid: int, policy: Policy | None = None, *, now: Identity | None = None
) -> Found:
    """What `respond PID` finds on a node that a test has built; ``now``: as /proc has it."""
    snapshot = node.snapshot()
    process = next(one for one in snapshot.processes if one.pid == pid)
    exe = process.exe
    identity = now or Identity(
        pid=pid,
        start_time_ticks=process.start_time_ticks,
        boot_id=BOOT_ID,
        exe_device=exe.device if exe else None,
        exe_inode=exe.inode if exe else None,
        exec_count=1,
    )
    policy = policy or Policy()
    return of_process_now(identity, None, snapshot, judge(snapshot, policy), policy)
