"""The real `gpuwarden watch`, which waits longer until it is known whose a process is.

    python -m tests.support.patient_watch watch …

What is not known two seconds after an open is told as unknown, and told anew after a minute. A test
of what is told once it is known must not depend on how quickly a busy machine's runtimes answer.
"""

from __future__ import annotations

import sys

from gpuwarden import cli
from gpuwarden.watch import cuda_side, event_telling, waiting

HELD_SECONDS = 10.0


def main(*argv: str) -> int:
    for module in (waiting, event_telling, cuda_side):
        vars(module)["HELD_SECONDS"] = HELD_SECONDS
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
