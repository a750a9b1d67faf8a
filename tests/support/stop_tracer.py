"""A tracer to be killed: it stops whoever loads a module, has a guardian, and holds or releases.

    python -m tests.support.stop_tracer LIBRARY DIRECTORY hold|release

It says ``guarded PID``, the guardian's, once it is attached.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gpuwarden.cuda.guardian import Guardian
from tests.support.stopping import stop_probe


def main() -> None:
    file, directory, what = sys.argv[1:]
    with (
        stop_probe() as probe,
        Guardian(probe.map.descriptor, probe.stops_until, directory=directory) as guard,
    ):
        probe.attach(Path(file))
        print(f"guarded {guard.pid}", flush=True)
        while True:
            guard.look()
            if what == "release":
                for record in probe.map.records():
                    probe.map.release(record)
            time.sleep(0.005)


if __name__ == "__main__":
    main()
