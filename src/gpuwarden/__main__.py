"""``python -m gpuwarden``: the same as the ``gpuwarden`` command."""

import sys

from gpuwarden.cli import main

sys.exit(main())
