"""Nodes in a few lines: a builder of snapshots in which a test states only what matters.

Everything unsaid is ordinary: all sensors worked, no source of the expected set is there, the
observer is root in the host's pid namespace, GPUs have 80 GiB, a process is a training script of
the human account ``alice`` under a root-owned /usr/bin/python3.11.

    node = NodeBuilder()
    node.gpu(0)
    node.process(4242, exe="/tmp/x", argv=("x",))
    node.client(4242, sm_percent=99)
    report = node.judge()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuwarden.command_lines.shell_words import without_schedule
from gpuwarden.finding import Report, Row
from gpuwarden.judge import judge
from gpuwarden.model import (
    AccountedProcess,
    ClientKind,
    Connection,
    Container,
    DeviceNode,
    Executable,
    Gap,
    Gpu,
    GpuClient,
    HiddenProcess,
    Holder,
    LibraryCheck,
    NodeFacts,
    NodeKind,
    PersistenceEntry,
    Process,
    SensorRun,
    SensorState,
    Snapshot,
    SourceRun,
    SourceState,
    Workload,
    XidEvent,
)
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.rules.registry import RULE_IDS
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.registry import SENSOR_NAMES

SECOND_NS = 1_000_000_000
TAKEN_AT_NS = 1_767_225_600 * SECOND_NS  # 2026-01-01 00:00:00Z
BOOT_ID = "b00710b0-0000-4000-8000-000000000001"
GIB = 1 << 30
MIB = 1 << 20
HOST_NAMESPACES = {
    "pid": 0xEFFFFFFC,
    "mnt": 0xEFFFFFF9,
    "net": 0xEFFFFFF7,
    "user": 0xEFFFFFFD,
    "cgroup": 0xEFFFFFFB,
}
USERS = {"root": 0, "nvidia-dcgm": 998, "alice": 1000, "bob": 1001, "carol": 1002}
SYSTEM_DIRECTORIES = ("/usr/", "/bin/", "/sbin/", "/lib/", "/opt/")
SOURCES = ("slurm", "kubernetes", "systemd")


def gpu_id(index: int) -> str:
    """The id that the builder gives to the GPU of this number."""
    return f"GPU-{index:08x}-0000-4000-8000-{index:012x}"


def mig_id(index: int, instance: int) -> str:
    """The id of the MIG device ``instance`` of the GPU of this number."""
    return f"MIG-{index:08x}-0000-4000-8000-{instance:012x}"


def pci_address(index: int) -> str:
    """The normalised address that the builder gives to the GPU of this number."""
    return f"00000000:{0x10 + index:02x}:00.0"


def container_id(name: str) -> str:
    """64 hex digits made of a short name, the same every time."""
    return (name.encode().hex() * 64)[:64]


def executable(path: str, **fields: Any) -> Executable:
    """A binary: root's in a system directory, else one that its owner 1000 put there."""
    fields = {
        "device": "8:1",
        "inode": sum(path.encode()) + 1000,
        "link_count": 1,
        "owner_uid": 0 if path.startswith(SYSTEM_DIRECTORIES) else 1000,
        "mode": 0o100755,
        "filesystem": "ext4",
        "path_is_genuine": True,
        "elf": True,
        **fields,
    }
    if fields.get("deleted") or fields.get("memfd"):
        fields.setdefault("replaced", False)
        fields["path_is_genuine"] = None
    return Executable(path=path, **fields)


class NodeBuilder:
    """Collects facts and turns them into a snapshot, or straight into a report."""

    def __init__(self, **node: Any) -> None:
        self.node = NodeFacts(
            **{
                "hostname": "node1",
                "boot_id": BOOT_ID,
                "boot_time_ns": TAKEN_AT_NS - 30 * 86_400 * SECOND_NS,
                "kernel": "6.12.0",
                "observer_uid": 0,
                "observer_capabilities": (1 << 41) - 1,
                "host_pid_namespace": True,
                "driver_version": "570.00.00",
                **node,
            }
        )
        self.sensors = {name: SensorRun(name=name, state="ok") for name in SENSOR_NAMES}
        self.sources = {
            name: SourceRun(name=name, state="absent", reason="not here") for name in SOURCES
        }
        self.gpus: list[Gpu] = []
        self.clients: list[GpuClient] = []
        self.accounted: list[AccountedProcess] = []
        self.libraries: list[LibraryCheck] = []
        self.processes: list[Process] = []
        self.hidden_processes: list[HiddenProcess] = []
        self.device_nodes: list[DeviceNode] = []
        self.holders: list[Holder] = []
        self.containers: list[Container] = []
        self.connections: list[Connection] = []
        self.persistence: list[PersistenceEntry] = []
        self.xids: list[XidEvent] = []
        self.workloads: list[Workload] = []
        self.gaps: list[Gap] = []

    # ---------------------------------------------------------------- what worked

    def sensor(self, name: str, state: SensorState, reason: str = "broken for the test") -> None:
        """How a sensor fared, when it is not ``ok``."""
        self.sensors[name] = SensorRun(name=name, state=state, reason=reason)

    def source(self, name: str, state: SourceState = "ok", **fields: Any) -> None:
        """How a source of the expected set fared (``running``, ``ended``, ``scheduled`` …)."""
        fields.setdefault("reason", "" if state == "ok" else "broken for the test")
        self.sources[name] = SourceRun(name=name, state=state, **fields)

    def gap(self, sensor: str, what: str, reason: str = "permission denied") -> None:
        """Something that a sensor could not see."""
        self.gaps.append(Gap(sensor=sensor, what=what, reason=reason))

    # ---------------------------------------------------------------- GPUs and who is on them

    def gpu(self, index: int = 0, **fields: Any) -> str:
        """A GPU; returns its id."""
        self.gpus.append(
            Gpu(
                **{
                    "id": gpu_id(index),
                    "uuid": gpu_id(index),
                    "index": index,
                    "minor": index,
                    "name": "Test GPU 80GB",
                    "pci_address": pci_address(index),
                    "mig_enabled": False,
                    "memory_total_bytes": 80 * GIB,
                    "memory_reserved_bytes": 600 * MIB,
                    **fields,
                }
            )
        )
        return self.gpus[-1].id

    def mig(self, index: int, instance: int, **fields: Any) -> str:
        """A MIG device of the GPU of that number; returns its id."""
        self.gpus.append(
            Gpu(
                **{
                    "id": mig_id(index, instance),
                    "uuid": mig_id(index, instance),
                    "index": instance,
                    "name": "Test GPU 80GB MIG 1g.10gb",
                    "parent_id": gpu_id(index),
                    "gpu_instance_id": instance,
                    "compute_instance_id": 0,
                    "memory_total_bytes": 10 * GIB,
                    **fields,
                }
            )
        )
        return self.gpus[-1].id

    def client(
        self,
        pid: int,
        gpu: int | str = 0,
        *,
        kinds: Sequence[ClientKind] = ("C",),
        memory_mib: int | None = 20_000,
        sm_percent: int | None = None,
        **fields: Any,
    ) -> None:
        """A context of a process on a GPU, given by number or id."""
        self.clients.append(
            GpuClient(
                gpu_id=gpu_id(gpu) if isinstance(gpu, int) else gpu,
                pid=pid,
                kinds=tuple(kinds),
                memory_bytes=None if memory_mib is None else memory_mib * MIB,
                sm_percent=sm_percent,
                **fields,
            )
        )

    def holder(
        self, pid: int, gpu: int = 0, *, kind: NodeKind = "nvidia-gpu", **fields: Any
    ) -> None:
        """An open descriptor on a device node: /dev/nvidia<gpu> unless another kind is named."""
        number = {"nvidia-ctl": (195, 255), "nvidia-uvm": (510, 0), "nvidia-modeset": (195, 254)}
        major, minor = number.get(kind, (195, gpu))
        name = {
            "nvidia-ctl": "/dev/nvidiactl",
            "nvidia-uvm": "/dev/nvidia-uvm",
            "nvidia-modeset": "/dev/nvidia-modeset",
        }.get(kind, f"/dev/nvidia{gpu}")
        values = {"major": major, "minor": minor, "path": name, "descriptors": (5,), **fields}
        self.holders.append(Holder(pid=pid, kind=kind, **values))

    def holds_gpu(self, pid: int, gpu: int = 0) -> None:
        """The descriptors that a CUDA context needs: the GPU's, the control and the memory node."""
        self.holder(pid, gpu)
        self.holder(pid, gpu, kind="nvidia-ctl")
        self.holder(pid, gpu, kind="nvidia-uvm")

    # ---------------------------------------------------------------- processes

    def process(
        self,
        pid: int,
        *,
        user: str = "alice",
        exe: str | Executable | None = "/usr/bin/python3.11",
        argv: Sequence[str] | None = None,
        cgroup: str | Sequence[str] | None = None,
        container: str | None = None,
        **fields: Any,
    ) -> int:
        """A process; ``cgroup`` is a v2 path or the lines of its file; returns its pid.

        ``container`` names a container made with ``container()``: its cgroup and namespaces.
        """
        binary = executable(exe) if isinstance(exe, str) else exe
        if argv is None and binary is not None:
            argv = (binary.path, "train.py") if "python" in binary.path else (binary.path,)
        uid = USERS.get(user, 1000)
        namespaces = dict(HOST_NAMESPACES)
        if container is not None:
            placed = next(c for c in self.containers if c.name == container)
            if cgroup is None:
                cgroup = self._path_of(placed)
            if placed.mount_namespace is not None:
                namespaces["mnt"] = placed.mount_namespace
            if placed.pid_namespace is not None:
                namespaces["pid"] = placed.pid_namespace
        lines = (f"0::{cgroup}",) if isinstance(cgroup, str) else tuple(cgroup or ())
        name = binary.path.rsplit("/", 1)[-1] if binary else (argv or ("?",))[0]
        values: dict[str, Any] = {
            "start_time_ticks": 100_000 + pid,
            "started_at_ns": TAKEN_AT_NS - 3_600 * SECOND_NS,
            "ppid": 1,
            "process_group": pid,
            "session_id": pid,
            "comm": name[:15],
            "state": "S",
            "uid": uid,
            "effective_uid": uid,
            "gid": uid,
            "user": user,
            "loginuid": -1,
            "namespaces": namespaces,
            "cgroup_lines": lines,
            "cgroup": place(list(lines)) if lines else None,
            **fields,
        }
        self.processes.append(
            Process(pid=pid, exe=binary, argv=None if argv is None else tuple(argv), **values)
        )
        return pid

    def init(self) -> None:
        """Process 1 of the host, as an ancestor: what others' namespaces are compared with."""
        self.process(
            1,
            user="root",
            exe="/usr/lib/systemd/systemd",
            argv=("/sbin/init",),
            cgroup="/init.scope",
            ppid=0,
            role="ancestor",
        )

    def hidden(self, pid: int, *seen_by: str) -> None:
        """A pid that lives and that a listing of /proc does not show."""
        self.hidden_processes.append(
            HiddenProcess(pid=pid, seen_by=seen_by or ("driver",), thread_group_leader=True)
        )

    def connection(self, pid: int, address: str, port: int, **fields: Any) -> None:
        """An established TCP connection from a process to ``address:port``."""
        values = {
            "protocol": "tcp",
            "state": "ESTABLISHED",
            "local_address": "10.0.0.5",
            "local_port": 40_000 + pid % 20_000,
            **fields,
        }
        self.connections.append(
            Connection(pid=pid, remote_address=address, remote_port=port, **values)
        )

    # ---------------------------------------------------------------- where they run

    def container(self, name: str, *, runtime: str = "docker", **fields: Any) -> str:
        """A confirmed container with namespaces of its own; returns its id."""
        number = len(self.containers)
        values = {
            "confirmed": True,
            "image": f"registry.example/{name}:1",
            "image_digest": f"sha256:{container_id('d' + name)}",
            "mount_namespace": 4_026_540_000 + 2 * number,
            "pid_namespace": 4_026_540_001 + 2 * number,
            "state": "running",
            **fields,
        }
        self.containers.append(
            Container(id=container_id(name), runtime=runtime, name=name, **values)
        )
        return self.containers[-1].id

    def pod(self, name: str, *, namespace: str = "research", **fields: Any) -> str:
        """A pod with one confirmed container of the same name; returns the pod's uid."""
        self.container(
            name,
            **{
                "runtime": "containerd",
                "pod_uid": self.pod_uid(name),
                "pod_name": name,
                "pod_namespace": namespace,
                "pod_container": "main",
                **fields,
            },
        )
        return self.pod_uid(name)

    @staticmethod
    def pod_uid(name: str) -> str:
        """The uid that the builder gives to the pod of this name."""
        digits = container_id(name)
        return f"{digits[:8]}-{digits[8:12]}-4000-8000-{digits[12:24]}"

    @staticmethod
    def _path_of(container: Container) -> str:
        if container.pod_uid is not None:
            return f"/kubepods/burstable/pod{container.pod_uid}/{container.id}"
        prefix = {"podman": "libpod"}.get(container.runtime, container.runtime)
        return f"/system.slice/{prefix}-{container.id}.scope"

    # ---------------------------------------------------------------- the expected set

    def workload(self, source: str, name: str, gpus: Sequence[str] = (), **fields: Any) -> Workload:
        """A workload of a source; the source becomes ``ok`` unless it was set otherwise."""
        if self.sources[source].state == "absent":
            self.source(source, scheduled=source != "systemd")
        self.workloads.append(Workload(source=source, name=name, gpus=tuple(gpus), **fields))
        return self.workloads[-1]

    def job(
        self, job_id: str, gpus: Sequence[str] = (), *, user: str = "alice", **fields: Any
    ) -> str:
        """A running Slurm job of a user; returns the cgroup path of its first step."""
        self.workload(
            "slurm",
            f"job {job_id}",
            gpus,
            **{"job_id": job_id, "user": user, "uid": USERS[user], "state": "RUNNING", **fields},
        )
        return self.job_path(job_id)

    @staticmethod
    def job_path(job_id: str) -> str:
        """The cgroup v2 path of a Slurm job's first step."""
        return f"/system.slice/slurmstepd.scope/job_{job_id}/step_0/user/task_0"

    def pod_given(
        self, name: str, gpus: Sequence[str] = (), *, namespace: str = "research"
    ) -> None:
        """The kubelet gave these GPUs to the pod of this name."""
        self.workload(
            "kubernetes",
            f"pod {namespace}/{name}",
            gpus,
            pod_uid=self.pod_uid(name),
            pod_name=name,
            pod_namespace=namespace,
        )

    # ---------------------------------------------------------------- what else was seen

    def autostart(self, kind: str, path: str, text: str, *commands: str, **fields: Any) -> None:
        """An entry of a place that starts programs by itself."""
        self.persistence.append(
            PersistenceEntry(
                kind=kind,
                path=path,
                text=text,
                commands=commands or (without_schedule(text),),
                **fields,
            )
        )

    def xid(self, code: int, gpu: int = 0, **fields: Any) -> None:
        """An Xid event of the GPU of that number, a minute before the snapshot."""
        values = {
            "pci_address": pci_address(gpu),
            "message": f"Xid {code} of the test",
            "at_ns": TAKEN_AT_NS - 60 * SECOND_NS,
            **fields,
        }
        self.xids.append(XidEvent(code=code, **values))

    # ---------------------------------------------------------------- results

    def snapshot(self) -> Snapshot:
        """What was collected, as a snapshot taken on 2026-01-01."""
        return Snapshot(
            tool_version="test",
            taken_at_ns=TAKEN_AT_NS,
            node=self.node,
            sensors=tuple(self.sensors.values()),
            sources=tuple(self.sources.values()),
            gaps=tuple(self.gaps),
            gpus=tuple(self.gpus),
            clients=tuple(self.clients),
            accounted=tuple(self.accounted),
            libraries=tuple(self.libraries),
            processes=tuple(self.processes),
            hidden=tuple(self.hidden_processes),
            device_nodes=tuple(self.device_nodes),
            holders=tuple(self.holders),
            containers=tuple(self.containers),
            connections=tuple(self.connections),
            persistence=tuple(self.persistence),
            xids=tuple(self.xids),
            workloads=tuple(self.workloads),
        )

    def judge(self, policy: str | Policy = "") -> Report:
        """The report under a policy, given as YAML or parsed."""
        return judge(self.snapshot(), policy_of(policy))

    def row(self, pid: int | None, gpu: int | str | None = None, policy: str | Policy = "") -> Row:
        """The one row of a process (None: of a GPU alone), on that GPU if one is named."""
        wanted = gpu_id(gpu) if isinstance(gpu, int) else gpu
        rows = [
            row
            for row in self.judge(policy).rows
            if row.pid == pid and (wanted is None or row.gpu_id == wanted)
        ]
        assert len(rows) == 1, rows
        return rows[0]


def policy_of(text: str | Policy) -> Policy:
    """A policy given as YAML or parsed."""
    if isinstance(text, Policy):
        return text
    return parse_policy(text.encode(), "policy.yaml", RULE_IDS)
