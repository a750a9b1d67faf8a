"""Denials that are pinned: they outlive kill -9, are replaced without a hole, end on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, UsageError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2, pinning
from gpuwarden.probes.pinning import PinnedDenial, pinned, unpin
from gpuwarden.probes.settings import Settings
from tests.support.idle import wait_for
from tests.support.probes import (
    EVERYTHING,
    FULL,
    ROOT,
    RUN,
    drained,
    node,
    opened_in,
    opens,
    probing,
    run,
    tracefs,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

AGENT = """
import sys, time
from gpuwarden.probes.loader import DeviceOpenProbe
with DeviceOpenProbe([(1, 7)]) as probe:
    probe.deny(sys.argv[1])
    print(*probe.pin(sys.argv[2]), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def directory() -> Iterator[str]:
    """A place for pins of this test alone, in a BPF file system that pin() may have to mount."""
    was_there = pinning._is_bpf(pinning.FILE_SYSTEM)
    path = f"{pinning.FILE_SYSTEM}/gpuwarden-test-{RUN}"
    try:
        yield path
    finally:
        unpin(path)
        if os.path.isdir(path):
            os.rmdir(path)
        if not was_there and pinning._is_bpf(pinning.FILE_SYSTEM):
            run("umount", pinning.FILE_SYSTEM, check=True)


def kill_an_agent_that_pinned(group: Path, directory: str) -> list[str]:
    """What an agent pinned that denied a group its devices and was then killed."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(group), directory],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert agent.stdout is not None
    try:
        return agent.stdout.readline().split()
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        agent.stdout.close()


def test_a_pinned_denial_outlives_kill_9_until_it_is_taken_back(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path, directory: str
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    assert pinned(directory) is None and unpin(directory) == ()
    names = kill_an_agent_that_pinned(group, directory)
    assert names == [
        "link_device_access",
        "map_denied_cgroups",
        "map_settings",
        "map_watched_devices",
    ]
    for where in (group, group / "below"):
        assert not opened_in(where, opener, path)
    assert run(opener, "open", path).stdout.strip() == "1"
    there = pinned(directory)
    assert there is not None and sorted(there.names) == names and not there.unread
    assert there.denials == (PinnedDenial(cgroup2.group_key(Host(), str(group))),)
    assert sorted(unpin(directory)) == names
    wait_for(lambda: opened_in(group, opener, path), "the end of the denial")
    assert pinned(directory) is None and not os.path.exists(directory)


def test_a_new_probe_takes_over_from_a_pinned_one_without_a_hole(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path, directory: str
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    kill_an_agent_that_pinned(group, directory)
    with probing(Settings(limit_events=1)) as probe:
        key = probe.deny(str(group))
        script = 'echo $$ > "$1/cgroup.procs" && exec "$2" open "$3" 200000'
        attempts = subprocess.Popen(
            ["sh", "-c", script, "sh", group, opener, path], stdout=subprocess.PIPE, text=True
        )
        # Another's open is no sign that these have begun.
        wait_for(lambda: opens(drained(probe), state="denied"), "the first attempt")
        probe.pin(directory)
        opened, _ = attempts.communicate()
        assert opened.strip() == "0"
        # Only the new one is left: with its denial gone nothing else refuses.
        probe.allow(key)
        wait_for(lambda: opened_in(group, opener, path), "the end of the old one")
        probe.deny(str(group), dry_run=True)
        there = pinned(directory)
        assert there is not None and there.denials == (PinnedDenial(key, dry_run=True),)
        probe.deny(str(group))
    assert not opened_in(group, opener, path)
    unpin(directory)
    wait_for(lambda: opened_in(group, opener, path), "the end of the denial")


def test_unpin_leaves_what_is_not_ours_and_needs_no_libbpf(
    groups: Callable[[str], Path], opener: Path, tmp_path: Path, directory: str
) -> None:
    group, path = groups(""), node(tmp_path / "n", FULL)
    kill_an_agent_that_pinned(group, directory)
    other = Path(directory) / "other"
    os.rename(f"{directory}/map_settings", other)
    code = (
        "import sys; from gpuwarden.probes import libbpf, pinning; libbpf.SONAME = 'none.so'\n"
        "libbpf.Libbpf.__init__.__defaults__ = ('none.so',)\n"
        "print(pinning.pinned(sys.argv[1]).unread); print(*pinning.unpin(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = run(sys.executable, "-c", code, directory, check=True, env=environment)
    assert "none.so" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1].split()[0] == "link_device_access"
    wait_for(lambda: opened_in(group, opener, path), "the end of the denial")
    assert os.listdir(directory) == ["other"]
    other.unlink()


def test_pins_are_refused_where_they_would_not_hold(tmp_path: Path, directory: str) -> None:
    with probing() as probe:
        for place in (str(tmp_path / "pins"), "relative", f"{pinning.FILE_SYSTEM}/a/../b"):
            with pytest.raises(UsageError):
                probe.pin(place)
        probe.pin(directory)
        unpin(directory)
        os.mkdir(directory, 0o777)
        os.chmod(directory, 0o777)
        with pytest.raises(Denied, match="others may write"):
            probe.pin(directory)
    with (
        tracefs(),
        probing(EVERYTHING, way="tracepoint") as probe,
        pytest.raises(UsageError, match="cannot deny"),
    ):
        probe.pin(directory)
