"""The probe beside the device programs of others: every open is seen, and both answers count."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuwarden.errors import Denied, GpuwardenError
from gpuwarden.host import Host
from gpuwarden.probes import cgroup2, choose
from gpuwarden.probes.events import ExecEvent, OpenEvent
from gpuwarden.probes.loader import DeviceOpenProbe
from gpuwarden.probes.settings import Settings
from tests.support import containers
from tests.support.packages import require
from tests.support.probes import (
    EVERYTHING,
    FULL,
    ROOT,
    RUN,
    UNUSED,
    ZERO,
    control_groups,
    drained,
    node,
    opened_in,
    opens,
    probing,
)

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("built")]

# bpf(2): the numbers of linux/bpf.h.
PROG_LOAD, PROG_ATTACH, PROG_DETACH = 5, 8, 9
CGROUP_DEVICE_PROGRAM, CGROUP_DEVICE = 15, 6
EXCLUSIVE, ALLOW_OVERRIDE, ALLOW_MULTI = 0, 1, 2
CPUID = (203, 0)


@pytest.fixture
def group() -> Iterator[Path]:
    with control_groups() as make:
        yield make("")


def bpf(command: int, attributes: bytes) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 321, "aarch64": 280}[os.uname().machine]
    library.syscall.restype = ctypes.c_long
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    done = int(library.syscall(ctypes.c_long(number), command, buffer, len(attributes)))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def program(refused: tuple[int, int]) -> int:
    """A device program such as runc's and systemd's: 0 for one number, 1 for all others."""

    def one(code: int, registers: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("<BBhi", code, registers, offset, value)

    instructions = b"".join(
        [
            one(0x61, 0x12, 4),  # r2 = context->major
            one(0x61, 0x13, 8),  # r3 = context->minor
            one(0xB7, 0x00, 0, 1),  # r0 = 1
            one(0x55, 0x02, 2, refused[0]),  # if r2 != major: exit
            one(0x55, 0x03, 1, refused[1]),  # if r3 != minor: exit
            one(0xB7, 0x00, 0, 0),  # r0 = 0
            one(0x95),  # exit
        ]
    )
    text, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        CGROUP_DEVICE_PROGRAM,
        len(instructions) // 8,
        ctypes.addressof(text),
        ctypes.addressof(licence),
        0,
        0,
        0,
        0,
        0,
        b"test_refuses",
        0,
        CGROUP_DEVICE,
    )
    return bpf(PROG_LOAD, attributes)


@contextmanager
def another_program(group: Path, refused: tuple[int, int], flags: int) -> Iterator[None]:
    """Another's device program, attached to a group as container runtimes do."""
    descriptor = program(refused)
    directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        bpf(PROG_ATTACH, struct.pack("<IIII", directory, descriptor, CGROUP_DEVICE, flags))
        yield
        bpf(PROG_DETACH, struct.pack("<IIII", directory, descriptor, CGROUP_DEVICE, 0))
    finally:
        os.close(directory)
        os.close(descriptor)


@contextmanager
def both(group: Path, flags: int, *, ours_first: bool) -> Iterator[DeviceOpenProbe]:
    if ours_first:
        with probing(EVERYTHING, FULL, ZERO) as probe, another_program(group, FULL, flags):
            yield probe
    else:
        with another_program(group, FULL, flags), probing(EVERYTHING, FULL, ZERO) as probe:
            yield probe


@pytest.mark.parametrize("flags", [ALLOW_MULTI, ALLOW_OVERRIDE, EXCLUSIVE])
@pytest.mark.parametrize("ours_first", [True, False])
def test_opens_are_seen_beside_another_program_and_both_answers_count(
    flags: int, ours_first: bool, group: Path, opener: Path, tmp_path: Path
) -> None:
    refused, allowed = node(tmp_path / "refused", FULL), node(tmp_path / "allowed", ZERO)
    with both(group, flags, ours_first=ours_first) as probe:
        for where in (group, group / "below"):
            assert not opened_in(where, opener, refused)
            assert opened_in(where, opener, allowed)
        seen = [(e.path, e.state, e.denial) for e in opens(drained(probe))]
        one_round = [(str(refused), "attempted", ""), (str(allowed), "attempted", "")]
        assert seen == one_round * 2
        key = probe.deny(str(group))
        assert not opened_in(group, opener, allowed)
        assert not opened_in(group, opener, refused)
        seen = [(e.path, e.state, e.denial) for e in opens(drained(probe))]
        assert seen == [(str(p), "denied", "denied") for p in (allowed, refused)]
        probe.allow(key)
        assert opened_in(group, opener, allowed)
        assert not opened_in(group, opener, refused)


def test_a_root_that_another_has_for_itself_is_told_and_nothing_stays(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group stands in for the hierarchy's root, which all tests of this machine share."""

    def root(host: Host) -> int:
        return os.open(group, os.O_RDONLY | os.O_DIRECTORY)

    monkeypatch.setattr(cgroup2, "open_root", root)
    for flags in (EXCLUSIVE, ALLOW_OVERRIDE):
        with another_program(group, FULL, flags):
            with pytest.raises(GpuwardenError) as error:
                DeviceOpenProbe([ZERO]).__enter__()
            assert isinstance(error.value, Denied) and "for itself" in str(error.value)
            assert not bpf_descriptors_besides_the_program()


def test_what_is_attached_and_never_called_is_not_relied_on(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached to a group that this program is not in, the probe would see nothing of it."""

    def elsewhere(host: Host) -> int:
        return os.open(group, os.O_RDONLY | os.O_DIRECTORY)

    monkeypatch.setattr(cgroup2, "open_root", elsewhere)
    with choose.chosen([ZERO], ways=("cgroup/dev",)) as choice:
        assert choice.probe is None
        assert "was not seen" in choice.refused[0].reason


def test_the_proof_leaves_no_trace() -> None:
    # What the proof opens is not watched here: anybody may open it meanwhile.
    with probing(EVERYTHING, UNUSED) as probe:
        assert drained(probe) == [] and probe.counts() == []
        assert probe.counters().hits == 0
        subprocess.run(["true"], check=True)
        with open("/dev/full", "rb"):
            events = drained(probe)
        assert not [e for e in events if isinstance(e, ExecEvent | OpenEvent)]


def bpf_descriptors_besides_the_program() -> list[str]:
    names = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and "bpf" in os.readlink(path):
            names.append(os.readlink(path))
    names.remove("anon_inode:bpf-prog")
    return names


# -------------------------------------------------------------------- runc's own

IN_CONTAINER = """
import sys
from pathlib import Path
from tests.support import containers
scratch, root, identity = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
with containers.bare_runc(scratch, root, identity=identity, cgroup="/gpuwarden-test/" + identity):
    print("started", flush=True)
    for line in sys.stdin:
        command = ["runc", "exec", identity, "/bin/busybox", "dd", "of=/dev/null", "count=0",
                   "if=" + line.strip()]
        import subprocess
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        print("opened" if done.returncode == 0 else "refused", flush=True)
"""


class V2Container:
    """A container of runc in a mount namespace that has cgroup version 2 only."""

    def __init__(self, scratch: Path, root: Path, identity: str) -> None:
        setup = 'umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec "$@"'
        child = (sys.executable, "-c", IN_CONTAINER, str(scratch), str(root), identity)
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", setup, "sh", *child],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "started\n"

    def open(self, path: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@contextmanager
def v2_container(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Opens a device node in such a container: ``opened`` or ``refused``."""
    root = containers.busybox_root(tmp_path / "root")
    node(root / "dev/refused", CPUID)
    node(root / "dev/allowed", FULL)  # runc allows it to every container
    with containers.no_new_cgroups():
        container = V2Container(tmp_path / "run", root, f"gpuwarden-test-v2-{RUN}")
        try:
            yield container.open
        finally:
            container.close()


@pytest.mark.parametrize("ours_first", [True, False])
def test_runcs_own_device_program_and_ours_both_answer(ours_first: bool, tmp_path: Path) -> None:
    require("runc", "busybox-static")
    identity = f"gpuwarden-test-v2-{RUN}"
    numbers = (CPUID, FULL)
    if ours_first:
        with probing(Settings(), *numbers) as probe, v2_container(tmp_path) as opened:
            check_both_answer(probe, opened, identity)
    else:
        with v2_container(tmp_path) as opened, probing(Settings(), *numbers) as probe:
            check_both_answer(probe, opened, identity)


def check_both_answer(probe: DeviceOpenProbe, opened: Callable[[str], str], identity: str) -> None:
    drained(probe)
    assert [opened("/dev/refused"), opened("/dev/allowed")] == ["refused", "opened"]
    seen = [
        (e.path, e.state, e.process.cgroup_path)
        for e in opens(drained(probe), how="open")
        if e.path in ("/dev/refused", "/dev/allowed")
    ]
    group = f"/gpuwarden-test/{identity}"
    assert seen == [
        ("/dev/refused", "attempted", group),
        ("/dev/allowed", "attempted", group),
    ]
    probe.deny(str(containers.cgroup_mounts()[""] / group[1:]))
    assert [opened("/dev/refused"), opened("/dev/allowed")] == ["refused", "refused"]
