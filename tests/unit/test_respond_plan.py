"""Plans as a person reads them: a miner, another team's work, and what each of them may hold."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from gpuwarden.finding import VERDICTS, Verdict
from gpuwarden.model import PersistenceEntry
from gpuwarden.outputs.sheet import cells
from gpuwarden.outputs.words import json_text
from gpuwarden.policy import Policy
from gpuwarden.respond import plan_text
from gpuwarden.respond.doing import Confirmations
from gpuwarden.respond.order import STEPS
from gpuwarden.respond.plan import MEANINGS, Plan, make_plan
from gpuwarden.respond.step import Actor
from gpuwarden.respond.step_names import StepName
from gpuwarden.respond.target import Found
from tests.conftest import Golden
from tests.support.nodes import NodeBuilder, executable, policy_of
from tests.support.responding import RecordingActor, RecordingMeans, found_in

MINER, OTHER = 4242, 500
ESCAPES = "\x1b[31m\u202e\x07"


def plan_of(found: Found, pid: int, *, owner_confirmed: bool = False) -> Plan:
    names: tuple[StepName, ...] = ("evidence", "freeze", "deny", "kill", "drain-node")
    actors: list[tuple[StepName, Actor]] = [(name, RecordingActor(name, [])) for name in names]
    given = Confirmations(owner_confirmed=owner_confirmed)
    return make_plan(found, str(pid), actors, given, RecordingMeans(), flags=(), within_seconds=30)


def fits(text: str, width: int) -> bool:
    """Commands alone are not wrapped."""
    whole = ("$ gpuwarden", "undo: ")
    lines = [line for line in text.splitlines() if not line.strip().startswith(whole)]
    return all(cells(line) <= width for line in lines)


def miner(name: str = "/tmp/.X11/kworker") -> NodeBuilder:
    node = NodeBuilder()
    node.gpu(0)
    node.process(900, user="alice", exe="/usr/bin/bash", argv=("bash",), ppid=1)
    node.process(
        MINER,
        user="alice",
        exe=executable(name, deleted=True),
        argv=(
            "python3",
            "-o",
            "stratum+tcp://pool.example.net:3333",
            "-u",
            "x.rig",
            "-a",
            "kawpow",
        ),
        ppid=900,
    )
    node.client(MINER, sm_percent=99, memory_mib=4096)
    node.connection(MINER, "192.0.2.7", 3333)
    node.process(77, user="bob", argv=("python3", "train.py"))
    node.client(77, sm_percent=1)
    entry = PersistenceEntry(
        kind="cron",
        path="/var/spool/cron/crontabs/alice",
        line=3,
        commands=(f"{name} -B",),
        text=f"*/5 * * * * {name} -B",
        user="alice",
    )
    node.persistence.append(entry)
    return node


def other_team() -> tuple[NodeBuilder, Policy]:
    node = NodeBuilder()
    node.gpu(0)
    node.process(OTHER, user="bob", argv=("python3", "train.py"))
    node.client(OTHER, sm_percent=80)
    return node, policy_of("")


@pytest.mark.parametrize("width", [80, 140])
def test_the_plan_for_a_miner(golden: Golden, width: int) -> None:
    found = found_in(miner(), MINER)
    assert found.target.verdict == "cryptominer"
    plan = plan_of(found, MINER)
    text = plan_text.render(plan, width=width, colour=False)
    golden.check(f"respond/miner-{width}.txt", text)
    assert fits(text, width)


@pytest.mark.parametrize("width", [80, 140])
def test_the_plan_for_another_teams_work(golden: Golden, width: int) -> None:
    node, policy = other_team()
    found = found_in(node, OTHER, policy)
    assert found.target.verdict == "other-team"
    text = plan_text.render(plan_of(found, OTHER), width=width, colour=False)
    golden.check(f"respond/other-team-{width}.txt", text)
    assert "kill" in text and "--do kill" not in text
    assert "never stopped from here" in text


def test_the_plan_as_json(golden: Golden) -> None:
    plan = replace(plan_of(found_in(miner(), MINER), MINER), tool_version="test")
    text = json_text(plan)
    assert msgspec.json.decode(text, type=Plan) == plan
    golden.check("respond/miner.json", text)


def test_the_owner_who_was_asked_opens_the_kill() -> None:
    node = NodeBuilder()
    node.gpu(0)
    node.process(MINER, exe=executable("/tmp/.cache/x", deleted=True), argv=("x",))
    node.client(MINER, sm_percent=5)
    found = found_in(node, MINER)
    assert found.target.verdict == "suspicious"
    kill = {one.step.name: one for one in plan_of(found, MINER).steps}["kill"]
    assert "owner" in kill.step.refused and not kill.command
    kill = {one.step.name: one for one in plan_of(found, MINER, owner_confirmed=True).steps}["kill"]
    assert kill.step.refused == ""
    assert kill.command == f"gpuwarden respond {MINER} --do kill --owner-confirmed"


def test_nothing_that_a_process_says_acts_on_the_terminal() -> None:
    found = found_in(miner(f"/tmp/{ESCAPES}/kworker"), MINER)
    for width in (80, 140):
        text = plan_text.render(plan_of(found, MINER), width=width, colour=False)
        assert not set(text) & set(ESCAPES.replace("[31m", ""))
        assert fits(text, width)


def test_an_unseen_autostart_is_not_called_none() -> None:
    node = miner()
    node.sensor("persistence", "failed")
    text = plan_text.render(plan_of(found_in(node, MINER), MINER), width=140, colour=False)
    assert "could not be looked at" in text


def test_every_verdict_has_its_meaning() -> None:
    assert set(MEANINGS) == set(VERDICTS)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_step_is_offered_only_where_the_table_gives_it(verdict: Verdict) -> None:
    found = found_in(miner(), MINER)
    row = replace(found.target.rows[0], verdict=verdict)
    found = replace(found, target=replace(found.target, verdict=verdict, rows=(row,)))
    offered = {one.step.name for one in plan_of(found, MINER).steps if one.command}
    if verdict == "cryptominer":
        assert offered == {"evidence", "freeze", "deny", "kill", "drain-node"}
    elif verdict in ("rogue-container", "suspicious"):
        assert offered == {"evidence", "freeze", "deny", "drain-node"}
    elif verdict == "orphaned-job":
        assert offered == {"evidence", "kill"}
    else:
        assert offered == {"evidence"}
    assert offered <= set(STEPS)
