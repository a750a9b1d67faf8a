"""An agent in small, to be killed: it sees things that come and go, and tells the sinks.

    python -m tests.support.small_agent MEMORY CLOCK SINK…

CLOCK is a file with the number of the round, in place of a real node's state. What was reported is
on standard output, a line a transition, after it is in the store.
"""

from __future__ import annotations

import os
import sys

from gpuwarden.finding import Finding, Subject, finding_id
from gpuwarden.life import FindingLife
from gpuwarden.sinks.dispatcher import Backoff, Dispatcher
from gpuwarden.sinks.specs import parse_sinks
from gpuwarden.store import Sample, Store

RULE = "rogue_container"
THINGS = 12


def thing(number: int, moment: int) -> Finding:
    """One of the things that the agent sees; it changes now and then."""
    subject = Subject(kind="process", pid=number, start_time_ticks=1, boot_id="boot")
    return Finding(
        id=finding_id(RULE, subject),
        rule=RULE,
        severity="critical" if (moment // 4) % 2 else "warning",
        title="A title",
        explanation="An explanation. " * 20,
        subject=subject,
    )


def main(memory: str, clock: str, *specs: str) -> None:
    store = Store(memory)
    life = FindingLife(store, node="gpu-01", rounds_to_resolve=2, update_interval_ns=5)
    dispatcher = Dispatcher(store.findings, parse_sinks(specs), backoff=Backoff(0.01, 0.05))
    dispatcher.start()
    with open(clock) as file:
        moment = int(file.read() or 0)
    while True:
        moment += 1
        with open(f"{clock}.new", "w") as file:
            file.write(str(moment))
        os.replace(f"{clock}.new", clock)
        present = [number for number in range(THINGS) if (moment // (number + 3)) % 2]
        things = [thing(number, moment) for number in present]
        news = life.observe(things, moment, frozenset({RULE}))
        dispatcher.wake()
        for item in news:
            os.write(1, f"{item.sequence} {item.status} {item.id}\n".encode())
        store.samples.record(
            Sample(at_ns=moment, gpu_id="GPU-0", pid=number, sm_percent=moment % 100)
            for number in present
        )
        store.trim(moment)


if __name__ == "__main__":
    main(*sys.argv[1:])
