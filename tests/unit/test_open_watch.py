"""Device opens on their way to findings: who is held, who is asked about, what is told and counted.

The examiner is a stand-in that answers when the test says so; the clock is turned by hand.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuwarden.errors import TimedOut, Unavailable
from gpuwarden.finding import PolicyUse, Report, finding_id
from gpuwarden.host import Host
from gpuwarden.model import Container, NodeFacts
from gpuwarden.probes.events import OpenCount, ProcessIdentity
from gpuwarden.watch import open_watch
from gpuwarden.watch.examiner import Examination, Examined, examine
from gpuwarden.watch.judgement import Judged
from gpuwarden.watch.waiting import BATCH
from tests.rules.open_node import digest
from tests.support.nodes import policy_of
from tests.support.open_watching import (
    CLUSTER,
    LATER_NS,
    NODES,
    Watching,
    container,
    occurrences,
    pod,
    surroundings,
    write_process,
)
from tests.support.opening import contained, executed, exited, held, identity, opened, returned

CONTAINER = "container_opens_accelerator"
OUTSIDE = "accelerator_opened_outside_jobs"
TOOL = "gpu_tool_in_container"
S = 10**9


def told_of(*containers: Container, **fields: Any) -> Examined:
    """The runtimes know these, and the kubelet answers."""
    return Examined(
        containers=containers,
        asked_at_ns=LATER_NS,
        sources=CLUSTER,
        sources_at_ns=LATER_NS,
        **fields,
    )


def tells(question: Examination) -> Examined:
    """A runtime that knows the container c1, and sources that gave nothing to it."""
    return told_of(container())


def rules(watching: Watching) -> list[tuple[str, str]]:
    return [(one.rule, one.severity) for one in watching.findings]


def got_it(process: ProcessIdentity, **fields: Any) -> Any:
    return opened(process, state="opened", **fields)


Make = Any


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def watching(**fields: Any) -> Watching:
        return Watching(tmp_path, monkeypatch, **fields)

    return watching


# ------------------------------------------------------------------ known at once


def test_a_known_container_is_judged_at_once_and_nobody_is_asked(make: Make) -> None:
    watching = make()
    watching.know(container())
    watching.feed(got_it(contained()))
    assert rules(watching) == [(CONTAINER, "critical")]
    assert watching.findings[0].verdict == "rogue-container"
    assert watching.examiner.questions == []
    assert (watching.watch.counts.held, watching.watch.counts.judged) == (0, 1)
    assert watching.watch.idle


def test_a_process_on_the_host_is_judged_at_once(make: Make) -> None:
    watching = make()
    watching.feed(got_it(identity()))
    assert rules(watching) == [(OUTSIDE, "warning")]
    assert watching.examiner.questions == []


def test_a_container_that_was_given_the_device_is_no_finding(make: Make) -> None:
    given = pod("c1")
    watching = make(around=surroundings(workloads=(given,)))
    watching.know(container(pod_uid=given.pod_uid, pod_name="c1", pod_namespace="research"))
    watching.feed(got_it(contained()))
    assert watching.findings == []
    watching.feed(got_it(contained(), minor=1, path="/dev/nvidia1"))
    assert rules(watching) == [(CONTAINER, "warning")]


def test_a_finding_names_its_process_as_every_other_part_does(make: Make) -> None:
    watching = make()
    process = identity()
    watching.feed(got_it(process))
    (finding,) = watching.findings
    subject = finding.subject
    assert (subject.pid, subject.start_time_ticks) == (100, process.start_time_ns // 10_000_000)
    assert finding.id == finding_id(finding.rule, subject)
    assert watching.watch.book.keys_of(100, process.start_time_ns)


# ------------------------------------------------------------------ not known yet


def test_a_container_that_nobody_knows_is_asked_about_and_judged_when_told(make: Make) -> None:
    watching = make(answer=tells)
    watching.feed(got_it(contained()))
    assert watching.findings == []
    assert watching.watch.pending == 1
    assert watching.examiner.questions == [[200]]
    watching.turn(0.01)
    assert rules(watching) == [(CONTAINER, "critical")]
    assert any("docker:c1" in one.text for one in watching.findings[0].evidence)
    assert watching.watch.pending == 0
    assert watching.watch.counts.unknown == 0


def test_a_container_that_nobody_tells_of_is_unknown_after_two_seconds_never_host(
    make: Make,
) -> None:
    watching = make(events=True)
    watching.feed(got_it(contained()))
    watching.wait(1.9)
    assert watching.findings == []
    assert watching.told == []
    assert watching.watch.pending == 1
    assert len(watching.examiner.questions) > 3  # it goes on asking
    watching.wait(0.2)
    assert rules(watching) == [(CONTAINER, "error")]
    assert OUTSIDE not in {one.rule for one in watching.findings}
    (told,) = watching.told
    assert told[0].container_state == "unknown"
    assert watching.watch.counts.unknown == 1


def test_a_container_that_its_group_alone_names_is_not_known(make: Make) -> None:
    watching = make()
    watching.know(container(confirmed=False))
    watching.feed(got_it(contained()))
    assert watching.findings == []
    assert watching.examiner.questions == [[200]]


@pytest.mark.parametrize(("seen_at_ns", "known"), [(LATER_NS, True), (1, False)])
def test_a_container_without_a_group_of_its_own_is_known_by_its_mounts(
    make: Make, seen_at_ns: int, known: bool
) -> None:
    """Bare runc; a number of a namespace that was seen before the process began is another's."""
    watching = make()
    watching.know(container(), at_ns=seen_at_ns)
    watching.feed(got_it(contained(cgroup_path="/init.scope")))
    assert (watching.watch.pending == 0) is known
    assert [one.rule for one in watching.findings] == ([CONTAINER] if known else [])


def test_the_examiner_that_says_nothing_at_all_changes_nothing_of_that(make: Make) -> None:
    watching = make()
    watching.examiner.slow = True
    watching.feed(got_it(contained()))
    watching.wait(2.1)
    assert rules(watching) == [(CONTAINER, "error")]
    assert watching.examiner.questions == [[200]]


def test_an_answer_that_comes_late_still_puts_it_right(make: Make) -> None:
    watching = make(answer=tells)
    watching.examiner.slow = True
    watching.feed(got_it(contained()))
    watching.wait(3)
    assert rules(watching) == [(CONTAINER, "error")]
    watching.examiner.slow = False
    watching.wait(0.1)
    assert rules(watching)[-1] == (CONTAINER, "critical")
    assert watching.findings[0].id == watching.findings[-1].id
    assert sum(one.occurrences for one in watching.findings) == 1


def test_an_answer_that_comes_late_can_acquit(make: Make) -> None:
    given = pod("c1")
    known = container(pod_uid=given.pod_uid, pod_name="c1", pod_namespace="research")

    def answer(question: Examination) -> Examined:
        return Examined(
            containers=(known,), sources=CLUSTER, workloads=(given,), sources_at_ns=LATER_NS
        )

    watching = make(answer=answer)
    watching.examiner.slow = True
    watching.feed(got_it(contained()))
    watching.wait(3)
    assert len(watching.watch.current(watching.clock.time_ns())) == 1
    watching.examiner.slow = False
    watching.wait(0.1)
    assert watching.watch.current(watching.clock.time_ns()) == []


def test_one_that_nobody_told_of_is_asked_about_again_ever_more_seldom(make: Make) -> None:
    watching = make()
    watching.feed(got_it(contained()))
    watching.wait(2.1)
    before = len(watching.examiner.questions)
    watching.wait(60)
    asked = len(watching.examiner.questions) - before
    assert 2 <= asked <= 10
    assert sum(one.occurrences for one in watching.findings) == 1


def test_a_judgement_of_the_node_that_saw_the_container_ends_the_waiting(make: Make) -> None:
    watching = make()
    watching.examiner.slow = True
    watching.feed(got_it(contained()))
    report = Report(
        tool_version="0",
        taken_at_ns=1,
        node=NodeFacts(hostname="node1"),
        policy=PolicyUse(),
        sensors=(),
        sources=CLUSTER,
        rules=(),
        gaps=(),
        gpus=watching.around.gpus,
        rows=(),
        findings=(),
    )
    judged = Judged(
        report=report, containers=(container(),), device_nodes=NODES, asked_at_ns=LATER_NS + 1
    )
    watching.wait(2.1)
    watching.watch.judged(judged)
    watching.turn()
    assert rules(watching)[-1] == (CONTAINER, "critical")
    assert watching.around.sources_at_ns == LATER_NS + 1
    watching.watch.judged(replace(judged, asked_at_ns=5))
    assert watching.around.sources_at_ns == LATER_NS + 1  # what is newer stays


def test_many_unknown_ones_are_asked_about_together_and_all_are_told(make: Make) -> None:
    watching = make()
    processes = [contained(1000 + n, f"c{n}") for n in range(BATCH * 2 + 5)]
    watching.feed(*(got_it(one) for one in processes))
    watching.wait(2.2)
    assert all(len(one) <= BATCH for one in watching.examiner.questions)
    assert len(watching.examiner.questions) < len(processes)
    assert {pid for one in watching.examiner.questions for pid in one} == {
        one.pid for one in processes
    }
    assert all([f.rule for f in watching.of(one)] == [CONTAINER] for one in processes)


def test_those_that_wait_hold_nobody_up(make: Make) -> None:
    watching = make()
    watching.know(container("c2"))
    watching.examiner.slow = True
    watching.feed(got_it(contained()), got_it(contained(201, "c2")), got_it(identity()))
    assert {one.subject.pid for one in watching.findings} == {201, 100}


def test_no_accusation_on_sources_older_than_the_process(make: Make) -> None:
    def answer(question: Examination) -> Examined:
        return Examined(sources=CLUSTER, workloads=(pod("c1"),), sources_at_ns=LATER_NS)

    watching = make(around=surroundings(sources_at_ns=1), answer=answer)
    given = pod("c1")
    watching.know(container(pod_uid=given.pod_uid, pod_name="c1", pod_namespace="research"))
    watching.feed(got_it(contained()))
    assert watching.findings == []
    assert watching.examiner.questions == [[200]]
    watching.wait(3)
    assert watching.findings == []
    assert watching.watch.counts.held == 1
    assert watching.watch.idle


def test_where_the_sources_stay_silent_it_is_accused_after_two_seconds(make: Make) -> None:
    watching = make(around=surroundings(sources_at_ns=1))
    watching.examiner.slow = True
    watching.feed(got_it(identity()))
    watching.wait(1.9)
    assert watching.findings == []
    watching.wait(0.2)
    assert rules(watching) == [(OUTSIDE, "warning")]


@pytest.mark.parametrize("error", [Unavailable("it died"), TimedOut("12 s")])
def test_a_worker_that_fails_is_counted_and_asked_again(make: Make, error: Any) -> None:
    answers: list[Any] = [error, error, tells(Examination(processes=()))]
    watching = make(answer=lambda question: answers.pop(0))
    watching.feed(got_it(contained()))
    watching.wait(1.5)
    assert watching.watch.counts.ask_failures == 2
    assert rules(watching) == [(CONTAINER, "critical")]


@pytest.mark.parametrize("refuses", [True, Unavailable("no process for the examiner")])
def test_a_worker_that_takes_no_question_loses_nothing(make: Make, refuses: Any) -> None:
    watching = make(answer=tells)
    watching.examiner.refuses = refuses
    watching.feed(got_it(contained()))
    watching.wait(0.5)
    assert watching.watch.pending == 1
    watching.examiner.refuses = False
    watching.wait(0.5)
    assert rules(watching) == [(CONTAINER, "critical")]


def test_with_nothing_to_say_it_asks_for_no_turn(make: Make) -> None:
    watching = make()
    assert watching.watch.seconds_to_wait() is None
    watching.watch.events([got_it(contained())])
    assert watching.watch.seconds_to_wait() == 0.0
    watching.turn()
    begun, turns = watching.clock.now, 0
    while (wait := watching.watch.seconds_to_wait()) is not None and not watching.findings:
        assert wait <= 2.0
        watching.turn(wait)
        turns += 1
    assert rules(watching) == [(CONTAINER, "error")]
    assert watching.clock.now - begun <= 2.1
    assert turns < 40  # it does not spin


def test_a_real_examiner_on_a_machine_without_runtimes(make: Make, tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    watching = make(answer=lambda question: examine(host, question))
    watching.feed(got_it(contained()))
    watching.wait(2.1)
    assert [one.rule for one in watching.findings] == [CONTAINER]
    assert watching.around.sources_at_ns > 0
    assert {one.name for one in watching.around.sources} >= {"kubernetes", "slurm"}


# ------------------------------------------------------------------ many opens, few findings


def test_a_flood_of_one_process_is_one_judgement_and_one_finding(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained()
    for _ in range(10):
        watching.feed(*(got_it(process) for _ in range(1000)))
    assert watching.watch.counts.judged == 1
    assert [one.occurrences for one in watching.findings] == [1000]
    watching.watch.tick(watching.clock.time_ns())
    assert [one.occurrences for one in watching.watch.current(watching.clock.time_ns())] == [9000]
    assert [one.occurrences for one in watching.watch.current(watching.clock.time_ns())] == [0]


def test_what_the_kernel_counted_beyond_its_events_is_told(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained()
    watching.feed(got_it(process, hits=1))
    count = OpenCount(
        pid=200, start_time_ns=process.start_time_ns, major=195, minor=0, how="open", hits=1_000_000
    )
    watching.watch.counted([count])
    watching.watch.tick(watching.clock.time_ns())
    (finding,) = watching.watch.current(watching.clock.time_ns())
    assert finding.occurrences == 999_999


def test_an_attempt_that_is_then_held_becomes_critical_by_the_same_id(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained()
    watching.feed(opened(process))
    watching.watch.held([held(process)], 2)
    watching.turn()
    assert rules(watching) == [(CONTAINER, "warning"), (CONTAINER, "critical")]
    assert len({one.id for one in watching.findings}) == 1
    assert [one.occurrences for one in watching.findings] == [1, 0]


def test_a_return_value_settles_it(make: Make) -> None:
    watching = make(return_values=True)
    watching.know(container())
    event = opened(contained())
    watching.feed(event, returned(event, -1))
    assert rules(watching) == [(CONTAINER, "warning")]
    assert any("was denied (EPERM)" in one.text for one in watching.findings[0].evidence)
    event = opened(contained())
    watching.feed(event, returned(event, 5))
    assert rules(watching)[-1] == (CONTAINER, "critical")


def test_a_holder_that_never_opened_is_told_unless_it_held_before(
    make: Make, tmp_path: Path
) -> None:
    watching = make()
    watching.know(container())
    for process in (contained(), contained(201)):
        write_process(tmp_path, process)
    watching.watch.held([held(contained())], 2)
    watching.turn()
    assert CONTAINER in {one.rule for one in watching.findings}
    assert all(one.severity == "critical" for one in watching.findings if one.rule == CONTAINER)
    before = len(watching.findings)
    watching.watch.held([held(contained()), held(contained(201))], 3, after_loss=True)
    watching.turn()
    assert len(watching.findings) == before


def test_a_full_queue_is_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_watch, "QUEUE_LIMIT", 3)
    watching = make()
    watching.watch.events([got_it(identity(100 + n)) for n in range(5)])
    assert watching.watch.counts.queue_full == 2
    watching.turn()
    assert len({one.subject.pid for one in watching.findings}) == 3


def test_work_stops_at_its_budget_and_goes_on_the_next_time(make: Make) -> None:
    watching = make()
    watching.watch.events([got_it(identity(100 + n)) for n in range(5)])
    for done in range(1, 6):
        watching.watch.work(0.0)
        assert watching.watch.counts.judged == done
    assert len(watching.rounds) == 5
    assert watching.watch.idle


# ------------------------------------------------------------------ programs


def test_a_tool_that_runs_in_a_container_is_told_once_with_its_runs(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained(argv=("nvidia-smi",), exe_path="/usr/bin/nvidia-smi")
    watching.feed(executed(process, "nvidia-smi", touched=False))
    watching.feed(executed(process, "nvidia-smi", touched=False))
    assert [one.rule for one in watching.findings] == [TOOL, TOOL]
    assert list(occurrences(watching.findings).values()) == [2]
    assert watching.watch.counts.tools == 2


def test_a_tool_on_the_host_is_nobodys_business(make: Make) -> None:
    watching = make()
    watching.feed(executed(identity(), "nvidia-smi", touched=False))
    assert watching.findings == []
    assert watching.watch.counts.judged == 1


def test_a_tool_in_an_unknown_container_is_held_and_told(make: Make) -> None:
    watching = make()
    watching.feed(executed(contained(), "nvidia-smi", touched=False))
    assert watching.findings == []
    watching.wait(2.1)
    assert [one.rule for one in watching.findings] == [TOOL]


def test_another_program_in_the_hands_of_which_a_device_is_is_judged_again(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained()
    watching.feed(got_it(process))
    other = contained(exe_path="/tmp/xmrig", exe_inode=99, comm="xmrig", argv=("/tmp/xmrig",))
    watching.feed(executed(other))
    first, second = watching.findings
    assert first.id == second.id
    assert any("/tmp/xmrig" in one.text for one in second.evidence)
    assert not any("/tmp/xmrig" in one.text for one in first.evidence)
    assert second.occurrences == 0


def test_an_exec_of_one_that_opened_nothing_is_not_judged(make: Make) -> None:
    watching = make()
    watching.feed(executed(contained(), touched=False))
    assert (watching.watch.counts.execs, watching.watch.counts.judged) == (1, 0)
    assert watching.watch.idle


# ------------------------------------------------------------------ ends


def test_what_lived_for_a_millisecond_is_judged_with_all_that_is_known(make: Make) -> None:
    watching = make()
    watching.know(container())
    process = contained()
    watching.feed(got_it(process), exited(process, watching.clock.time_ns()))
    (finding,) = watching.findings
    texts = "\n".join(one.text for one in finding.evidence)
    assert "/usr/bin/python3.11" in texts
    assert "python3 serve.py" in texts


def test_one_that_ended_is_forgotten_after_a_while_not_before_it_is_judged(make: Make) -> None:
    watching = make()
    process = contained()
    watching.feed(got_it(process), exited(process, watching.clock.time_ns()))
    key = (process.pid, process.start_time_ns)
    watching.wait(1)
    assert watching.watch.tick(watching.clock.time_ns() + 6 * S) == []  # it is held
    watching.wait(1.2)
    assert len(watching.findings) == 1
    forgotten: list[tuple[int, int]] = []
    for _ in range(20):
        watching.turn(1)
        forgotten += watching.watch.tick(watching.clock.time_ns())
    assert forgotten == [key]
    assert len(watching.watch.forget(*key)) == 1
    assert len(watching.watch.book) == 0


def test_a_pid_that_came_again_is_another_process(make: Make) -> None:
    watching = make()
    watching.know(container())
    first, second = contained(), contained(start_time_ns=99 * S)
    watching.feed(got_it(first))
    watching.feed(got_it(second))
    assert len({one.id for one in watching.findings}) == 2


def test_a_restart_takes_up_what_was_told_and_ends_what_is_gone(make: Make, tmp_path: Path) -> None:
    watching = make()
    watching.know(container())
    watching.feed(got_it(contained()))
    (finding,) = watching.findings
    other = replace(finding, id="another", rule="gpu_cryptominer")
    again = make()
    now = again.clock.time_ns()
    again.watch.resume([finding, other], now)
    assert [one.id for one in again.watch.current(now + S)] == [finding.id]
    # The process is not there any more: what it did is over before long.
    assert again.watch.current(now + 31 * S) == []


def test_an_exception_of_a_new_policy_ends_it(make: Make) -> None:
    watching = make()
    watching.know(container(image_digest=digest("c1")))
    process = contained()
    watching.feed(got_it(process))
    watching.watch.policy = policy_of(
        f"user_known_gpu_workloads:\n- match: {{image_digest: '{digest('c1')}'}}\n"
        "  reason: a broker\n"
    )
    watching.feed(got_it(process, minor=1, path="/dev/nvidia1"))
    assert [one for one in watching.watch.current(1) if one.silenced_by is None] == []


# ------------------------------------------------------------------ event lines


def test_lines_come_in_the_order_of_the_events_when_they_are_settled(make: Make) -> None:
    watching = make(events=True)
    watching.know(container("c2"))
    watching.feed(opened(identity(100)), got_it(contained(201, "c2")))
    assert watching.told == []  # the first is not settled, and they keep their order
    watching.watch.held([held(identity(100))], 2)
    watching.turn()
    assert [(e.pid, e.state) for e, _, _ in watching.told] == [(100, "opened"), (201, "opened")]
    assert [e.container_state for e, _, _ in watching.told] == ["none", "known"]
    assert [e.count for e, _, _ in watching.told] == [1, 1]


def test_each_open_of_a_flood_has_its_line(make: Make) -> None:
    watching = make(events=True)
    process = identity()
    watching.feed(*(got_it(process) for _ in range(500)))
    assert len(watching.told) == 500
    assert all(one[0].count == 1 for one in watching.told)
    assert len({one[2] for one in watching.told}) == 500


def test_a_line_that_is_not_settled_waits_no_longer_than_two_seconds(make: Make) -> None:
    watching = make(events=True)
    watching.feed(opened(identity()))
    watching.wait(1.9)
    assert watching.told == []
    watching.wait(0.2)
    assert [one[0].state for one in watching.told] == ["attempted"]


# ------------------------------------------------------------------ counts add up

ROGUE, HELD, LATE, HOST = (
    contained(300, "c1"), contained(301, "nobody-knows"), contained(302, "late"), identity(303),
)  # fmt: skip
PROCESSES = (ROGUE, HELD, LATE, HOST)
STEPS = st.one_of(
    st.tuples(
        st.just("open"),
        st.integers(0, 3),
        st.integers(0, 1),
        st.sampled_from(["attempted", "opened", "denied"]),
        st.sampled_from(["open", "mknod", "access"]),
        st.integers(1, 5),
    ),
    st.tuples(st.just("turn"), st.sampled_from([0.0, 0.1, 0.7, 2.5])),
    st.tuples(st.just("tick")),
    st.tuples(st.just("current")),
    st.tuples(st.just("hold"), st.integers(0, 3)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("slow"), st.booleans()),
    st.tuples(st.just("exec"), st.integers(0, 3)),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(STEPS, min_size=12, max_size=40))
def test_the_occurrences_that_are_told_add_up_to_the_opens_there_were(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        watching = Watching(
            Path(folder),
            patch,
            answer=lambda question: told_of(container("late")),
        )
        watching.know(container())
        clock, watch = watching.clock, watching.watch
        opens = dict.fromkeys((one.pid for one in PROCESSES), 0)
        for kind, *values in steps:
            if kind == "open":
                who, minor, state, how, times = values
                process = PROCESSES[who]
                watch.events(
                    opened(process, minor=minor, path=f"/dev/nvidia{minor}", state=state, how=how)
                    for _ in range(times)
                )
                opens[process.pid] += times
            elif kind == "turn":
                watching.turn(values[0])
            elif kind == "tick":
                assert watch.tick(clock.time_ns()) == []
            elif kind == "current":
                watching.rounds.append(watch.current(clock.time_ns()))
            elif kind == "hold":
                process = PROCESSES[values[0]]
                if opens[process.pid]:
                    watch.held([held(process)], clock.time_ns())
            elif kind == "expire":
                watch.expired(10**18)
            elif kind == "exec":
                process = PROCESSES[values[0]]
                watch.events([executed(replace(process, exe_inode=1234, comm="other"))])
            else:
                watching.examiner.slow = values[0]
        watching.examiner.slow = False
        watching.wait(3)
        watch.tick(clock.time_ns())
        watching.rounds.append(watch.current(clock.time_ns()))
        for process, rule in zip(
            PROCESSES, (CONTAINER, CONTAINER, CONTAINER, OUTSIDE), strict=True
        ):
            mine = [one for one in watching.of(process) if one.rule == rule]
            if rule == CONTAINER and opens[process.pid]:
                held_anew = max(sum(one.occurrences for one in mine) - opens[process.pid], 0)
                # A device found in its hands that it had only asked about is one use more.
                assert held_anew <= 1
                assert sum(one.occurrences for one in mine) - held_anew == opens[process.pid]
            assert len({one.id for one in mine}) <= 1
        assert watching.watch.counts.opens == sum(opens.values())
