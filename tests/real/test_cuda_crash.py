"""Agent and tracer are killed while fifty processes load modules: none of these comes to harm."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpuwarden.cuda import guardian
from tests.support import cuda_bed, text_pages
from tests.support.idle import wait_for
from tests.support.killing import children_of_the_dead
from tests.support.loaders import Loaders, image
from tests.support.probes import build
from tests.support.standstill import Standstill
from tests.support.stopping import file_offset, state
from tests.support.watching import Watching, watching

pytestmark = pytest.mark.real

PROCESSES = 50
KILLS = 3
PROBED = ("cuModuleLoadData", "cuLibraryLoadData", "cuModuleGetFunction", "cuLaunchKernel")
AFTER_PROLOGUE = 10
STILL_SECONDS = 1.0
"""For longer no process may stand still."""


class Crash:
    """What is looked at while it happens."""

    def __init__(self, folder: Path, library: Path, *, may_stop: bool) -> None:
        self.folder = folder
        self.library = library
        self.policy = folder / "policy.yaml"
        switch = "true" if may_stop else "false"
        # A ring in which hardly anything finds room.
        self.policy.write_text(f"capture: {{may_stop: {switch}, ring_mib: 1, module_mib: 64}}\n")
        starts = [file_offset(library, name) for name in PROBED]
        self.offsets = [at for start in starts for at in (start, start + AFTER_PROLOGUE)]
        self.loaded: dict[str, set[int]] = {"prog": set(), "map": set(), "link": set()}
        self.guardians: set[int] = set()

    @contextmanager
    def agent(self, pid: int) -> Iterator[tuple[Watching, int]]:
        """An agent that sees the calls of ``pid``, and its tracer."""
        with watching(self.folder, "--events", "--policy", str(self.policy)) as agent:
            agent.wait(lambda: text_pages.changed(pid, self.library, self.offsets), "the probes")
            tracer = wait_for(lambda: self._tracer(agent.pid), "the tracer")
            self.note(tracer)
            yield agent, tracer

    def _tracer(self, agent: int) -> int | None:
        """The child of the agent that has descriptors of uprobes."""
        return next((pid for pid in children(agent) if text_pages.bpf_of(pid)["link"]), None)

    def note(self, tracer: int) -> None:
        """Remembers what a tracer has in the kernel, and its guardian."""
        for kind, ids in text_pages.bpf_of(tracer).items():
            self.loaded[kind] |= ids
        for pid in children(tracer):
            with suppress(OSError):  # children of other kinds come and go
                if Path(f"/proc/{pid}/comm").read_bytes().strip() == guardian.NAME:
                    self.guardians.add(pid)

    def has_left(self, pid: int) -> list[str]:
        """What of any tracer is still there."""
        now = text_pages.bpf_ids()
        left = [f"{kind} {ids & now[kind]}" for kind, ids in self.loaded.items() if ids & now[kind]]
        left += [f"guardian {one}" for one in self.guardians if state(one) not in ("", "Z", "X")]
        changed = text_pages.changed(pid, self.library, self.offsets)
        # Another agent of this machine probes every driver library too.
        if changed and not text_pages.link_holders():
            left.append(f"breakpoints at {changed}")
        left += [f"child {one}" for one in children_of_the_dead(self.folder)]
        return left


def children(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                line = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            if int(line.rpartition(") ")[2].split()[1]) == pid:
                found.append(int(name))
    return found


@pytest.mark.parametrize("may_stop", [False, True], ids=["no stops", "stops"])
def test_agents_are_killed_while_fifty_processes_load(tmp_path: Path, may_stop: bool) -> None:
    build()
    library = cuda_bed.bed().copied("libcuda.so.1")
    crash = Crash(tmp_path, library, may_stop=may_stop)
    dice = random.Random(4711 + may_stop)
    content = image(tmp_path / "image", 700_000)
    with Loaders(PROCESSES, library, content) as loaders, Standstill(loaders.pids) as seen:
        witness = loaders.pids[-1]
        for number in range(KILLS):
            with crash.agent(witness) as (agent, tracer):
                time.sleep(dice.uniform(0.3, 1.5))
                if number % 2:
                    # The tracer alone: the agent starts another, which is then killed with it.
                    os.kill(tracer, signal.SIGKILL)
                    time.sleep(dice.uniform(0.5, 2.5))
                    for pid in children(agent.pid):
                        crash.note(pid)
                agent.kill()
        # Without a restart they load on.
        rounds = loaders.rounds
        wait_for(lambda: not crash.has_left(witness), "the end of all that was the agent's")
        wait_for(lambda: loaders.rounds > rounds + 2, "loads after the last kill")
        codes = loaders.end()
    assert loaders.troubles == []
    assert codes == [0] * PROCESSES
    longest = max(seen.longest.values())
    assert longest.seconds < STILL_SECONDS, (longest, seen.longest_pause)
    stops = sum(one.stretches for one in seen.longest.values())
    print(f"{stops} stops, the longest {longest.seconds:.3f} s; {loaders.rounds} rounds of loads")
    assert bool(stops) == may_stop, stops
    assert bool(crash.guardians) == may_stop
    assert crash.loaded["link"]
