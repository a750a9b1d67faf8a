"""The container image, built for real and run as the DaemonSet runs it: `make test-image`.

Minutes at first: a Debian base is bootstrapped and the image built in build/image, where both stay
for the next run. No kubelet can be had here; the pod's settings are put to podman and runc, with
the seccomp profile that ships, since theirs here is from before CAP_BPF.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden import __version__
from tests.support.chart import ROOT, pod_of, rendered
from tests.support.containers import wait_until
from tests.support.packages import require, require_root
from tests.support.watching import GPU, READY, devices_file

BED = ROOT / "build/image"
BASE, IMAGE = "localhost/debian:base", "localhost/gpuwarden:test"
CONTAINERFILE = ROOT / "deploy/container/Containerfile"
SECCOMP = ROOT / "deploy/container/seccomp.json"
MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
LIMITS = ("--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1024:1024")
SECONDS = 1500
NODE = "gpu-node-1"


def podman(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [
        "podman", "--root", str(BED / "storage"), "--runroot", str(BED / "run"),
        "--storage-driver", "overlay", "--cgroup-manager", "cgroupfs", "--events-backend", "file",
        "--runtime", "runc", *arguments,
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 or not check, done.stderr[-4000:] + done.stdout[-2000:]
    return done


def build(base: str, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return podman(
        "build", "--network", "host", *LIMITS, "--build-arg", f"BASE={base}",
        "--file", str(CONTAINERFILE), "--tag", IMAGE, *options, str(ROOT), check=check,
    )  # fmt: skip


@pytest.fixture(scope="module")
def base() -> str:
    """A Debian that is named by its digest."""
    require_root()
    require("podman", "runc", "debootstrap")
    BED.mkdir(parents=True, exist_ok=True)
    if podman("image", "exists", BASE, check=False).returncode != 0:
        release = Path("/etc/os-release").read_text()
        (codename,) = re.findall(r"(?m)^VERSION_CODENAME=\"?(\w+)", release)
        root = BED / "base"
        shutil.rmtree(root, ignore_errors=True)
        argv = ["debootstrap", "--variant=minbase", "--include=ca-certificates", codename]
        subprocess.run([*argv, str(root), MIRROR], check=True, timeout=SECONDS)
        # Where a proxy stands between here and the mirrors, its certificate is among these.
        shutil.copy(f"/{CERTIFICATES}", root / CERTIFICATES)
        with subprocess.Popen(
            ["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE
        ) as archive:
            (BED / "base.tar").write_bytes(archive.stdout.read() if archive.stdout else b"")
        podman("import", str(BED / "base.tar"), BASE)
        (BED / "base.tar").unlink()
        shutil.rmtree(root)
    digest = podman("image", "inspect", "--format", "{{.Digest}}", BASE).stdout.strip()
    return f"{BASE}@{digest}"


@pytest.fixture(scope="module")
def image(base: str) -> str:
    build(base)
    return IMAGE


def test_a_base_without_a_digest_is_refused(base: str) -> None:
    refused = build(base.partition("@")[0], "--layers=false", check=False)
    assert refused.returncode != 0
    assert "must name its digest" in refused.stderr + refused.stdout


def test_without_a_right_it_judges_recorded_nodes(image: str) -> None:
    strict = [
        "--network", "none", "--cap-drop", "ALL", "--read-only", *LIMITS,
        "--security-opt", "no-new-privileges",
    ]  # fmt: skip
    assert podman("run", "--rm", *strict, image, "--version").stdout == f"gpuwarden {__version__}\n"
    settings = json.loads(podman("image", "inspect", image).stdout)[0]["Config"]
    assert settings["User"] == "65532:65532"
    recorded = f"{ROOT}/examples:/examples:ro"
    done = podman(
        "run", "--rm", *strict, "--volume", recorded, image,
        "scan", "/examples/compromised-node.json.gz", "--format", "json", check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "gpu_cryptominer" in {found["rule"] for found in json.loads(done.stdout)["findings"]}


def settings_of_the_pod(directory: Path) -> tuple[list[str], list[str]]:
    """The chart's DaemonSet as (options of `podman run`, arguments of gpuwarden)."""
    pod = pod_of(rendered())
    (one,) = pod["containers"]
    context = one["securityContext"]
    assert pod["hostPID"] and context["readOnlyRootFilesystem"]
    assert not context["allowPrivilegeEscalation"]
    options = ["--network", "none", "--pid", "host", "--cgroupns", "private", *LIMITS]
    options += ["--pids-limit", "-1", "--read-only", "--read-only-tmpfs=false"]
    options += ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
    options += ["--security-opt", "no-new-privileges", "--security-opt", f"seccomp={SECCOMP}"]
    options += ["--cap-drop", "ALL"]
    options += [word for name in context["capabilities"]["add"] for word in ("--cap-add", name)]
    options += ["--env", f"NODE_NAME={NODE}"]
    for mount in one["volumeMounts"]:
        options += ["--mount", _mount(mount, pod["volumes"], directory)]
    # A GPU's driver is on no machine for tests: 203 is taken for one.
    options += ["--volume", f"{devices_file(directory)}:/host/proc/devices:ro"]
    return options, list(one["args"])


def _mount(mount: dict[str, Any], volumes: list[dict[str, Any]], directory: Path) -> str:
    (volume,) = (one for one in volumes if one["name"] == mount["name"])
    if "configMap" in volume:
        source = directory / "policy"
        source.mkdir(exist_ok=True)
        data = rendered()["ConfigMap", volume["configMap"]["name"]]["data"]
        for name, text in data.items():
            (source / name).write_text(text)
    elif mount.get("readOnly"):
        source = Path(volume["hostPath"]["path"])
    else:
        # What belongs to the node is this test's own.
        source = directory / mount["name"]
        source.mkdir(mode=0o755, exist_ok=True)
    read_only = ",ro=true" if mount.get("readOnly") else ""
    propagation = {"HostToContainer": "rslave"}.get(mount.get("mountPropagation", ""), "rprivate")
    target = mount["mountPath"]
    return f"type=bind,src={source},dst={target}{read_only},bind-propagation={propagation}"


@pytest.fixture
def agent(image: str, tmp_path: Path) -> Iterator[str]:
    """The name of a container that runs as the DaemonSet's pods do."""
    options, arguments = settings_of_the_pod(tmp_path)
    name = f"gpuwarden-image-{os.getpid()}"
    podman("run", "--detach", "--name", name, *options, image, *arguments, "--events")
    try:
        wait_until(lambda: READY in podman("logs", name).stderr, "the start", 60.0)
        yield name
    finally:
        podman("rm", "--force", "--time", "5", name, check=False)


def lines(agent: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in podman("logs", agent).stdout.splitlines()]


def inside(agent: str, code: str) -> str:
    python = "/opt/gpuwarden/bin/python"
    return podman("exec", agent, python, "-c", code).stdout.strip()


def test_in_a_pod_it_sees_the_first_open_of_a_device(agent: str) -> None:
    assert "eBPF (cgroup/dev)" in podman("logs", agent).stderr
    holder = subprocess.Popen(
        [sys.executable, "-c", "import time; f = open('/dev/cpu/0/cpuid', 'rb'); time.sleep(60)"]
    )
    try:
        found: list[dict[str, Any]] = []

        def is_told() -> bool:
            found[:] = [
                line
                for line in lines(agent)
                if line["schema"] == "gpuwarden.event" and line["process"]["pid"] == holder.pid
            ]
            return any(line["state"] == "opened" for line in found)

        wait_until(is_told, "the open", 30.0)
    finally:
        holder.kill()
        holder.wait()
    event = found[0]
    assert (event["device"]["major"], event["device"]["minor"]) == GPU
    assert event["node"] == NODE
    assert event["process"]["exe"] == os.path.realpath(sys.executable)
    # In a cgroup namespace of its own it sees where a process is from outside.
    assert event["how"] == "open"


def test_it_is_ready_and_can_write_nothing_of_the_node(agent: str) -> None:
    ask = (
        "import urllib.request as r, urllib.error as e\n"
        "try: print(r.urlopen('http://127.0.0.1:9835/healthz', timeout=5).status)\n"
        "except e.HTTPError as error: print(error.code, error.read().decode())"
    )
    wait_until(lambda: inside(agent, ask) == "200", "readiness", 60.0)
    attempt = (
        "import os\n"
        "for path in ('/host/etc/x', '/host/run/x', '/x', '/tmp/x'):\n"
        "    try: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)); print(path)\n"
        "    except OSError: pass"
    )
    assert inside(agent, attempt) == ""
    leave = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "print(*(libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)))"
    )
    assert inside(agent, leave) == "-1 -1 -1"
    status = inside(agent, "print(open('/proc/self/status').read())")
    look = ("gpuwarden", "doctor", "--root", "/host", "--format", "json")
    doctor = podman("exec", agent, *look, check=False)
    states = {one["name"]: one["state"] for one in json.loads(doctor.stdout)["sensors"]}
    # On machines for tests the first process may be closed to root itself.
    assert states.pop("holders") in ("ok", "partial")
    assert set(states.values()) <= {"ok", "absent"}, states
    # Although its device node is closed to containers.
    assert states["kernel_log"] == "ok"
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status


def test_it_ends_when_it_is_told_to(agent: str) -> None:
    begun = time.monotonic()
    podman("stop", "--time", "20", agent)
    # Not by the kill that follows after twenty seconds.
    assert podman("inspect", "--format", "{{.State.ExitCode}}", agent).stdout.strip() == "0"
    assert time.monotonic() - begun < 20
