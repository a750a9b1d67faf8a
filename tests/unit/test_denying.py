"""Denials while watching: who is asked for, who is denied, until when, and what is told of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.enforcement import GROUPS_LIMIT, Located
from gpuwarden.errors import Denied, TimedOut, Unavailable, UsageError
from gpuwarden.finding import Finding
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.policy import EnforceRule, Match, Policy
from gpuwarden.probes import cgroup2, pinning
from gpuwarden.probes.cgroup2 import GroupKey
from gpuwarden.probes.events import GroupEvent
from gpuwarden.probes.pinning import Pinned, PinnedDenial
from gpuwarden.sensors.process import stat_lines
from gpuwarden.watch import denying, doorman, group_ids
from gpuwarden.watch.denial_findings import DENYING_RULES
from gpuwarden.watch.denying import RETRY_SECONDS, Denying
from tests.support.containers import cgroup_mounts
from tests.support.packages import require_root

POD_UID = "0f6e8a0a-0000-4000-8000-000000000000"


def name(number: int) -> str:
    return f"{number:064x}"


def group(number: int) -> GroupKey:
    return GroupKey(0, 1000 + number)


def policy(*images: str) -> Policy:
    return Policy(
        enforce=[EnforceRule(match=Match(image=one), reason="none for it") for one in images]
    )


class Kernel:
    """What the probe was told, and which groups there are."""

    def __init__(self) -> None:
        self.denied: dict[GroupKey, bool] = {}
        self.alive: set[GroupKey] = set()
        self.pins: list[set[GroupKey]] = []
        """What was denied at each pin."""
        self.trouble: Exception | None = None

    def deny_group(self, key: GroupKey, *, dry_run: bool = False) -> None:
        self.denied[key] = dry_run

    def allow(self, key: GroupKey) -> None:
        self.denied.pop(key, None)

    def pin(self) -> tuple[str, ...]:
        if self.trouble is not None:
            raise self.trouble
        self.pins.append(set(self.denied))
        return ()

    def existing(self, groups: Any) -> set[GroupKey]:
        return set(groups) & self.alive


class Runtime:
    """Answers as the doorman's child does, with what it knows by then."""

    def __init__(self) -> None:
        self.knows: dict[str, Container] = {}
        self.asked: list[str] = []
        self.trouble: Exception | None = None
        self._body: bytes | None = None

    @property
    def busy(self) -> bool:
        return self._body is not None

    def request(self, body: bytes) -> bool:
        assert not self.busy
        self._body = body
        return True

    def take(self) -> bytes | None:
        body, self._body = self._body, None
        if body is None:
            return None
        if self.trouble is not None:
            raise self.trouble
        ids = [
            one.container_id for one in msgspec.msgpack.decode(body, type=doorman.LookUps).wanted
        ]
        self.asked += ids
        found = tuple(self.knows[one] for one in ids if one in self.knows)
        return msgspec.msgpack.encode(doorman.Found(containers=found))


class Machine:
    """Denying with a kernel, a runtime and processes that a test decides on."""

    def __init__(self, *, dry_run: bool = False, named: tuple[str, ...] = ("bad",)) -> None:
        self.kernel, self.runtime = Kernel(), Runtime()
        self.lines: list[str] = []
        self.running: dict[int, Located] = {}
        self.older: Pinned | Exception | None = None
        self.asked: set[GroupKey] = set()
        self.denying = Denying(
            Host(),
            policy(*named),
            self.kernel,  # type: ignore[arg-type]
            self.runtime,  # type: ignore[arg-type]
            dry_run=dry_run,
            tell=self.lines.append,
            asked=self.asked.__contains__,
        )

    def make(self, number: int, *groups: GroupKey) -> None:
        """Control groups of a container are made."""
        for key in groups or (group(number),):
            self.kernel.alive.add(key)
            path = f"/kubepods/pod{POD_UID}/{name(number)}"
            event = GroupEvent(at_ns=1, cgroup_id=key.id, hierarchy=0, path=path)
            self.denying.events([event])

    def runs(self, number: int, *groups: GroupKey) -> None:
        """A container that runs already."""
        keys = groups or (group(number),)
        self.kernel.alive |= set(keys)
        self.running[number] = Located(name(number), None, None, None, keys)

    def know(self, number: int, image: str = "bad", *, confirmed: bool = True) -> Container:
        container = Container(
            id=name(number), runtime="podman", name=f"c{number}", image=image, confirmed=confirmed
        )
        self.runtime.knows[container.id] = container
        return container

    def turn(self, times: int = 1) -> None:
        """As the agent does it."""
        for _ in range(times):
            self.denying.ask()
            self.denying.answered()
            self.denying.look()

    def older_denies(self, *groups: GroupKey, unread: str = "") -> None:
        self.kernel.alive |= set(groups)
        denials = tuple(PinnedDenial(one) for one in groups)
        self.older = Pinned(pinning.DIRECTORY, ("link_x", "map_y"), denials, unread)

    def findings(self, at_ns: int | None = None) -> dict[str, Finding]:
        found = self.denying.findings(time.time_ns() if at_ns is None else at_ns)
        assert {one.rule for one in found} <= DENYING_RULES
        assert len({one.id for one in found}) == len(found)
        return {one.subject.name: one for one in found}


Make = Callable[..., Machine]


@contextmanager
def machines(*, every_look: bool = True) -> Iterator[Make]:
    """Machines in which nothing has to be waited for."""
    made: list[Machine] = []

    def pinned() -> Pinned | None:
        older = made[-1].older
        if isinstance(older, Exception):
            raise older
        return older

    def existing(keys: Any) -> set[GroupKey]:
        return made[-1].kernel.existing(keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(denying, "RETRY_SECONDS", (0.0,) * len(RETRY_SECONDS))
        patch.setattr(denying, "LOOK_SECONDS", 0.0 if every_look else 1e9)
        patch.setattr(denying, "AGAIN_SECONDS", 0.0 if every_look else 1e9)
        patch.setattr(stat_lines, "read", lambda host: dict(made[-1].running))
        patch.setattr(denying, "located_by_process", lambda host, pid: [made[-1].running[pid]])
        patch.setattr(group_ids, "existing", existing)
        patch.setattr(pinning, "pinned", pinned)

        def make(**options: Any) -> Machine:
            made.append(Machine(**options))
            return made[-1]

        yield make


@pytest.fixture
def make() -> Iterator[Make]:
    with machines() as made:
        yield made


@pytest.fixture
def make_slow() -> Iterator[Make]:
    """Nothing is looked at between events: half a minute has not passed."""
    with machines(every_look=False) as made:
        yield made


# ---------------------------------------------------------------- who is denied


def test_a_container_is_denied_once_its_runtime_answers(make_slow: Make) -> None:
    m = make_slow()
    m.make(1)
    m.make(2)
    m.turn(2)
    assert m.kernel.denied == {} and m.lines == []
    m.know(1)
    m.know(2, "good")
    m.turn(2)
    assert m.kernel.denied == {group(1): False}
    (line,) = m.lines
    assert line.startswith("denied: container c1 (") and "none for it" in line
    m.turn(20)
    assert len(m.lines) == 1
    (found,) = m.findings().values()
    assert (found.severity, found.subject.name) == ("info", f"container {name(1)}")
    assert line in found.evidence[0].text


def test_a_dry_run_says_would(make: Make) -> None:
    m = make(dry_run=True)
    m.make(1)
    m.know(1)
    m.turn()
    assert m.kernel.denied == {group(1): True}
    (found,) = m.findings().values()
    assert found.severity == "info" and found.evidence[0].text.startswith("would deny")
    assert m.lines[0].startswith("would deny")


def test_what_a_users_own_runtime_says_is_shown_and_not_acted_on(make_slow: Make) -> None:
    m = make_slow()
    m.make(1)
    m.know(1, confirmed=False)
    m.turn(2)
    assert m.findings() == {}  # a better one may still answer
    m.turn(20)
    assert m.kernel.denied == {}
    (found,) = m.findings().values()
    assert found.severity == "warning" and "only claimed" in found.evidence[0].text
    m.denying.known([m.know(1)])
    assert m.kernel.denied == {group(1): False}
    assert m.findings()[f"container {name(1)}"].severity == "info"


def test_a_denial_that_fails_is_a_warning(make: Make) -> None:
    m = make()

    def full(key: GroupKey, *, dry_run: bool = False) -> None:
        raise Unavailable("no room in the kernel's table")

    m.kernel.deny_group = full  # type: ignore[method-assign]
    m.make(1)
    m.know(1)
    m.turn()
    (found,) = m.findings().values()
    assert found.severity == "warning" and "no room" in found.evidence[0].text


def test_a_runtime_that_comes_late_is_asked_again(make: Make) -> None:
    m = make()
    m.runtime.trouble = TimedOut("it hangs")
    m.make(1)
    m.turn(30)
    assert m.kernel.denied == {}
    m.runtime.trouble = None
    m.know(1)
    m.turn(3)
    assert m.kernel.denied == {group(1): False}


def test_another_policy_lifts_and_imposes(make: Make) -> None:
    m = make()
    for number, image in ((1, "bad"), (2, "worse")):
        m.make(number)
        m.know(number, image)
    m.turn()
    m.denying.reload(policy("worse"))
    assert set(m.kernel.denied) == {group(2)}
    assert f"no longer named by the policy: container {name(1)[:12]}" in m.lines
    assert set(m.findings()) == {f"container {name(2)}"}
    m.denying.reload(policy("bad", "worse"))
    assert set(m.kernel.denied) == {group(1), group(2)}


# ---------------------------------------------------------------- who has ended


def test_a_container_that_has_ended_is_forgotten(make: Make) -> None:
    m = make()
    m.make(1)
    m.know(1)
    m.turn()
    m.kernel.alive.clear()
    m.turn()
    assert m.kernel.denied == {} and m.findings() == {}
    assert m.denying.decisions() == ()


def test_groups_that_restarts_leave_behind_make_room(make: Make) -> None:
    m = make()
    m.know(1)
    for number in range(3 * GROUPS_LIMIT):
        m.make(1, group(number))
        m.turn()
        assert set(m.kernel.denied) == {group(number)}
        m.kernel.alive.discard(group(number))
    (decision,) = m.denying.decisions()
    assert decision.state == "denied"


def test_more_groups_at_once_than_are_denied_is_told(make: Make) -> None:
    m = make()
    m.know(1)
    m.make(1, *map(group, range(GROUPS_LIMIT + 5)))
    m.turn()
    (decision,) = m.denying.decisions()
    assert decision.state == "failed" and len(m.kernel.denied) == GROUPS_LIMIT


# ---------------------------------------------------------------- a crowd


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(denying, "CONTAINERS_LIMIT", 5)
    return 5


def test_a_crowd_pushes_out_no_container_that_waits(make_slow: Make, few: int) -> None:
    m = make_slow()
    m.make(1)
    for number in range(2, 100):
        m.make(number)
    m.know(1)
    m.know(99)
    m.turn(2)
    assert set(m.kernel.denied) == {group(1)}
    assert m.denying.turned_away == 99 - few
    found = m.findings()["containers not asked for"]
    assert found.severity == "warning" and "94 turned away" in found.evidence[0].text
    assert len([line for line in m.lines if "not asked for" in line]) == 1
    an_hour = 3601 * 10**9
    assert "containers not asked for" not in m.findings(at_ns=an_hour + 2 * 10**18)


def test_whom_no_runtime_knows_makes_room_and_the_denied_do_not(make_slow: Make, few: int) -> None:
    m = make_slow()
    m.make(1)
    m.know(1)
    m.turn()
    for number in range(2, 50):
        m.make(number)
        m.turn(len(RETRY_SECONDS) + 2)  # until nobody is asked any longer
    assert m.denying.turned_away == 0
    m.know(50)
    m.make(50)
    m.turn()
    assert set(m.kernel.denied) == {group(1), group(50)}


# ---------------------------------------------------------------- pins


def test_an_older_pins_denials_are_ours_before_it_is_replaced(make_slow: Make) -> None:
    m = make_slow()
    m.older_denies(group(1), group(2), group(3))
    m.runs(1)
    m.runs(2)
    m.denying.begin(pin=True)
    assert m.kernel.pins == [{group(1), group(2), group(3)}]
    m.know(1)
    m.know(2, "good")
    m.turn(2)
    # Named: it stays. Not named: it ends. Nobody knows whose it is: it stays, and is told.
    assert set(m.kernel.denied) == {group(1), group(3)}
    m.turn(20)
    found = m.findings()
    assert found["denials of an earlier run"].severity == "warning"
    assert f"group 0:{group(3).id}" in found["denials of an earlier run"].evidence[0].text
    assert f"container {name(1)}" in found


def test_what_somebody_asked_for_is_not_lifted_by_the_policy(make_slow: Make) -> None:
    m = make_slow()
    m.asked.update((group(1), group(2)))
    m.older_denies(group(1), group(2), group(3))
    for number in (1, 2, 3):
        m.runs(number)
    m.denying.begin(pin=True)
    m.know(1, "good")
    m.know(2, "bad")
    m.know(3, "good")
    m.turn(20)
    assert set(m.kernel.denied) == {group(1), group(2)}
    assert "denials of an earlier run" not in m.findings()
    m.denying.reload(policy("good"))
    assert set(m.kernel.denied) == {group(1), group(2), group(3)}
    m.denying.reload(policy("other"))
    assert set(m.kernel.denied) == {group(1), group(2)}


def test_a_dry_run_does_not_weaken_what_somebody_asked_for(make: Make) -> None:
    m = make(dry_run=True)
    m.asked.add(group(1))
    m.kernel.denied[group(1)] = False
    m.make(1)
    m.know(1)
    m.turn(2)
    assert m.kernel.denied == {group(1): False}


def test_what_is_left_of_an_older_pin_ends_with_its_group(make: Make) -> None:
    m = make()
    m.older_denies(group(1), group(2))
    m.runs(2)
    m.denying.begin(pin=True)
    m.turn(20)  # no runtime knows it
    assert set(m.kernel.denied) == {group(1), group(2)}
    m.kernel.alive.discard(group(1))
    m.turn()
    assert set(m.kernel.denied) == {group(2)}
    m.know(2, "good")
    m.turn(3)
    assert m.kernel.denied == {}
    assert "denials of an earlier run" not in m.findings()


def test_a_claim_takes_back_no_denial_of_an_earlier_run(make_slow: Make) -> None:
    m = make_slow()
    m.older_denies(group(1))
    m.runs(1)
    m.know(1, "good", confirmed=False)
    m.denying.begin(pin=True)
    m.turn(20)
    assert set(m.kernel.denied) == {group(1)}
    m.denying.known([m.know(1, "good")])
    assert m.kernel.denied == {}


def test_a_taken_over_container_that_ends_is_released(make: Make) -> None:
    m = make()
    m.older_denies(group(1))
    m.runs(1)
    m.denying.begin(pin=True)
    m.running.clear()
    m.kernel.alive.clear()
    m.turn(2)
    assert m.kernel.denied == {} and m.findings() == {}


def test_an_older_pin_that_cannot_be_read_stands_until_the_runtimes_answered(
    make_slow: Make,
) -> None:
    m = make_slow()
    m.older_denies(unread="no libbpf")
    m.runs(1)
    m.denying.begin(pin=True)
    assert m.kernel.pins == []
    m.know(1)
    m.turn(2)
    assert m.kernel.pins == [{group(1)}]
    m.turn(5)
    assert len(m.kernel.pins) == 1
    m.kernel.trouble = Denied("no")
    assert "pins" not in m.findings()


def test_a_pin_that_fails_late_is_told(make_slow: Make) -> None:
    m = make_slow()
    m.older_denies(unread="no libbpf")
    m.denying.begin(pin=True)
    m.kernel.trouble = Unavailable("the file system is full")
    m.turn()
    assert "the file system is full" in m.findings()["pins"].evidence[0].text


def test_a_pin_that_fails_at_the_start_is_a_usage_error(make_slow: Make) -> None:
    m = make_slow()
    m.kernel.trouble = Denied("no BPF file system", remedy="mount one")
    with pytest.raises(UsageError, match="no BPF file system"):
        m.denying.begin(pin=True)
    m.older = Denied("cannot be read")
    with pytest.raises(UsageError, match="cannot be read"):
        m.denying.begin(pin=True)
    m.denying.begin(pin=False)


@pytest.mark.parametrize(("pin", "dry_run"), [(False, False), (True, True), (False, True)])
def test_without_a_pin_of_its_own_an_older_one_is_left_alone_and_told(
    make_slow: Make, pin: bool, dry_run: bool
) -> None:
    m = make_slow(dry_run=dry_run)
    m.older_denies(group(1))
    m.denying.begin(pin=pin)
    m.turn(3)
    assert m.kernel.pins == [] and m.kernel.denied == {}
    assert any("--unpin" in line for line in m.lines)
    assert any("a dry run pins nothing" in line for line in m.lines) == (pin and dry_run)


# ---------------------------------------------------------------- any order


OPERATIONS = st.one_of(
    st.tuples(st.just("make"), st.integers(0, 5), st.integers(0, 15)),
    st.tuples(st.just("know"), st.integers(0, 5), st.sampled_from(["bad", "good"])),
    st.tuples(st.just("end"), st.integers(0, 15), st.none()),
    st.tuples(st.just("policy"), st.sampled_from([("bad",), ("good",), ()]), st.none()),
    st.tuples(st.just("turn"), st.integers(1, 3), st.none()),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=40))
def test_in_the_end_the_named_that_live_are_denied_and_nobody_else(
    operations: list[tuple[Any, ...]],
) -> None:
    owner: dict[GroupKey, int] = {}
    named: tuple[str, ...] = ("bad",)
    with machines() as make:
        m = make()
        for what, one, other in operations:
            if what == "make" and group(other) not in owner:
                owner[group(other)] = one
                m.make(one, group(other))
            elif what == "know" and name(one) not in m.runtime.knows:
                m.know(one, other)
            elif what == "end":
                m.kernel.alive.discard(group(one))
            elif what == "policy":
                named = one
                m.denying.reload(policy(*named))
            elif what == "turn":
                m.turn(one)
        m.turn(len(RETRY_SECONDS) + 5)
        expected = {
            key
            for key in m.kernel.alive
            if (known := m.runtime.knows.get(name(owner[key]))) and known.image in named
        }
        assert set(m.kernel.denied) == expected
        assert len(m.findings()) == len({owner[key] for key in expected})


# ---------------------------------------------------------------- groups by number


@pytest.mark.parametrize("controller", ["", "devices", "pids", "freezer"])
def test_a_group_exists_until_it_is_removed(controller: str) -> None:
    require_root()
    mount = cgroup_mounts().get(controller)
    if mount is None:
        pytest.skip(f"this machine has no hierarchy for {controller or 'version 2'}")
    directory = Path(mount) / f"gpuwarden-test-{os.getpid()}"
    directory.mkdir()
    try:
        key = cgroup2.group_key(Host(), str(directory))
        assert group_ids.existing([key]) == {key}
    finally:
        directory.rmdir()
    assert group_ids.existing([key]) == set()


def test_a_group_in_a_hierarchy_that_is_not_mounted_here_is_not_called_gone() -> None:
    key = GroupKey(4242, 10**12)
    assert group_ids.existing([key]) == {key}
    assert group_ids.existing([]) == set()
