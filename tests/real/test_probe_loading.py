"""Loading the probes, all or nothing; holders; the fallback without eBPF."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.probes import btf, cgroup2, choose, layouts, loader, ways
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.poll import HolderPoll
from tests.support.idle import wait_for
from tests.support.probes import (
    BUILD_SECONDS,
    EVERYTHING,
    FULL,
    ROOT,
    by,
    drained,
    node,
    probing,
    run,
)
from tests.support.stand_in import StandInHost

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]


# -------------------------------------------------------------------- holders


@pytest.mark.parametrize("how", ["inherit", "pass"])
def test_holders_that_never_opened_are_found(how: str, opener: Path, tmp_path: Path) -> None:
    path = node(tmp_path / "n", FULL)
    with probing() as probe:
        process = subprocess.Popen([opener, how, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        holder = int(process.stdout.readline().split()[1])
        try:
            process.wait()
            events = drained(probe)
            held = wait_for(
                lambda: [one for one in probe.holders() if one.pid == holder], "a holder"
            )
        finally:
            os.kill(holder, signal.SIGKILL)
            process.stdout.close()
    assert by(holder, events) == []
    assert {(one.major, one.minor, one.comm) for one in held} == {(*FULL, "opener")}


def test_the_iterator_finds_what_proc_shows() -> None:
    with probing(EVERYTHING, FULL) as probe, open("/dev/full", "rb") as held:
        mine = {one.descriptor for one in probe.holders() if one.pid == os.getpid()}
        shown = {
            int(fd)
            for fd in filter(_is_open, os.listdir("/proc/self/fd"))
            if os.stat(f"/proc/self/fd/{fd}").st_rdev == os.makedev(*FULL)
        }
        assert held.fileno() in mine and mine == shown


# -------------------------------------------------------------------- loading


def test_the_object_has_the_layouts_that_events_are_read_by() -> None:
    for name in {way.object_name for way in ways.BY_NAME.values()}:
        layouts.check(btf.structures((Path(loader.FOLDER) / name).read_bytes()))


def test_a_wrong_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tuple(layouts.LAYOUTS["open_record"][1:])
    monkeypatch.setattr(layouts, "LAYOUTS", {**layouts.LAYOUTS, "open_record": wrong})
    with pytest.raises(Malformed, match="struct open_record: hits is at bytes 8 to 15"):
        DeviceOpenProbe([FULL]).__enter__()


def test_a_missing_object_says_how_to_build_it(tmp_path: Path) -> None:
    probe = DeviceOpenProbe([FULL], object_path=str(tmp_path / "none.o"))
    with pytest.raises(Unavailable) as error:
        probe.__enter__()
    assert "build_probes" in error.value.remedy


def test_a_failure_half_way_leaves_nothing_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(host: Host) -> int:
        raise Unavailable("no hierarchy")

    with monkeypatch.context() as patch:
        patch.setattr(cgroup2, "open_root", refused)
        probe = DeviceOpenProbe([FULL])
        with pytest.raises(Unavailable, match="no hierarchy"):
            probe.__enter__()
    names = filter(_is_open, os.listdir("/proc/self/fd"))
    assert not [fd for fd in names if "bpf" in os.readlink(f"/proc/self/fd/{fd}")]


def _is_open(descriptor: str) -> bool:
    """Not so for the descriptor that listing them needed."""
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_without_rights_it_is_denied_and_says_what_it_takes() -> None:
    with probing():
        pass  # libbpf is loaded before the rights go
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = "loaded"
        try:
            os.setgid(65534)
            os.setuid(65534)
            DeviceOpenProbe([FULL]).__enter__()
        except Denied as error:
            told = f"denied: {error.remedy}"
        finally:
            os.write(writer, told.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="utf-8") as answer:
        told = answer.read()
    assert told.startswith("denied") and "CAP_BPF" in told


def test_a_refused_program_is_told_with_the_verifiers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that reads beyond its context, in an object that has the same layouts."""
    source = ROOT / "src/gpuwarden/probes/device_open.bpf.c"
    text = source.read_text()
    wrong = tmp_path / "src/gpuwarden/probes/device_open.bpf.c"
    wrong.parent.mkdir(parents=True)
    wrong.write_text(text.replace("context->minor,", "((__u32 *)context)[99],", 1))
    assert wrong.read_text() != text
    for name in source.parent.glob("*.h"):
        shutil.copy(name, wrong.parent)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/build_probes", tmp_path / "scripts")
    run(tmp_path / "scripts/build_probes", check=True, seconds=BUILD_SECONDS)
    with pytest.raises((Unavailable, Denied)) as error:
        DeviceOpenProbe([FULL], object_path=str(wrong.with_suffix(".o"))).__enter__()
    notes = " ".join(error.value.__notes__)
    assert "device_access" in notes and "invalid bpf_context access" in notes


def test_a_closed_probe_says_so() -> None:
    with probing() as probe:
        pass
    for ask in (probe.poll, probe.holders, probe.counters, probe.counts, probe.fileno):
        with pytest.raises(Unavailable, match="not loaded"):
            ask()


def test_the_hierarchys_root_needs_no_mount() -> None:
    descriptor = cgroup2._open_unmounted()
    try:
        assert os.fstat(descriptor).st_ino == cgroup2.ROOT_INODE
    finally:
        os.close(descriptor)


def test_a_cgroup_namespace_of_its_own_is_said_to_be_one() -> None:
    if Path("/proc/self/cgroup").read_text().splitlines()[-1] == "0::/":
        pytest.skip("this process is in the root group, which its namespace would begin at")
    code = (
        "from gpuwarden.probes import cgroup2; from gpuwarden.host import Host\n"
        "try: cgroup2.open_root(Host())\nexcept Exception as e: print(type(e).__name__, e.remedy)"
    )
    script = (
        "umount /sys/fs/cgroup/unified 2>/dev/null || umount -R /sys/fs/cgroup; "
        f"exec {sys.executable} -c '{code}'"
    )
    unshare = ("unshare", "--mount", "--cgroup", "--pid", "--fork", "--mount-proc")
    done = run(*unshare, "sh", "-c", script, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.stdout.startswith("Unavailable") and "--cgroupns=host" in done.stdout, done


def test_the_way_is_chosen_by_trying(tmp_path: Path) -> None:
    with choose.chosen([FULL]) as choice:
        assert choice.probe is not None and choice.way.startswith("eBPF")
    with choose.chosen([FULL], object_path=str(tmp_path / "none")) as choice:
        assert choice.probe is None and choice.poll is not None
        assert "not built" in str(choice) and "polls /proc" in str(choice)


def test_polling_finds_new_holders(tmp_path: Path) -> None:
    poll = HolderPoll(StandInHost(numbers={FULL: (195, 0)}))
    poll.look()
    with open("/dev/full", "rb") as held:
        child = subprocess.Popen(["sleep", "60"], stdin=held)
    try:
        # The kernel shows the new name before the new words.
        words = Path(f"/proc/{child.pid}/cmdline")
        wait_for(lambda: words.read_bytes() == b"sleep\x0060\0", "exec")
        (event,) = [e for e in poll.look() if e.process.pid == child.pid]
        assert (event.how, event.state, event.source) == ("held", "opened", "proc poll")
        assert event.process.argv == ("sleep", "60")
        assert event.process.exe_path == os.path.realpath(shutil.which("sleep") or "")
        assert [e for e in poll.look() if e.process.pid == child.pid] == []
    finally:
        child.kill()
        child.wait()
