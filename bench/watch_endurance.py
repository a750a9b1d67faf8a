"""What a running `gpuwarden watch` lives through: kills, a receiver that is down for long.

    python bench/watch_endurance.py [kills] [sink-down] [--kills 50] [--seed N] [--minutes 10]
                                    [--check]

Needs root, clang and gcc. ``kills`` ends the agent with SIGKILL at random moments while processes
use a GPU. ``sink-down`` lets a webhook and an Alertmanager refuse connections, hang and answer 500,
a third of the time each, while findings come and go; everything must arrive afterwards, in order.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from gpuwarden.life import decode  # noqa: E402
from tests.support.killing import Users, check, killed, told_processes  # noqa: E402
from tests.support.probes import node  # noqa: E402
from tests.support.receivers import Receiver, Request  # noqa: E402
from tests.support.watching import GPU, Watching, watching  # noqa: E402

AFTERWARDS_SECONDS = 180.0
"""A sink that failed for long is tried again within a minute; then it gets all at once."""
SILENT = "sink_not_answering"


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def alert_sequences(requests: list[Request]) -> list[int]:
    """The sequences of the alerts, in the order in which they first came."""
    found: dict[int, None] = {}
    for request in requests:
        for alert in request.json():
            found.setdefault(int(alert["annotations"]["sequence"]))
    return list(found)


def told_of_silence(agent: Watching, status: str) -> int:
    return len({one["id"] for one in agent.findings(SILENT) if one["status"] == status})


class Bench:
    """What the parts share, and what missed its bar."""

    def __init__(self, opener: Path, options: argparse.Namespace) -> None:
        self.opener = opener
        self.options = options
        self.missed: list[str] = []

    def kills(self) -> None:
        """SIGKILL at random moments: no gap, no loss, no second id."""
        kills, seed = self.options.kills, self.options.seed
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="watch-") as folder, Receiver() as receiver:
            seen = killed(Path(folder), self.opener, receiver, kills=kills, seed=seed)
        try:
            check(seen)
        except AssertionError as error:
            print(f"kills   seed {seed}: {error}")
            self.missed.append("kills")
            return
        print(
            f"kills   {kills} of them (seed {seed}) in {time.perf_counter() - begun:.0f} s: "
            f"{seen.last_sequence} transitions without a gap at both sinks, "
            f"{told_processes(seen)} processes told of, {seen.repeated} deliveries came twice"
        )

    def sink_down(self) -> None:
        """Receivers that are away for minutes get everything afterwards."""
        seconds = self.options.minutes * 60
        webhook, alertmanager = Receiver(), Receiver()
        sinks = ("stdout", f"webhook:{webhook.url}", f"alertmanager:{alertmanager.url}")
        with tempfile.TemporaryDirectory(prefix="watch-") as folder:
            path = node(Path(folder) / "cat.jpg", GPU)
            dice = random.Random(self.options.seed)
            with (
                watching(Path(folder), sinks=sinks) as agent,
                Users(self.opener, path, dice, pause_seconds=2.0),
            ):
                first = resident_mib(agent.pid)
                time.sleep(seconds / 3)
                both = (webhook, alertmanager)
                for behaviour in ("hang", 500):
                    for one in both:
                        one.behaviour = behaviour
                        if behaviour == "hang":
                            one.up()
                    time.sleep(seconds / 3)
                begun = time.perf_counter()
                waited = max((one["sequence"] for one in agent.findings()), default=0)
                silent = told_of_silence(agent, "opened")
                grown = resident_mib(agent.pid) - first
                for one in both:
                    one.behaviour = 200
                took: dict[str, float] = {}
                while len(took) < 2 and time.perf_counter() - begun < AFTERWARDS_SECONDS:
                    time.sleep(0.5)
                    for name, has in (
                        ("webhook", [decode(r.body).sequence for r in list(webhook.accepted)]),
                        ("alertmanager", alert_sequences(list(alertmanager.accepted))),
                    ):
                        if has and max(has) >= waited and name not in took:
                            took[name] = time.perf_counter() - begun
                until = time.perf_counter() + 30
                while told_of_silence(agent, "resolved") < 2 and time.perf_counter() < until:
                    time.sleep(0.5)
                over = told_of_silence(agent, "resolved")
            for one in both:
                one.down()
        got = list(dict.fromkeys(decode(r.body).sequence for r in webhook.accepted))
        alerts = alert_sequences(alertmanager.accepted)
        whole = got == list(range(1, len(got) + 1)) and alerts == list(range(1, len(alerts) + 1))
        print(
            f"sink down   {seconds / 60:g} min (refused, hanging, 500): {waited} transitions "
            f"waited, all there after {took.get('webhook', -1):.0f} s (webhook) and "
            f"{took.get('alertmanager', -1):.0f} s (alertmanager), in order: {whole}; told of "
            f"{silent} silent sinks, {over} of them resolved; memory +{grown:.1f} MB"
        )
        if not (whole and len(took) == 2 and silent == 2 and over == 2):
            self.missed.append("sink-down")


def main() -> int:
    parts: dict[str, Callable[[Bench], None]] = {
        "kills": Bench.kills,
        "sink-down": Bench.sink_down,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], metavar="PART")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=20_261_130)
    parser.add_argument("--minutes", type=float, default=10.0, help="that the sinks are down")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    options = parser.parse_args()
    subprocess.run([str(REPOSITORY / "scripts/build_probes")], check=True)
    with tempfile.TemporaryDirectory() as folder:
        opener = Path(folder) / "opener"
        source = REPOSITORY / "tests/support/openers.c"
        subprocess.run(["gcc", "-O2", "-o", str(opener), str(source)], check=True)
        bench = Bench(opener, options)
        for name in options.parts or parts:
            parts[name](bench)
            sys.stdout.flush()
    if bench.missed:
        print("missed: " + ", ".join(bench.missed), file=sys.stderr)
    return int(bool(bench.missed) and options.check)


if __name__ == "__main__":
    raise SystemExit(main())
