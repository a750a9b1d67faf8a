"""A tracer to be killed: it stops whoever loads a module, has a guardian, and holds or releases.

    python -m tests.support.stop_tracer LIBRARY DIRECTORY hold|release

It says ``guarded PID``, the guardian's, once it is attached and processes may be stopped. The
guardian of one that holds waits longer than any test for its tracer, and its word lasts as long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gpuwarden.cuda import guardian
from gpuwarden.cuda.guardian import Guardian
from gpuwarden.probes.cuda.stopped import boot_ns
from tests.support.idle import wait_for
from tests.support.stopping import FOREVER_NS, stop_probe


def main() -> None:
    file, directory, what = sys.argv[1:]
    if what == "hold":
        guardian.LATE_NS = guardian.WORD_NS = FOREVER_NS
    with (
        stop_probe() as probe,
        Guardian(probe.map.descriptor, probe.stops_until, directory=directory) as guard,
    ):
        probe.attach(Path(file))
        wait_for(lambda: guard._said() > boot_ns(), "the guardian's word")
        print(f"guarded {guard.pid}", flush=True)
        while True:
            guard.look()
            if what == "release":
                for record in probe.map.records():
                    probe.map.release(record)
            time.sleep(0.005)


if __name__ == "__main__":
    main()
