"""What each way of seeing a device's opens sees, misses and can deny, one check a fact."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial

from gpuwarden.errors import GpuwardenError
from gpuwarden.probes import ways
from gpuwarden.probes.events import Event, ExitEvent, OpenEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.settings import Settings
from tests.guest.inside import foreign, place
from tests.guest.inside.report import Report

SHORT_LIVED = 200
EVERYTHING = Settings(limit_events=0)
GPUS = ((place.MAJOR, None),)


class WayChecks:
    """The checks of one way, with one probe: loading it is what takes an emulator's time."""

    def __init__(self, way: str, report: Report) -> None:
        self.way = ways.BY_NAME[way]
        self.probe = DeviceOpenProbe(GPUS, EVERYTHING, way=way)
        self.report = report
        self.ruled = place.group("rules")
        self.denied = place.group("denied")

    def run(self) -> None:
        """All of them; only the first if it does not load."""
        checks = {
            "who": self.who_it_was,
            "names": self.a_renamed_node_and_a_copy,
            "no-driver": self.an_open_that_the_driver_refuses,
            "no-permission": self.an_open_that_permissions_refuse,
            "device-rules": self.an_open_that_device_rules_refuse,
            "later-rules": self.device_rules_attached_later,
            "short-lived": self.short_lived_processes,
            "io_uring": self.an_open_through_io_uring,
            "holders": self.holders_that_never_opened,
            "denial": self.a_denial,
            "end": self.the_end,
        }
        # As of a container that runs already: its rules are there before the probe.
        with foreign.refusing(self.ruled):
            if not self.check("load", self.loads):
                return
            for name, check in checks.items():
                self.check(name, check)

    def check(self, name: str, run: Callable[[], str]) -> bool:
        """As the report's, under this way's name; events of the check before are not its."""
        if name != "load":
            drained(self.probe)
        return self.report.check(f"{self.way.name}:{name}", run)

    def seen(self, path: str, where: str | None = None, uid: int | None = None) -> bool:
        """Whether an open of it is told, once; the opener's own outcome does not matter."""
        place.opened(path, where, uid)
        found = opens(drained(self.probe), path)
        assert len(found) <= 1, found
        return bool(found)

    # ---------------------------------------------------------------- what is seen

    def loads(self) -> str:
        begun = time.monotonic()
        self.probe.__enter__()
        took = time.monotonic() - begun
        assert self.probe.counters().dropped == 0
        return f"in {took:.2f} s; {self.way.limits or 'no limits'}"

    def who_it_was(self) -> str:
        where = place.group("who/inner")
        child = place.started([place.OPENER, "open", place.GPU], where, place.ALICE)
        assert child.communicate(timeout=60)[0] == "1\n"
        (event,) = opens(drained(self.probe), place.GPU)
        who = event.process
        found = (event.major, event.minor, event.how, who.pid, who.uid, who.gid)
        assert found == (place.MAJOR, 0, "open", child.pid, place.ALICE, place.ALICE), found
        assert who.exe_path == place.OPENER, who.exe_path
        assert who.exe_inode == os.stat(place.OPENER).st_ino
        assert who.argv == (place.OPENER, "open", place.GPU), who.argv
        assert who.comm == "opener" and who.ppid == os.getpid(), who
        assert who.cgroup_path == "/gpuwarden-test/who/inner", who.cgroup_path
        assert who.cgroup_path_hierarchy == 0 and who.cgroup_v1_id is None, who
        assert who.cgroup_id == os.stat(where).st_ino, who
        assert event.reads and not event.writes
        assert event.source == self.way.name, event.source
        assert event.state == ("opened" if self.way.gives_results else "attempted"), event.state
        return f"{event.state}, with process, arguments, user and group"

    def a_renamed_node_and_a_copy(self) -> str:
        copy = place.node(f"{place.NODES}/notes.txt", place.MAJOR, 0)
        renamed = f"{place.NODES}/renamed"
        made = [e for e in drained(self.probe) if isinstance(e, OpenEvent) and e.how == "mknod"]
        try:
            assert self.seen(copy), "the copy was not seen"
            os.rename(copy, renamed)
            assert self.seen(renamed), "the renamed node was not seen"
        finally:
            for path in (copy, renamed):
                if os.path.exists(path):
                    os.unlink(path)
        expected(bool(made), self.way.sees_mknod)
        assert {(e.major, e.minor, e.process.pid) for e in made} <= {(place.MAJOR, 0, os.getpid())}
        return f"both; the mknod {'too' if made else 'not, as is its limit'}"

    def an_open_that_the_driver_refuses(self) -> str:
        return expected(self.seen(place.ABSENT), not self.way.gives_results)

    def an_open_that_permissions_refuse(self) -> str:
        """The kernel asks for permission before any hook of ours, cgroup/dev too."""
        path = place.node(f"{place.NODES}/private", place.MAJOR, 0, 0o600)
        drained(self.probe)
        try:
            assert not place.opened(path, uid=place.ALICE)
            return expected(self.seen(path, uid=place.ALICE), False)
        finally:
            os.unlink(path)

    def an_open_that_device_rules_refuse(self) -> str:
        assert not place.opened(place.GPU, self.ruled), "the other program's rules do not hold"
        drained(self.probe)
        return expected(self.seen(place.GPU, self.ruled), self.way.sees_refused)

    def device_rules_attached_later(self) -> str:
        """As runc does with a container that begins while ours is there, and takes away again."""
        where = place.group("later")
        with foreign.refusing(where):
            assert not place.opened(place.GPU, where)
            refused = len(opens(drained(self.probe), place.GPU))
        assert place.opened(place.GPU, where)
        assert len(opens(drained(self.probe), place.GPU)) == 1, "not seen once they were gone"
        return expected(bool(refused), self.way.sees_refused)

    def short_lived_processes(self) -> str:
        quiet = [(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)]
        wanted: dict[int, tuple[str, ...]] = {}
        for number in range(SHORT_LIVED):
            argv = (place.OPENER, "open", place.GPU, "1", f"run-{number}")
            pid = os.posix_spawn(argv[0], argv, {}, file_actions=quiet)
            os.waitpid(pid, 0)
            wanted[pid] = argv
        events = drained(self.probe)
        assert self.probe.counters().dropped == 0
        told = {e.process.pid: e for e in opens(events, place.GPU)}
        seen = {
            pid: e.process.argv for pid, e in told.items() if e.process.exe_path == place.OPENER
        }
        assert {pid: seen.get(pid) for pid in wanted} == wanted, f"{len(seen)} seen"
        lives = [
            (e.at_ns - told[e.pid].at_ns + told[e.pid].since_boot_ns - began) / 1e6
            for e in events
            if isinstance(e, ExitEvent) and e.pid in wanted
            for began in [told[e.pid].process.start_time_ns]
        ]
        assert len(lives) == SHORT_LIVED, f"the end of {len(lives)} was told"
        middle = statistics.median(lives)
        return f"{len(seen)} of {SHORT_LIVED}, which lived {middle:.1f} ms in the median"

    def an_open_through_io_uring(self) -> str:
        child = place.started([place.OPENER, "uring", place.GPU])
        said = child.communicate(timeout=60)[0]
        assert child.returncode == 0 and int(said) >= 0, (child.returncode, said)
        opened = [e for e in drained(self.probe) if isinstance(e, OpenEvent)]
        found = [e for e in opened if e.process.pid == child.pid]
        for event in found:
            assert event.io_uring and event.process.exe_path == place.OPENER, event
        return expected(len(found) == 1, not self.way.gives_results)

    def holders_that_never_opened(self) -> str:
        for how in ("inherit", "pass"):
            child = place.started([place.OPENER, how, place.GPU])
            assert child.stdout is not None
            holder = int(child.stdout.readline().split()[1])
            try:
                child.wait(timeout=60)
                place.wait_for(partial(self.holds, holder))
                (held,) = [one for one in self.probe.holders() if one.pid == holder]
            finally:
                os.kill(holder, signal.SIGKILL)
            assert (held.major, held.minor, held.comm) == (place.MAJOR, 0, "opener"), held
            events = [e for e in drained(self.probe) if isinstance(e, OpenEvent)]
            assert holder not in {e.process.pid for e in events}
        return "inherited and passed"

    def holds(self, pid: int) -> bool:
        return pid in {one.pid for one in self.probe.holders()}

    # ---------------------------------------------------------------- denials

    def a_denial(self) -> str:
        if not self.way.can_deny:
            try:
                self.probe.deny(self.denied)
            except GpuwardenError as error:
                assert place.opened(place.GPU, self.denied)
                return f"refused, as this way cannot: {error}"
            raise AssertionError("a way that cannot deny took a denial")
        below = place.group("denied/below")
        self.probe.deny(self.denied)
        for inside in (self.denied, below):
            opened = place.opened(place.GPU, inside)
            assert not opened, f"opened in {inside}, {self.denials()}"
        assert place.opened(place.GPU), "a process outside the group was denied"
        told = [(e.state, e.denial) for e in opens(drained(self.probe), place.GPU)]
        assert told == [("denied", "denied")] * 2 + [("attempted", "")], told
        assert self.probe.counters().denied == 2
        return "of a group and the one below it"

    def denials(self) -> list[str]:
        return [e.denial for e in opens(drained(self.probe), place.GPU)]

    def the_end(self) -> str:
        """Fail open: nothing is denied by a probe that is gone."""
        dropped = self.probe.counters().dropped
        self.probe.close()
        for inside in (self.denied, place.group("denied/below")):
            assert place.opened(place.GPU, inside), "denied after the probe had ended"
        assert dropped == 0, f"{dropped} dropped"
        return "opens again"


def expected(seen: bool, wanted: bool) -> str:
    """``seen`` in words. Errors: AssertionError if it is not as this way is said to be."""
    assert seen == wanted, "seen" if seen else "not seen"
    return "seen" if seen else "not seen, as is this way's limit"


def drained(probe: DeviceOpenProbe) -> list[Event]:
    """All that was told until now."""
    events: list[Event] = []
    while batch := probe.poll(0):
        events += batch
    return events


def opens(events: list[Event], path: str) -> list[OpenEvent]:
    """Opens of a path, in their order."""
    found = [e for e in events if isinstance(e, OpenEvent) and e.how == "open"]
    return [e for e in found if e.path == path]
