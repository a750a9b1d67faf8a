"""The real `gpuwarden watch` with two shorter waits, so that a test sees whole lives of findings.

    python -m tests.support.quick_watch ENDED SILENT watch …

A finding holds for ENDED seconds after its process has ended (30), a sink that fails is told of
after SILENT seconds (60), and is tried again every second at least (60). A delivery that does not
end fails after SILENT seconds, too, if those are less than 10.
"""

from __future__ import annotations

import sys
from functools import partial

from gpuwarden import cli
from gpuwarden.sinks import dispatcher
from gpuwarden.sinks.dispatcher import Backoff
from gpuwarden.watch import agent, alarms
from gpuwarden.watch.telling import Telling


def main(ended: str, silent: str, *argv: str) -> int:
    alarms.ENDED_NS = int(float(ended) * 1e9)
    silent_ns = int(float(silent) * 1e9)
    dispatcher.STUCK_NS = min(dispatcher.STUCK_NS, silent_ns)
    quick = partial(Telling, silent_ns=silent_ns, backoff=Backoff(0.1, 1.0))
    vars(agent)["Telling"] = quick
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
