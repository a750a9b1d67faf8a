"""No action outside the table: every verdict, every step, every condition, with actors that record.

The table is written out here once more, as the design has it, and not taken from the program.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.finding import VERDICTS, Row, Verdict
from gpuwarden.host import Host
from gpuwarden.respond.allowed import POWERS, grant, refusal
from gpuwarden.respond.doing import Confirmations, Tried, do
from gpuwarden.respond.order import NEEDS, STEPS
from gpuwarden.respond.registry import ACTORS, actors
from gpuwarden.respond.settings import Settings
from gpuwarden.respond.step_names import STEPS as FLAG_STEPS
from gpuwarden.respond.step_names import StepName
from tests.support.responding import IDENTITY, PID, RecordingActor, RecordingMeans, target_of

E, F, D = "evidence", "freeze", "deny"
KILL, ASKED, HUNG = "kill", "kill if the owner was asked", "kill if it is shown to hang"
DESIGN: dict[Verdict | None, set[str]] = {
    None: {E},
    "expected": {E},
    "system": {E},
    "wrong-gpu": {E},
    "other-team": {E},
    "orphaned-job": {E, KILL},
    "zombie-context": {E, HUNG},
    "leaked-memory": {E},
    "rogue-container": {E, F, D, ASKED},
    "suspicious": {E, F, D, ASKED},
    "cryptominer": {E, F, D, KILL},
    "unattributed": {E, ASKED},
    "unreadable": {E},
}
POWER_OF: dict[StepName, str] = {
    "evidence": "evidence",
    "freeze": "freeze",
    "thaw": "undo",
    "deny": "deny",
    "allow": "undo",
    "hold-jobs": "deny",
    "cordon": "deny",
    "kill": "kill",
    "delete-pod": "kill",
    "drain-node": "deny",
}
EVERY = list(product((None, *VERDICTS), STEPS, (False, True), (False, True)))


def may(verdict: Verdict | None, step: StepName, owner: bool, hung: bool) -> bool:
    """What the design says."""
    power, given = POWER_OF[step], DESIGN[verdict]
    if power == "undo":
        return True
    if power != "kill":
        return power in given
    return KILL in given or (ASKED in given and owner) or (HUNG in given and hung)


def tried(
    step: StepName,
    verdict: Verdict | None,
    means: RecordingMeans,
    *,
    answer: bool = True,
    actor: RecordingActor | None = None,
    target: dict[str, Any] | None = None,
    **given_to: bool,
) -> tuple[Tried, list[str]]:
    done: list[str] = actor.done if actor is not None else []
    came = do(
        actor or RecordingActor(step, done),
        step,
        target_of(verdict, **(target or {})),
        Confirmations(**given_to),
        means,
        tell=lambda line: None,
        ask=lambda question: answer,
    )
    return came, done


def test_the_design_names_every_verdict_and_step() -> None:
    assert set(DESIGN) == {None, *VERDICTS}
    assert set(POWER_OF) == set(STEPS) == set(FLAG_STEPS)
    assert set(NEEDS.values()) == set(POWERS)


@pytest.mark.parametrize(("verdict", "step", "owner", "hung"), EVERY)
def test_nothing_outside_the_table_is_done_and_all_of_it_is(
    verdict: Verdict | None, step: StepName, owner: bool, hung: bool
) -> None:
    means = RecordingMeans()
    came, done = tried(step, verdict, means, owner_confirmed=owner, hung_confirmed=hung, yes=True)
    assert bool(done) == may(verdict, step, owner, hung)
    assert came.state == ("done" if done else "refused")
    assert means.calls[0] == "intent" and means.calls[-1] == "outcome"
    assert means.tried == [came]
    if not done:
        assert "evidence" not in means.calls and "hold" not in means.calls
    elif POWER_OF[step] not in ("evidence", "undo"):
        # The identity is held while evidence is taken, and looked at once more before the act.
        assert means.calls == [
            "intent", "hold", "evidence", "hold", "let go", "let go", "outcome",
        ]  # fmt: skip
        assert came.archive


@pytest.mark.parametrize("verdict", [None, *VERDICTS])
@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize(("owner", "hung"), list(product((False, True), repeat=2)))
def test_the_table_is_the_designs(
    verdict: Verdict | None, power: Any, owner: bool, hung: bool
) -> None:
    step: StepName = {"evidence": "evidence", "freeze": "freeze", "deny": "deny", "kill": "kill"}[
        power
    ]  # type: ignore[assignment]
    why = refusal(verdict, power, owner_confirmed=owner, hung_confirmed=hung)
    assert (not why) == may(verdict, step, owner, hung)
    assert (grant(verdict, power) is None) == (not may(verdict, step, owner=True, hung=True))


@given(
    verdict=st.sampled_from([None, *VERDICTS]),
    step=st.sampled_from(STEPS),
    power=st.sampled_from(POWERS),
    fails=st.lists(
        st.sampled_from(["hold", "hold later", "evidence", "intent", "outcome"]), max_size=3
    ),
    owner=st.booleans(),
    hung=st.booleans(),
    yes=st.booleans(),
    answer=st.booleans(),
    refused=st.sampled_from(["", "it cannot be done here"]),
    untouchable=st.sampled_from(["", "it is this program's shell"]),
    other=st.sampled_from([None, *VERDICTS]),
)
@settings(max_examples=600, deadline=None)
def test_an_act_needs_every_check(
    verdict: Verdict | None,
    step: StepName,
    power: Any,
    fails: list[str],
    owner: bool,
    hung: bool,
    yes: bool,
    answer: bool,
    refused: str,
    untouchable: str,
    other: Verdict | None,
) -> None:
    """Whatever fails, and whatever an actor says of the power it needs."""
    means = RecordingMeans(fails=fails, untouchable=untouchable)
    done: list[str] = []
    actor = RecordingActor(step, done, power=power, refused=refused)
    rows = [Row(gpu_id="0", gpu="0", pid=PID, verdict=one, severity="info")
            for one in (verdict, other) if one is not None]  # fmt: skip
    given_to = {"owner_confirmed": owner, "hung_confirmed": hung, "yes": yes}
    try:
        came, _ = tried(
            step,
            verdict,
            means,
            answer=answer,
            actor=actor,
            target={"rows": tuple(rows)},
            **given_to,
        )
    except Unavailable:
        # Nothing is done that cannot be written down.
        assert "intent" in fails and not done and POWER_OF[step] != "undo"
        return
    if not done:
        assert came.state != "done"
        return
    undoing = POWER_OF[step] == "undo"
    assert may(verdict, step, owner, hung)
    assert yes or answer
    assert not refused
    if undoing:
        return
    assert refusal(verdict, power, owner_confirmed=owner, hung_confirmed=hung) == ""
    assert "intent" not in fails
    if step == "evidence":
        return
    assert not {"hold", "hold later", "evidence"} & set(fails)
    assert not untouchable
    assert verdict == "cryptominer" or not {verdict, other} & {"expected", "system"}


@pytest.mark.parametrize("step", [one for one in STEPS if one not in ("evidence", "thaw", "allow")])
def test_without_a_process_nothing_is_done_to_it(step: StepName) -> None:
    came, done = tried(step, "cryptominer", RecordingMeans(), target={"identity": None}, yes=True)
    assert not done and came.state == "refused"


def test_a_changed_process_is_neither_acted_on_nor_kept_as_evidence_first() -> None:
    means = RecordingMeans(fails=["hold"])
    came, done = tried("kill", "cryptominer", means, yes=True)
    assert (came.state, done) == ("changed", [])
    assert "evidence" not in means.calls and means.tried == [came]


def test_one_that_changes_while_somebody_thinks_is_not_acted_on() -> None:
    came, done = tried("freeze", "cryptominer", RecordingMeans(fails=["hold later"]), answer=True)
    assert (came.state, done) == ("changed", [])
    assert came.why == "it has executed a program since"


def test_the_question_names_who_else_is_touched() -> None:
    questions: list[str] = []

    class Hurting(RecordingActor):
        def step(self, target: Any) -> Any:
            step = super().step(target)
            assert step is not None
            return replace(step, hurts=("pid 7 (sshd) stands still with it",))

    def ask(question: str) -> bool:
        questions.append(question)
        return False

    done: list[str] = []
    came = do(
        Hurting("freeze", done),
        "freeze",
        target_of("cryptominer"),
        Confirmations(),
        RecordingMeans(),
        tell=lambda line: None,
        ask=ask,
    )
    assert came.state == "refused" and "--yes" in came.why and not done
    assert "pid 7 (sshd)" in questions[0] and str(IDENTITY.pid) in questions[0]


def test_an_act_that_breaks_off_leaves_more_than_its_intent() -> None:
    class Breaking(RecordingActor):
        def do(self, target: Any, tell: Any) -> Any:
            raise KeyboardInterrupt

    means = RecordingMeans()
    with pytest.raises(KeyboardInterrupt):
        tried("freeze", "cryptominer", means, actor=Breaking("freeze", []), yes=True)
    assert [one.state for one in means.tried] == ["failed"]
    assert "KeyboardInterrupt" in means.tried[0].why


def test_every_step_has_its_actor_in_the_order_of_a_plan() -> None:
    assert tuple(name for name, _ in ACTORS) == STEPS


def test_every_actor_says_of_a_step_what_the_table_needs(tmp_path: Path) -> None:
    """On this machine, of a process that there is not: what applies here has its own power."""
    nobody = replace(IDENTITY, pid=(1 << 22) - 1)
    target = target_of("cryptominer", identity=nobody)
    settings_here = Settings(host=Host(), state_directory=str(tmp_path))
    for name, actor in actors(settings_here, lambda one: one.rows):
        try:
            step = actor.step(target)
        except GpuwardenError:
            continue
        assert step is None or (step.name, step.power) == (name, NEEDS[name])
