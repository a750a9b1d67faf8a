"""The daemon tells the journal's head to its sinks, and what is done to the file, also later."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.journal.book import Journal, head_of
from gpuwarden.journal.entry import parse_head
from gpuwarden.journal.verification import verify
from tests.support.journals import rewrite
from tests.support.watching import Watching, watching

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]
ROUNDS = ("--interval", "0.2")


def statuses(agent: Watching, rule: str) -> list[str]:
    return [one["status"] for one in agent.findings(rule)]


def test_a_head_that_a_sink_has_shows_what_was_cut_off_later(tmp_path: Path) -> None:
    with watching(tmp_path, *ROUNDS) as agent:
        path = agent.state / "journal"
        journal = Journal(str(path))
        journal.conclude(journal.intend("freeze", {"pid": 4711}), "frozen")
        journal.append("refused", {"pid": 4712}, "the verdict does not allow it")
        agent.wait(
            lambda: str(head_of(str(path))) in str(agent.findings("journal_written")), "the head"
        )
        (told,) = [
            word
            for one in agent.findings("journal_written")[-1]["evidence"]
            for word in [one["text"].removeprefix("head ")]
            if word[:2] == "3:"
        ]
        head = parse_head(told)
        assert verify(str(path), head=head).is_sound
        rewrite(path, path.read_bytes().splitlines()[:2])
        agent.wait(lambda: statuses(agent, "journal_broken") == ["opened"], "the alarm")
        assert agent.stop() == 0, agent.errors
    (problem,) = verify(str(path), head=head).problems
    assert (problem.kind, problem.number) == ("cut", 3)
    journal.append("refused", {}, "as many entries as before")
    with watching(tmp_path, *ROUNDS) as agent:
        agent.wait(
            lambda: str(head_of(str(path))) in str(agent.findings("journal_written")), "the next"
        )
        assert agent.stop() == 0, agent.errors
        assert statuses(agent, "journal_broken")[0] == "opened"
        assert "resolved" not in statuses(agent, "journal_broken")
