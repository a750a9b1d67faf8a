"""The commands that docs/deploy.md tells a reader to run, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"


def commands(section: str) -> list[str]:
    """Each line of the ``sh`` blocks below a heading, in their order."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]
