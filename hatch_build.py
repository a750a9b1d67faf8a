"""Builds the eBPF probes into the wheel, which then is one for this machine's architecture.

A checkout (an editable install) builds them with scripts/build_probes instead. Without clang the
wheel has none and is for any machine; GPUWARDEN_WITH_PROBES=1 makes that an error.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROBES = "src/gpuwarden/probes/*.bpf.o"


class ProbesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs scripts/build_probes and has its objects packed, although git ignores them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        script = Path(self.root) / "scripts/build_probes"
        done = subprocess.run([str(script)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            if os.environ.get("GPUWARDEN_WITH_PROBES") == "1":
                raise SystemExit(done.stderr.strip())
            self.app.display_warning(f"without the eBPF probes: {done.stderr.strip()}")
            return
        build_data["artifacts"].append(PROBES)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{os.uname().machine}"
