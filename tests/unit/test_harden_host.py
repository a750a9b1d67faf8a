"""What `gpuwarden harden host` says of recorded hosts: open, sound, not there or not known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Malformed
from gpuwarden.harden import host as report
from gpuwarden.harden import host_containers, host_devices, host_kernel
from gpuwarden.harden.setting import Setting
from gpuwarden.outputs.told import Call
from gpuwarden.policy import Evidence, Policy
from tests.support.recorded_host import RecordedHost

STAT = "{pid} ({name}) S 1 {pid} {pid} 0 -1 4194560 1 1 1 1 1 1 1 1 20 0 1 0 {pid} 1 1 " + "0 " * 30
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
SOUND = {
    "/proc/devices": "Character devices:\n195 nvidia\n\nBlock devices:\n",
    "/proc/1/mounts": "proc /proc proc rw,nosuid,hidepid=invisible 0 0\n",
    "/proc/1/stat": STAT.format(pid=1, name="systemd"),
    "/proc/sys/kernel/yama/ptrace_scope": "1\n",
    "/proc/sys/kernel/unprivileged_bpf_disabled": "2\n",
    "/proc/sys/kernel/modules_disabled": "0\n",
    "/sys/module/module/parameters/sig_enforce": "Y\n",
    "/proc/driver/nvidia/params": "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\n"
    'DeviceFileMode: 432\nRmProfilingAdminOnly: 1\nRegistryDwords: ""\n',
    "/etc/group": "root:x:0:\nvideo:x:44:alice,bob\nrender:x:105:\ndocker:x:999:\n",
    TOOLKIT: "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    '[nvidia-container-cli]\nldconfig = "@/sbin/ldconfig"\n',
    "/etc/docker/daemon.json": '{"runtimes": {"nvidia": {"path": "x"}}}',
    "/etc/containerd/config.toml": "version = 2\n",
    "/etc/cdi/nvidia.yaml": "cdiVersion: 0.5.0\n",
}
DEVICES = "/dev/nvidia0 195 0 mode=0660 gid=44\n/dev/nvidiactl 195 255 mode=0660 gid=44\n"
FILES = "/etc/cdi/nvidia.yaml mode=0644\n"


class Tree:
    """A recorded host, sound until something of it is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices = DEVICES
        self.files = FILES
        for path, text in SOUND.items():
            self.write(path, text)

    def write(self, path: str, text: str | bytes) -> None:
        place = self.folder / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text if isinstance(text, bytes) else text.encode())

    def remove(self, path: str) -> None:
        (self.folder / path.lstrip("/")).unlink()

    def docker_group(self, *members: str) -> None:
        self.files += "/run/docker.sock mode=0140660 gid=999\n"
        self.write("/etc/group", f"docker:x:999:{','.join(members)}\n")

    def process(self, pid: int, name: str, uid: int) -> None:
        self.write(f"/proc/{pid}/stat", STAT.format(pid=pid, name=name))
        self.files += f"/proc/{pid} uid={uid} mode=040555\n"

    @property
    def host(self) -> RecordedHost:
        (self.folder / "devices.txt").write_text(self.devices)
        (self.folder / "files.txt").write_text(self.files)
        return RecordedHost(self.folder)

    def settings(self, policy: Policy | None = None, path: str | None = None) -> list[Setting]:
        return list(report.examine(self.host, policy or Policy(), path))

    def states(self, policy: Policy | None = None, path: str | None = None) -> dict[str, str]:
        """Setting → its gravest state: settings come with the open ones first."""
        found: dict[str, str] = {}
        for setting in self.settings(policy, path):
            found.setdefault(setting.id, setting.state)
        return found


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_sound_host_has_nothing_open_and_nothing_unknown(tree: Tree) -> None:
    grave = [one for one in tree.settings() if one.state in ("open", "unknown")]
    assert grave == []
    assert {one.id for one in tree.settings() if one.state == "sound"} >= {
        "device-nodes",
        "driver-device-mode",
        "profiling-counters",
        "gpu-groups",
        "toolkit-envvar",
        "toolkit-ldconfig",
        "toolkit-files",
        "default-runtime",
        "hidepid",
        "ptrace-scope",
        "unprivileged-bpf",
        "kernel-modules",
    }
    (groups,) = [one for one in tree.settings() if one.id == "gpu-groups" and "video" in one.now]
    assert "alice, bob" in groups.now


CHANGES: dict[str, tuple[str, Callable[[Tree], object]]] = {
    "world-writable node": (
        "device-nodes",
        lambda t: setattr(t, "devices", DEVICES + "/dev/nvidia1 195 1 mode=0666\n"),
    ),
    "world-readable node": (
        "device-nodes",
        lambda t: setattr(t, "devices", DEVICES + "/dev/nvidia1 195 1 mode=0664\n"),
    ),
    "driver's default mode": (
        "driver-device-mode",
        lambda t: t.write(
            "/proc/driver/nvidia/params",
            "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
            "RmProfilingAdminOnly: 1\n",
        ),
    ),
    "profiling for all": (
        "profiling-counters",
        lambda t: t.write("/proc/driver/nvidia/params", "RmProfilingAdminOnly: 0\n"),
    ),
    "envvar allowed": (
        "toolkit-envvar",
        lambda t: t.write(
            TOOLKIT, "accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"
        ),
    ),
    "envvar not set": ("toolkit-envvar", lambda t: t.write(TOOLKIT, "disable-require = false\n")),
    "container's ldconfig": (
        "toolkit-ldconfig",
        lambda t: t.write(TOOLKIT, '[nvidia-container-cli]\nldconfig = "/sbin/ldconfig"\n'),
    ),
    "container's ldconfig by feature": (
        "toolkit-container-ldconfig",
        lambda t: t.write(TOOLKIT, "[features]\nallow-ldconfig-from-container = true\n"),
    ),
    "CDI file of a user": (
        "toolkit-files",
        lambda t: setattr(t, "files", "/etc/cdi/nvidia.yaml mode=0644 uid=1000\n"),
    ),
    "CDI directory for all": (
        "toolkit-files",
        lambda t: setattr(t, "files", FILES + "/etc/cdi mode=040777\n"),
    ),
    "docker's default": (
        "default-runtime",
        lambda t: t.write("/etc/docker/daemon.json", '{"default-runtime": "nvidia"}'),
    ),
    "containerd's default": (
        "default-runtime",
        lambda t: t.write(
            "/etc/containerd/config.toml",
            '[plugins."io.containerd.grpc.v1.cri".containerd]\ndefault_runtime_name = "nvidia"\n',
        ),
    ),
    "docker's socket for all": (
        "engine-sockets",
        lambda t: setattr(t, "files", FILES + "/run/docker.sock mode=0140666\n"),
    ),
    "docker's group": ("engine-sockets", lambda t: t.docker_group("alice")),
    "no hidepid": ("hidepid", lambda t: t.write("/proc/1/mounts", "proc /proc proc rw 0 0\n")),
    "ptrace for all": (
        "ptrace-scope",
        lambda t: t.write("/proc/sys/kernel/yama/ptrace_scope", "0\n"),
    ),
    "no Yama": ("ptrace-scope", lambda t: t.remove("/proc/sys/kernel/yama/ptrace_scope")),
    "BPF for all": (
        "unprivileged-bpf",
        lambda t: t.write("/proc/sys/kernel/unprivileged_bpf_disabled", "0\n"),
    ),
    "any module": (
        "kernel-modules",
        lambda t: t.write("/sys/module/module/parameters/sig_enforce", "N\n"),
    ),
    "persistence daemon as root": (
        "persistence-daemon",
        lambda t: t.process(50, "nvidia-persiste", 0),
    ),
    "MPS directory of a user": (
        "mps-directory",
        lambda t: setattr(t, "files", FILES + "/tmp/nvidia-mps uid=1000 mode=040755\n"),
    ),
    "state for all": (
        "own-state",
        lambda t: setattr(t, "files", FILES + "/var/lib/gpuwarden mode=040755\n"),
    ),
    "journal that others write": (
        "own-state",
        lambda t: setattr(
            t,
            "files",
            FILES + "/var/lib/gpuwarden mode=040700\n/var/lib/gpuwarden/journal mode=0666\n",
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_open_is_told_with_its_reason(tree: Tree, change: str) -> None:
    wanted, make = CHANGES[change]
    assert tree.states().get(wanted) in (None, "sound", "absent")
    make(tree)
    settings = [one for one in tree.settings() if one.id == wanted and one.state == "open"]
    assert settings, change
    for one in settings:
        assert one.now
        assert one.why
        assert one.source.startswith("/")
        assert one.commands or change == "no Yama"


@pytest.mark.parametrize(
    ("wanted", "path", "text"),
    [
        ("toolkit-envvar", TOOLKIT, "= nonsense"),
        ("toolkit-envvar", TOOLKIT, f"{host_containers._ENVVAR} = 1\n"),
        ("toolkit-ldconfig", TOOLKIT, "nvidia-container-cli = 7\n"),
        ("default-runtime", "/etc/docker/daemon.json", "{"),
        ("default-runtime", "/etc/docker/daemon.json", "[]"),
        ("default-runtime", "/etc/containerd/config.toml", "[[["),
        ("driver-device-mode", "/proc/driver/nvidia/params", "DeviceFileMode: many\n"),
        ("profiling-counters", "/proc/driver/nvidia/params", "ModifyDeviceFiles: 1\n"),
        ("ptrace-scope", "/proc/sys/kernel/yama/ptrace_scope", "yes\n"),
        ("hidepid", "/proc/1/mounts", "tmpfs /tmp tmpfs rw 0 0\n"),
    ],
)
def test_what_cannot_be_read_is_unknown_and_never_sound(
    tree: Tree, wanted: str, path: str, text: str
) -> None:
    tree.write(path, text)
    states = [one.state for one in tree.settings() if one.id == wanted]
    assert "unknown" in states
    assert not [one for one in tree.settings() if one.id == wanted and one.source == path
                and one.state == "sound"]  # fmt: skip


def test_what_may_not_be_read_is_unknown(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: RecordedHost, path: str, limit: int = 0) -> bytes:
        raise Denied(f"{path}: permission denied")

    monkeypatch.setattr(RecordedHost, "read_bytes", denied)
    states = tree.states()
    for name in ("device-nodes", "driver-device-mode", "toolkit-envvar", "hidepid",
                 "kernel-modules", "ptrace-scope"):  # fmt: skip
        assert states[name] == "unknown", name


def test_a_node_without_any_of_it_has_nothing_to_open(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for path in ("/proc/devices", "/proc/driver/nvidia/params", TOOLKIT):
        tree.remove(path)
    tree.write("/proc/devices", "Character devices:\n  1 mem\n")
    tree.devices = ""
    states = tree.states()
    for name in ("device-nodes", "driver-device-mode", "profiling-counters", "toolkit-envvar"):
        assert states[name] == "absent"


def test_a_locked_kernel_loads_no_unsigned_module(tree: Tree) -> None:
    tree.write("/sys/module/module/parameters/sig_enforce", "N\n")
    tree.write("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    assert tree.states()["kernel-modules"] == "sound"
    tree.write("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    assert tree.states()["kernel-modules"] == "open"
    for path in ("/sys/module/module/parameters/sig_enforce", "/sys/kernel/security/lockdown",
                 "/proc/sys/kernel/modules_disabled"):  # fmt: skip
        tree.remove(path)
    assert tree.states()["kernel-modules"] == "sound"
    tree.write("/proc/modules", "")
    assert tree.states()["kernel-modules"] == "unknown"


def test_a_driver_that_leaves_its_nodes_alone_is_not_asked_for_their_mode(tree: Tree) -> None:
    params = SOUND["/proc/driver/nvidia/params"].replace("432", "438")
    tree.write("/proc/driver/nvidia/params", params)
    assert tree.states()["driver-device-mode"] == "open"
    params = params.replace("ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0")
    tree.write("/proc/driver/nvidia/params", params)
    assert tree.states()["driver-device-mode"] == "sound"


def test_the_toolkit_without_a_file_has_its_defaults(tree: Tree) -> None:
    tree.remove(TOOLKIT)
    tree.write("/usr/bin/nvidia-container-runtime", "")
    (setting,) = [one for one in tree.settings() if one.id == "toolkit-envvar"]
    assert setting.state == "open"
    assert "the default" in setting.now


def test_own_files_are_root_s_alone(tree: Tree) -> None:
    key, policy_file = "/etc/gpuwarden/key.pem", "/etc/gpuwarden/policy.yaml"
    policy = Policy(
        signing_key=key,
        evidence=Evidence(directory="/srv/evidence"),
        sinks=["webhook:https://hooks.example.net/s3cret"],
    )
    tree.write(key, "")
    tree.write(policy_file, "")
    tree.files = f"{key} mode=0640 gid=100\n{policy_file} mode=0646\n/srv/evidence mode=040700\n"
    states = tree.states(policy, policy_file)
    assert states["own-key"] == "open"
    assert states["own-policy"] == "open"
    assert states["own-policy-sinks"] == "open"
    assert states["own-state"] in ("sound", "absent")
    # Nobody comes to what lies in a directory that is closed, whoever may read it.
    tree.files += "/etc/gpuwarden mode=040700\n"
    tree.files = tree.files.replace("mode=0640 gid=100", "mode=0644").replace("0646", "0644")
    states = tree.states(policy, policy_file)
    assert {states[name] for name in ("own-key", "own-policy", "own-policy-sinks")} == {"sound"}


def test_text_and_json_say_the_same_and_the_exit_code_is_the_gravest(tree: Tree) -> None:
    class Arguments:
        root = str(tree.folder)
        format = "json"

    def told(form: str) -> tuple[str, int]:
        Arguments.format = form
        arguments: Any = Arguments()
        result = report.run(
            Call(arguments, Policy(), None, print, lambda _: False, width=100, colour=False)
        )
        return result.text, result.code

    tree.write("/proc/1/mounts", "proc /proc proc rw 0 0\n")
    tree.write("/etc/docker/daemon.json", '{"default-runtime": "nvidia\\u001b[2J\\n"}')
    assert tree.host
    text, code = told("table")
    assert code == 1
    assert "$ mount -o remount,hidepid=invisible /proc" in text
    assert "\x1b" not in text
    assert "Nothing was changed." in text
    document, code = told("json")
    assert code == 1
    loaded = json.loads(document)
    assert loaded["schema"] == "gpuwarden.hardening"
    assert {one["id"] for one in loaded["settings"] if one["state"] == "open"} >= {
        "hidepid",
        "default-runtime",
    }
    assert "\x1b" not in document


@given(st.text(max_size=300))
def test_any_text_is_toml_groups_params_and_mounts_or_malformed(text: str) -> None:
    try:
        host_containers.parse_toml(text)
    except Malformed:
        pass
    for judged in (host_containers._docker, host_containers._containerd):
        try:
            judged(text)
        except Malformed:
            pass
    for gid, members in host_devices.parse_groups(text).values():
        assert gid >= 0
        assert all(members)
    host_devices.parse_params(text)
    host_kernel.proc_options(text)


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=8) | st.integers(),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from([host_containers._ENVVAR, "features",
                                                       "nvidia-container-cli", "ldconfig"]),
                                      inner, max_size=4), max_leaves=12))  # fmt: skip
def test_any_values_of_the_toolkit_are_judged(value: object) -> None:
    settings = value if isinstance(value, dict) else {}
    setting = host_containers._boolean(
        host_containers.ENVVAR, settings, host_containers._ENVVAR, default=True
    )
    known = settings.get(host_containers._ENVVAR, True)
    expected = {True: "open", False: "sound"}.get(known) if isinstance(known, bool) else "unknown"
    assert setting.state == expected
