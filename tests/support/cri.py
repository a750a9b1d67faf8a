"""A real containerd of our own, and real pods made on it through CRI, without a kubelet."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuwarden.errors import GpuwardenError
from gpuwarden.wire.unix_grpc import UnixChannel, load
from tests.support.containers import root_archive, run, wait_until

SERVICE = "/runtime.v1.RuntimeService/"
_NODE = 2  # NamespaceMode: the host's own namespace

_CONFIG = """version = 2
root = "{root}"
state = "{state}"
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/gpuwarden-test:1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{root}/cni"
[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""


@dataclass(slots=True)
class PodSpec:
    """What a test pod is to be like."""

    name: str
    uid: str
    namespace: str = "team-a"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[tuple[str, str]] = ()
    """(path on the host, path in the container)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    privileged: bool = False
    mounts: Sequence[tuple[str, str]] = ()
    command: Sequence[str] = ("/bin/sleep", "1000")


@dataclass(slots=True)
class RunningPod:
    """A pod that runs: its sandbox, its one container and that one's first process."""

    sandbox_id: str
    container_id: str
    pid: int


class Containerd:
    """A containerd that listens on its own socket."""

    def __init__(self, scratch: Path, socket: Path) -> None:
        self.socket = socket
        self.log = scratch / "containerd.log"
        self.messages: ModuleType = load("gpuwarden.wire.cri_pb2")
        config = scratch / "containerd.toml"
        config.write_text(
            _CONFIG.format(root=scratch / "root", state=scratch / "state", socket=socket)
        )
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["containerd", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._sandboxes: list[str] = []

    def call(self, method: str, request: Any, response: Any) -> Any:
        with UnixChannel(str(self.socket), deadline_seconds=30.0) as channel:
            return channel.call(SERVICE + method, request, response)

    def wait(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            try:
                self.call("Version", self.messages.VersionRequest(), self.messages.VersionResponse)
            except GpuwardenError:
                return False
            return True

        wait_until(answers, "containerd answering on CRI")

    def load_image(self, root: Path, scratch: Path, reference: str) -> None:
        archive = _docker_archive(root_archive(root, scratch / "layer.tar"), scratch, reference)
        run(
            "ctr",
            "--address",
            str(self.socket),
            "--namespace",
            "k8s.io",
            "images",
            "import",
            "--snapshotter",
            "native",
            str(archive),
        )

    @property
    def pid(self) -> int:
        """containerd's own process; its pods' shims are others."""
        return self._process.pid

    def start_pod(self, spec: PodSpec, image: str) -> RunningPod:
        m = self.messages
        kubernetes = {
            "io.kubernetes.pod.name": spec.name,
            "io.kubernetes.pod.namespace": spec.namespace,
            "io.kubernetes.pod.uid": spec.uid,
        }
        sandbox = m.PodSandboxConfig(
            metadata=m.PodSandboxMetadata(name=spec.name, uid=spec.uid, namespace=spec.namespace),
            log_directory=str(self.log.parent / "pods"),
            labels={**kubernetes, **spec.labels},
            annotations=dict(spec.annotations),
            linux=m.LinuxPodSandboxConfig(
                cgroup_parent=f"/kubepods/burstable/pod{spec.uid}",
                security_context=m.LinuxSandboxSecurityContext(
                    namespace_options=m.NamespaceOption(network=_NODE), privileged=spec.privileged
                ),
            ),
        )
        sandbox_id = self.call(
            "RunPodSandbox", m.RunPodSandboxRequest(config=sandbox), m.RunPodSandboxResponse
        ).pod_sandbox_id
        self._sandboxes.append(sandbox_id)
        container = m.ContainerConfig(
            metadata=m.ContainerMetadata(name="main"),
            image=m.ImageSpec(image=image),
            command=list(spec.command),
            envs=[m.KeyValue(key=k, value=v) for k, v in spec.environment.items()],
            devices=[
                m.Device(host_path=host, container_path=inside, permissions="rwm")
                for host, inside in spec.devices
            ],
            mounts=[m.Mount(host_path=host, container_path=to) for host, to in spec.mounts],
            labels={**kubernetes, "io.kubernetes.container.name": "main"},
            log_path="main.log",
            linux=m.LinuxContainerConfig(
                security_context=m.LinuxContainerSecurityContext(
                    privileged=spec.privileged, namespace_options=m.NamespaceOption(network=_NODE)
                )
            ),
        )
        container_id = self.call(
            "CreateContainer",
            m.CreateContainerRequest(
                pod_sandbox_id=sandbox_id, config=container, sandbox_config=sandbox
            ),
            m.CreateContainerResponse,
        ).container_id
        self.call(
            "StartContainer",
            m.StartContainerRequest(container_id=container_id),
            m.StartContainerResponse,
        )
        status = self.call(
            "ContainerStatus",
            m.ContainerStatusRequest(container_id=container_id, verbose=True),
            m.ContainerStatusResponse,
        )
        return RunningPod(sandbox_id, container_id, int(json.loads(status.info["info"])["pid"]))

    def stop_pod(self, pod: RunningPod) -> None:
        """Ends a pod as a kubelet does: stopped, still listed."""
        m = self.messages
        self.call(
            "StopContainer",
            m.StopContainerRequest(container_id=pod.container_id, timeout=0),
            m.StopContainerResponse,
        )
        self.call(
            "StopPodSandbox",
            m.StopPodSandboxRequest(pod_sandbox_id=pod.sandbox_id),
            m.StopPodSandboxResponse,
        )

    def close(self) -> None:
        m = self.messages
        for sandbox in self._sandboxes:
            for method, request, response in (
                ("StopPodSandbox", m.StopPodSandboxRequest, m.StopPodSandboxResponse),
                ("RemovePodSandbox", m.RemovePodSandboxRequest, m.RemovePodSandboxResponse),
            ):
                try:
                    self.call(method, request(pod_sandbox_id=sandbox), response)
                except GpuwardenError:
                    continue
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _docker_archive(layer: Path, scratch: Path, reference: str) -> Path:
    """A one-layer image in the form that ``docker save`` writes."""
    data = layer.read_bytes()
    layer_digest = hashlib.sha256(data).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
            "os": "linux",
            "config": {"Cmd": ["/bin/sleep", "100000"], "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps(
        [
            {
                "Config": config_name,
                "RepoTags": [reference],
                "Layers": [f"{layer_digest}/layer.tar"],
            }
        ]
    ).encode()
    archive = scratch / "image.tar"
    with tarfile.open(archive, "w") as tar:
        for name, content in (
            (config_name, config),
            (f"{layer_digest}/layer.tar", data),
            ("manifest.json", manifest),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive


@contextmanager
def containerd(scratch: Path, socket: Path) -> Iterator[Containerd]:
    """A containerd that answers on CRI, and is gone with its pods afterwards."""
    scratch.mkdir(parents=True, exist_ok=True)
    socket.parent.mkdir(parents=True, exist_ok=True)
    engine = Containerd(scratch, socket)
    try:
        engine.wait()
        yield engine
    finally:
        engine.close()
        _unmount_below(scratch)


def _unmount_below(directory: Path) -> None:
    """Takes off the mounts that a killed shim left under ``directory``."""
    mounts = [
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4].startswith(f"{directory}/")
    ]
    for mount in sorted(mounts, key=len, reverse=True):
        run("umount", "--lazy", mount, check=False)
