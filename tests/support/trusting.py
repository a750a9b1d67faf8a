"""The agent of patient_watch.py, with the signatures of a directory of the test's own.

python -m tests.support.trusting DIRECTORY watch …
"""

from __future__ import annotations

import sys

from gpuwarden.codescan import known_code
from tests.support import patient_watch


def main(directory: str, *argv: str) -> int:
    known_code.KEY_DIRECTORY = directory
    return patient_watch.main(*argv)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
