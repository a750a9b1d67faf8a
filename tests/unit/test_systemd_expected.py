"""systemd as a source: what it shows, what its files say, and which cgroup names prove nothing.

tests/real/test_systemd.py asks a real systemd in both ways; here are the formats and the lies.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.expected import systemd
from gpuwarden.expected.systemd import units
from gpuwarden.expected.systemd.units import Directives, allotted_gpus, unit_of_path
from gpuwarden.host import CommandOutput
from gpuwarden.model import Gpu, Process, SourceRun, Workload
from gpuwarden.sensors import cgroup
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost

INVOCATION = "55851512c3cc4ecc9f43ea5eca2da69c"
# As systemd 252 printed it.
SHOWN = """User=nobody
UID=65534
ControlGroup=/system.slice/train.service
DeviceAllow=/dev/nvidia0 rw
DeviceAllow=char-nvidia-uvm rwm
Id=train.service
LoadState=loaded
ActiveState=active
FragmentPath=/etc/systemd/system/train.service
DropInPaths=
Transient=no
"""
MISSING = (
    "UID=[not set]\nId=gone.service\nLoadState=not-found\nActiveState=inactive\nTransient=no\n"
)
UNIT = "[Service]\nExecStart=/opt/train\nUser=alice\nDeviceAllow=/dev/nvidia2 rw\n"


class SystemdHost(RecordedHost):
    """A recorded tree; with ``printed`` it is local and systemctl answers so."""

    def __init__(self, root: Path, printed: str | Exception | None = None) -> None:
        super().__init__(root)
        self.printed = printed
        self.attributes: dict[str, bytes] = {}

    @property
    def is_local(self) -> bool:
        return self.printed is not None

    def extended_attribute(self, path: str, name: str) -> bytes:
        if path not in self.attributes:
            raise Unavailable(f"{path}: not there")
        return self.attributes[path]

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        assert argv[0] == "systemctl"
        if isinstance(self.printed, Exception):
            raise self.printed
        return CommandOutput(0 if self.printed else 1, (self.printed or "").encode(), b"no bus\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("proc/1", "run/systemd/units", "etc/systemd/system"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    (tmp_path / "etc/systemd/system/train.service").write_text(UNIT)
    (tmp_path / "run/systemd/units/invocation:train.service").symlink_to(INVOCATION)
    return tmp_path


def process(pid: int, path: str, hierarchy: str = "0::") -> Process:
    lines = (hierarchy + path,)
    return Process(pid=pid, start_time_ticks=1, cgroup_lines=lines, cgroup=cgroup.place(lines))


def ask(host: SystemdHost, *processes: Process) -> tuple[SourceRun, dict[str, Workload]]:
    seen = Seen()
    for one in processes:
        seen.add(one)
    run, workloads = systemd.read(host, seen)
    assert run.workloads == len(workloads)
    return run, {workload.name: workload for workload in workloads}


TRAIN = process(10, "/system.slice/train.service")


def test_a_unit_that_systemctl_confirms(root: Path) -> None:
    run, workloads = ask(SystemdHost(root, SHOWN + "\n" + MISSING), TRAIN)
    assert (run.state, run.running, run.reason) == ("ok", (), "")
    unit = workloads["train.service"]
    assert unit.gpus == ("minor:0",)
    assert (unit.user, unit.uid, unit.cgroup_path) == (
        "nobody",
        65534,
        "/system.slice/train.service",
    )


def test_a_unit_without_an_allotment_is_running_only(root: Path) -> None:
    shown = SHOWN.replace("DeviceAllow=/dev/nvidia0 rw\n", "")
    run, workloads = ask(SystemdHost(root, shown), TRAIN)
    assert (run.running, workloads) == (("train.service",), {})


@pytest.mark.parametrize(
    "change",
    [
        ("Transient=no", "Transient=yes"),
        ("FragmentPath=/etc/systemd/system/train.service", "FragmentPath="),
        ("FragmentPath=/etc", "FragmentPath=/nowhere"),
        ("DropInPaths=", "DropInPaths=/etc/systemd/system/loose.conf"),
        ("DropInPaths=", "DropInPaths=/etc/systemd/system/theirs.conf"),
    ],
)
def test_only_files_that_root_alone_can_change_allot(root: Path, change: tuple[str, str]) -> None:
    (root / "files.txt").write_text(
        "/etc/systemd/system/loose.conf mode=0666\n/etc/systemd/system/theirs.conf uid=1001\n"
    )
    run, workloads = ask(SystemdHost(root, SHOWN.replace(*change)), TRAIN)
    assert workloads == {}
    assert run.running == ("train.service",)


def test_a_link_into_a_home_directory_is_judged_where_it_leads(root: Path) -> None:
    home = root / "home/alice"
    home.mkdir(parents=True)
    (root / "etc/systemd/system/train.service").rename(home / "train.service")
    (root / "etc/systemd/system/train.service").symlink_to("/home/alice/train.service")
    assert "train.service" in ask(SystemdHost(root, SHOWN), TRAIN)[1]
    (root / "files.txt").write_text("/home/alice mode=040755 uid=1001\n")
    run, workloads = ask(SystemdHost(root, SHOWN), TRAIN)
    assert workloads == {}
    assert "/home/alice belongs to uid 1001" in run.reason


def test_a_unit_that_systemd_does_not_know_or_run_is_not_confirmed(root: Path) -> None:
    gone = process(11, "/system.slice/gone.service")
    run, workloads = ask(SystemdHost(root, MISSING), gone)
    assert (run.state, run.running, workloads) == ("ok", (), {})
    assert "does not run gone.service" in run.reason
    stopped = SHOWN.replace("ActiveState=active", "ActiveState=inactive")
    assert ask(SystemdHost(root, stopped), TRAIN)[0].running == ()


def test_a_cgroup_that_is_not_the_units_own_confirms_nothing(root: Path) -> None:
    imposter = process(12, "/other.slice/train.service")
    run, workloads = ask(SystemdHost(root, SHOWN), TRAIN, imposter)
    assert (run.running, workloads) == ((), {})
    assert "pid 12 carries the name of train.service outside its cgroup" in run.reason


def test_a_users_own_unit_with_a_system_units_name_spoils_the_name(root: Path) -> None:
    shown = SHOWN.replace("DeviceAllow=/dev/nvidia0 rw\n", "")
    nested = process(13, "/user.slice/user-1001.slice/user@1001.service/app.slice/train.service")
    run, workloads = ask(SystemdHost(root, shown), TRAIN, nested)
    assert (run.running, workloads) == ((), {})
    assert "pid 13" in run.reason


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/system.slice/train.service", ("train.service", "/system.slice/train.service")),
        (
            "/system.slice/system-gpu.slice/gpu@0.service/payload",
            ("gpu@0.service", "/system.slice/system-gpu.slice/gpu@0.service"),
        ),
        (
            "/user.slice/user-1.slice/user@1.service/app.slice/train.service",
            ("user@1.service", "/user.slice/user-1.slice/user@1.service"),
        ),
        (
            "/../../system.slice/train.service",
            ("train.service", "/system.slice/train.service"),
        ),
        ("/../train.service", None),
        ("/docker/abc/system.slice/train.service", None),
        ("/", None),
        ("", None),
    ],
)
def test_the_outermost_unit_is_the_systems(path: str, unit: tuple[str, str] | None) -> None:
    assert unit_of_path(path) == unit


def test_scopes_and_containers_are_nobodys_service(root: Path) -> None:
    host = SystemdHost(root, TimedOut("systemctl: must not be asked"))
    run, workloads = ask(
        host,
        process(20, "/system.slice/run-r1.scope"),
        process(21, "/user.slice/user-0.slice/session-3.scope"),
        process(22, f"/system.slice/docker-{'a' * 64}.scope"),
    )
    assert (run.state, run.reason, run.running, workloads) == ("ok", "", (), {})


@pytest.mark.parametrize("printed", [None, "", TimedOut("systemctl: no answer within 2 s")])
def test_without_an_answer_the_files_decide(root: Path, printed: str | Exception | None) -> None:
    run, workloads = ask(
        SystemdHost(root, printed), TRAIN, process(11, "/system.slice/gone.service")
    )
    assert run.state == "ok"
    assert workloads["train.service"].gpus == ("minor:2",)
    assert workloads["train.service"].user == "alice"
    assert workloads["train.service"].uid is None
    assert "does not run gone.service" in run.reason
    assert ("instead" in run.reason) == (printed is not None)


def test_the_cgroups_own_invocation_id_must_agree(root: Path) -> None:
    host = SystemdHost(root)
    mounted = "/sys/fs/cgroup/unified/system.slice/train.service"
    host.attributes[mounted] = INVOCATION.encode()
    assert "train.service" in ask(host, TRAIN)[1]
    host.attributes[mounted] = b"0" * 32
    run, workloads = ask(host, TRAIN)
    assert (run.running, workloads) == ((), {})


def test_drop_ins_masks_and_transient_files_on_disk(root: Path) -> None:
    folder = root / "etc/systemd/system/train.service.d"
    folder.mkdir()
    (folder / "20-later.conf").write_text("[Service]\nDeviceAllow=\nDeviceAllow=/dev/nvidia5\n")
    (folder / "10-sooner.conf").write_text("[Service]\nDeviceAllow=/dev/nvidia4\nUser=1005\n")
    unit = ask(SystemdHost(root), TRAIN)[1]["train.service"]
    assert unit.gpus == ("minor:5",)
    assert (unit.user, unit.uid) == (None, 1005)
    transient = root / "run/systemd/transient"
    transient.mkdir()
    (transient / "train.service").write_text(UNIT)
    run, workloads = ask(SystemdHost(root), TRAIN)
    assert (run.running, workloads) == (("train.service",), {})


def test_nothing_to_read_is_failed_not_empty(root: Path) -> None:
    (root / "run/systemd/units/invocation:train.service").unlink()
    (root / "run/systemd/units").rmdir()
    run, workloads = ask(SystemdHost(root, TimedOut("systemctl: no answer within 2 s")), TRAIN)
    assert (run.state, run.running, workloads) == ("failed", (), {})
    assert run.remedy


def test_absent_where_another_program_is_the_first_process(root: Path) -> None:
    (root / "proc/1/comm").write_text("tini\n")
    assert ask(SystemdHost(root), TRAIN)[0].state == "absent"
    (root / "proc/1/comm").unlink()
    assert ask(SystemdHost(root), TRAIN)[0].state == "absent"
    (root / "run/systemd/system").mkdir()
    assert ask(SystemdHost(root), TRAIN)[0].state == "ok"


@pytest.mark.parametrize(
    ("entries", "gpus"),
    [
        (["/dev/nvidia0 rw", "/dev/nvidia3"], ("minor:0", "minor:3")),
        (["/dev/nvidia0 m"], ()),
        (["/dev/nvidiactl rw", "/dev/nvidia-uvm rw", "char-nvidia-uvm"], ()),
        (["char-nvidia-frontend rw"], ("all",)),
        (["char-nvidia* rw"], ("all",)),
        (["char-drm rw"], ("all",)),
        (["char-pts rw", "/dev/null", "block-loop"], ()),
        (["/dev/char/195:1 rw", "/dev/char/195:255 rw"], ("minor:1",)),
        (["/dev/dri/renderD128 rw"], ("uuid:GPU-a",)),
        (["/dev/dri/card1"], ("uuid:GPU-a",)),
        (["/dev/dri/renderD130"], ("minor:130",)),
        (["/dev/dri/card7"], ()),
        (["/dev/kfd rw"], ("all",)),
        (["/dev/kfd rw", "/dev/dri/renderD130"], ("minor:130",)),
        (["/dev/accel/accel2"], ("minor:2",)),
        (["", "  "], ()),
    ],
)
def test_device_allow_names_gpus(entries: list[str], gpus: tuple[str, ...]) -> None:
    known = [Gpu(id="GPU-a", uuid="GPU-a", render_minor=128, card_minor=1)]
    assert allotted_gpus(entries, known) == gpus


def test_a_units_file_is_read_as_systemd_does() -> None:
    found = Directives()
    found.apply(
        "DeviceAllow=/dev/nvidia9\n[Unit]\nDeviceAllow=/dev/nvidia8\n[Service]\n"
        "# DeviceAllow=/dev/nvidia7\n; DeviceAllow=/dev/nvidia6\n DeviceAllow = /dev/nvidia%i \\\n"
        "# a comment within\n  rw\nUser=%p\n",
        "gpu@3.service",
    )
    assert found.device_allow == ["/dev/nvidia3  rw"]
    assert found.user == "gpu"


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_malformed(data: bytes) -> None:
    text = data.decode("utf-8", "backslashreplace")
    for head in ("", "Id=a.service\n", "[Service]\nDeviceAllow="):
        try:
            for unit in units.parse_show((head + text).encode()).values():
                allotted_gpus(unit.device_allow, [])
        except Malformed:
            pass
        found = Directives()
        found.apply(head + text, "a@b.service")
        allotted_gpus(found.device_allow, [])
    found_unit = unit_of_path(text)
    assert found_unit is None or found_unit[1].startswith("/")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(max_size=60), hierarchy=st.sampled_from(["", "name=systemd", "cpu", "x:y"]))
def test_any_cgroup_path_gives_a_run(root: Path, path: str, hierarchy: str) -> None:
    seen = Seen()
    lines = (f"0::/system.slice/{path}.service", f"1:{hierarchy}:/{path}")
    seen.add(Process(pid=1, start_time_ticks=1, cgroup_lines=lines, cgroup=cgroup.place(lines)))
    for printed in (SHOWN, None):
        run, workloads = systemd.read(SystemdHost(root, printed), seen)
        assert run.state == "ok"
        assert path == "train" or workloads == []
