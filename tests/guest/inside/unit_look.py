"""Run in the sandbox of the unit: what doctor finds, and what a child without rights is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from gpuwarden.confinement.rights import drop_rights


def main() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "doctor", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(done.stdout)
    rows = [*found["sensors"], *found["sources"], found["opens"]]
    states = {row["name"]: row["state"] for row in rows}
    print(json.dumps({"doctor": states, **child()}))


def child() -> dict[str, object]:
    """A child that gave up its rights: its user, the capabilities it can have, and its end."""
    pid = os.fork()
    if pid == 0:
        try:
            drop_rights(nobody=True)
        except OSError:
            os._exit(3)
        time.sleep(60)
        os._exit(0)
    time.sleep(1.0)
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    try:
        os.kill(pid, signal.SIGKILL)
        ended = True
    except PermissionError:
        ended = False
    return {
        "child is nobody": status["Uid"].split()[0] == "65534",
        "child can have no capability": int(status["CapBnd"], 16) == 0,
        "child can be ended": ended,
    }


main()
