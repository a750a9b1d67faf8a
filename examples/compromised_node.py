"""Writes examples/compromised-node.json.gz: a made-up GPU node on which something is wrong.

No real node was recorded: the facts are composed from public incident reports (a miner inside a
training job, a privileged notebook container, left-over processes), with placeholder names,
documentation addresses and no wallet. ``gpuwarden scan examples/compromised-node.json.gz`` judges
it as it would judge a live one.

Run: .venv/bin/python examples/compromised_node.py
"""

from __future__ import annotations

from pathlib import Path

from gpuwarden import __version__
from gpuwarden.model import (
    LOGINUID_UNSET,
    CgroupPlacement,
    Connection,
    Container,
    Executable,
    Gpu,
    GpuClient,
    Holder,
    NodeFacts,
    PersistenceEntry,
    Process,
    SensorRun,
    Snapshot,
    SourceRun,
    Workload,
    XidEvent,
)
from gpuwarden.sensors.registry import SENSOR_NAMES
from gpuwarden.snapshot import write

GIB = 1 << 30
SECOND = 1_000_000_000
BOOTED_NS = 1_793_000_000 * SECOND
TAKEN_NS = BOOTED_NS + 21 * 86_400 * SECOND + 11_543 * SECOND
HOST_NAMESPACES = {"pid": 0xEFFFFFFC, "mnt": 4026531841, "net": 4026531840, "user": 4026531837}
CONTAINER_ID = "7d1f0c7e5b0a4b0c9f2e6d3a8c1b4e5f60718293a4b5c6d7e8f9012a3b4c5d6e"
UIDS = {"root": 0, "alice": 1201, "bob": 1202, "carol": 1203, "dave": 1204, "erin": 1205}
PYTHON = "/opt/conda/envs/train/bin/python3.11"


def gpu(index: int, used_gib: float, busy: int) -> Gpu:
    return Gpu(
        id=f"GPU-5f0e7a10-0000-4000-8000-00000000000{index}",
        uuid=f"GPU-5f0e7a10-0000-4000-8000-00000000000{index}",
        index=index,
        minor=index,
        name="NVIDIA H100 80GB HBM3",
        pci_address=f"00000000:{0x18 + 0x11 * index:02x}:00.0",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=int(used_gib * GIB),
        memory_reserved_bytes=600 << 20,
        sm_percent=busy,
        temperature_celsius=41 + busy // 3,
        power_watts=90 + 5.5 * busy,
        mig_enabled=False,
        accounting_enabled=False,
    )


def client(index: int, pid: int, memory_gib: float, busy: int | None) -> GpuClient:
    return GpuClient(
        gpu_id=gpu(index, 0, 0).id,
        pid=pid,
        kinds=("C",),
        memory_bytes=int(memory_gib * GIB),
        sm_percent=busy,
    )


def binary(path: str, *, owner: int = 0, deleted: bool = False) -> Executable:
    return Executable(
        path=path,
        deleted=deleted,
        device="259:2",
        inode=sum(path.encode()) * 7919,
        link_count=0 if deleted else 1,
        owner_uid=owner,
        mode=0o100755,
        filesystem="tmpfs" if path.startswith("/tmp") else "ext4",
        path_is_genuine=not deleted,
        elf=True,
    )


def process(
    pid: int,
    user: str,
    argv: str,
    exe: Executable | None,
    *,
    ppid: int = 1,
    hours: float = 1.0,
    cgroup: CgroupPlacement | None = None,
    comm: str | None = None,
    login: str | None = None,
    namespaces: dict[str, int] | None = None,
    **more: object,
) -> Process:
    started_ns = TAKEN_NS - int(hours * 3600) * SECOND
    words = tuple(argv.split())
    return Process(
        pid=pid,
        start_time_ticks=(started_ns - BOOTED_NS) // (SECOND // 100),
        started_at_ns=started_ns,
        ppid=ppid,
        comm=comm or words[0].rsplit("/", 1)[-1][:15],
        argv=words,
        exe=exe,
        uid=UIDS[user],
        effective_uid=UIDS[user],
        user=user,
        loginuid=UIDS[login] if login else LOGINUID_UNSET,
        login_user=login,
        namespaces=namespaces or HOST_NAMESPACES,
        cgroup=cgroup,
        **{"state": "S", "cwd": "/", "process_group": pid, "session_id": pid, **more},  # type: ignore[arg-type]
    )


def job(number: str, uid: int) -> CgroupPlacement:
    return CgroupPlacement(
        paths=(f"/system.slice/slurmstepd.scope/job_{number}/step_0/user/task_0",),
        slurm_job=number,
        slurm_step="0",
        chain=(f"slurm:{number}",),
    )


def unit(name: str) -> CgroupPlacement:
    return CgroupPlacement(paths=(f"/system.slice/{name}",), unit=name, chain=(f"unit:{name}",))


def session(number: str, uid: int) -> CgroupPlacement:
    path = f"/user.slice/user-{uid}.slice/session-{number}.scope"
    return CgroupPlacement(
        paths=(path,), unit=f"session-{number}.scope", session=number, user_slice_uid=uid
    )


CONTAINER_PLACE = CgroupPlacement(
    paths=(f"/system.slice/docker-{CONTAINER_ID}.scope",),
    runtime="docker",
    container_id=CONTAINER_ID,
    chain=(f"docker:{CONTAINER_ID}",),
)
CONTAINER_NAMESPACES = {"pid": 4026532801, "mnt": 4026532799, "net": 4026532803}
MINER_ARGV = (
    "python3 -a kawpow -o stratum+tcp://pool.example.net:3333 -u WALLET_PLACEHOLDER.w1 "
    "--proxy 127.0.0.1:7273"
)

PROCESSES = (
    process(1, "root", "/sbin/init", binary("/usr/lib/systemd/systemd"), ppid=0, hours=507,
            comm="systemd", cgroup=CgroupPlacement(paths=("/init.scope",), unit="init.scope"),
            role="ancestor"),
    process(1893, "root", "/usr/bin/nv-hostengine -n", binary("/usr/bin/nv-hostengine"),
            hours=506, cgroup=unit("nvidia-dcgm.service")),
    process(2210, "root", "/usr/sbin/slurmd -D", binary("/usr/sbin/slurmd"), hours=506,
            cgroup=unit("slurmd.service"), role="ancestor"),
    process(40110, "alice", "python train.py --model 7b", binary(PYTHON), ppid=2210, hours=9.2,
            cgroup=job("48213", UIDS["alice"])),
    process(40171, "alice", "python train.py --model 7b", binary(PYTHON), ppid=40110, hours=9.1,
            cgroup=job("48213", UIDS["alice"])),
    process(40172, "alice", "python train.py --model 7b", binary(PYTHON), ppid=40110, hours=9.1,
            cgroup=job("48213", UIDS["alice"])),
    process(41002, "bob", "python finetune.py --epochs 3", binary(PYTHON), ppid=2210, hours=5.5,
            cgroup=job("48220", UIDS["bob"])),
    process(41377, "bob", MINER_ARGV, binary("/tmp/.fontd/python3", owner=1202, deleted=True),
            ppid=1, hours=5.4, cgroup=job("48220", UIDS["bob"]), cwd="/tmp/.fontd",
            cwd_deleted=True),
    process(41380, "bob", "graftcp-local -listen 127.0.0.1:7273",
            binary("/home/bob/.config/.fontd/graftcp-local", owner=1202), ppid=1, hours=5.4,
            cgroup=job("48220", UIDS["bob"]), role="peer"),
    process(52001, "root", "/opt/conda/bin/python -m ipykernel_launcher",
            binary("/opt/conda/bin/python3.12"), ppid=51980, hours=30.1,
            cgroup=CONTAINER_PLACE, namespaces=CONTAINER_NAMESPACES),
    process(61240, "carol", "python bench.py", binary(PYTHON), ppid=61200, hours=2.3,
            cgroup=session("311", UIDS["carol"]), login="carol", tty="pts/3"),
    process(61200, "carol", "-bash", binary("/usr/bin/bash"), ppid=61190, hours=2.4, comm="bash",
            cgroup=session("311", UIDS["carol"]), login="carol", tty="pts/3", role="ancestor"),
    process(61190, "carol", "sshd: carol@pts/3", binary("/usr/sbin/sshd"), hours=2.4, comm="sshd",
            cgroup=session("311", UIDS["carol"]), login="carol", role="ancestor"),
    process(33017, "dave", "python sweep.py", binary(PYTHON), hours=71.0,
            cgroup=job("48101", UIDS["dave"])),
    process(38802, "erin", "python loader.py", binary(PYTHON), hours=26.5,
            cgroup=job("48230", UIDS["erin"]), process_group=38790, session_id=38790),
)  # fmt: skip


def holds(pid: int, index: int) -> tuple[Holder, ...]:
    return (
        Holder(pid=pid, major=195, minor=index, kind="nvidia-gpu", path=f"/dev/nvidia{index}",
               descriptors=(21 + index,)),
        Holder(pid=pid, major=195, minor=255, kind="nvidia-ctl", path="/dev/nvidiactl",
               descriptors=(19,)),
        Holder(pid=pid, major=511, minor=0, kind="nvidia-uvm", path="/dev/nvidia-uvm",
               descriptors=(20,), mapped=True),
    )  # fmt: skip


HELD = (
    (40110, (0, 1)), (40171, (0,)), (40172, (1,)), (41002, (2,)), (41377, (2,)), (52001, (3,)),
    (61240, (4,)), (33017, (5,)), (38802, (6,)), (1893, range(8)),
)  # fmt: skip


def tcp(
    pid: int, local: tuple[str, int], remote: tuple[str, int], peer: int | None = None
) -> Connection:
    return Connection(
        pid=pid, protocol="tcp", state="ESTABLISHED", local_address=local[0], local_port=local[1],
        remote_address=remote[0], remote_port=remote[1], peer_pid=peer,
    )  # fmt: skip


def slurm_job(
    number: str, user: str, account: str, gpus: tuple[str, ...], hours: float
) -> Workload:
    return Workload(
        source="slurm", name=f"job {number}", job_id=number, user=user, uid=UIDS[user],
        account=account, partition="gpu", gpus=gpus, state="RUNNING",
        started_at_ns=TAKEN_NS - int(hours * 3600) * SECOND,
    )  # fmt: skip


def compromised_node() -> Snapshot:
    """The snapshot, every time the same."""
    return Snapshot(
        tool_version=__version__,
        taken_at_ns=TAKEN_NS,
        node=NodeFacts(
            hostname="gpu-17", boot_id="3b1f2c1e-8f1d-4a52-9d5e-6a7c0f1e2d3c",
            boot_time_ns=BOOTED_NS, kernel="6.1.0-31-amd64", observer_uid=0,
            observer_capabilities=0x1FFFFFFFFFF, observer_pid_namespace=0xEFFFFFFC,
            host_pid_namespace=True, driver_version="550.54.15", cuda_version="12.4",
            process_count=612,
        ),
        sensors=tuple(
            SensorRun(name=name, state="absent", reason="no AMD compute driver here (no KFD)")
            if name == "amd"
            else SensorRun(name=name, state="ok", seconds=0.01)
            for name in SENSOR_NAMES
        ),
        sources=(
            SourceRun(name="slurm", state="ok", workloads=3, scheduled=True,
                      running=("48213", "48220", "48230"), ended=("48101",)),
            SourceRun(name="kubernetes", state="absent", reason="no kubelet here"),
            SourceRun(name="systemd", state="ok",
                      running=("nvidia-dcgm.service", "slurmd.service")),
        ),
        gpus=(
            gpu(0, 61.2, 94), gpu(1, 60.8, 93), gpu(2, 44.1, 99), gpu(3, 18.4, 71),
            gpu(4, 7.2, 12), gpu(5, 22.0, 0), gpu(6, 31.5, 0), gpu(7, 12.3, 0),
        ),
        clients=(
            client(0, 40110, 61.2, 94), client(1, 40110, 60.8, 93), client(2, 41002, 38.0, 41),
            client(2, 41377, 6.1, 57), client(3, 52001, 18.4, 71), client(4, 61240, 7.2, 12),
            client(5, 33017, 22.0, None), client(6, 38790, 31.5, None),
        ),
        processes=PROCESSES,
        holders=tuple(h for pid, indices in HELD for i in indices for h in holds(pid, i)),
        containers=(
            Container(
                id=CONTAINER_ID, runtime="docker", confirmed=True, name="ecstatic_notebook",
                image="docker.io/jupyter/minimal-notebook:latest", privileged=True,
                host_network=False, main_pid=51980, visible_devices="all",
                mount_namespace=CONTAINER_NAMESPACES["mnt"],
                pid_namespace=CONTAINER_NAMESPACES["pid"],
                host_mounts=("/:/host",), restart_policy="unless-stopped", state="running",
                started_at_ns=TAKEN_NS - 31 * 3600 * SECOND,
            ),
        ),
        connections=(
            tcp(41377, ("127.0.0.1", 50912), ("127.0.0.1", 7273), 41380),
            tcp(41380, ("192.0.2.17", 40112), ("203.0.113.82", 3333)),
            tcp(52001, ("172.17.0.4", 51100), ("172.17.0.1", 8888)),
        ),
        persistence=(
            PersistenceEntry(
                kind="cron", path="/var/spool/cron/crontabs/bob", line=7, user="bob",
                owner_uid=1202, schedule="*/5 * * * *",
                text="cp -f /home/bob/.config/.fontd/python3 /tmp/.fontd/python3 && "
                "/tmp/.fontd/python3 -c && rm -rf /tmp/.fontd",
                commands=(
                    "cp -f /home/bob/.config/.fontd/python3 /tmp/.fontd/python3",
                    "/tmp/.fontd/python3 -c",
                    "rm -rf /tmp/.fontd",
                ),
            ),
        ),
        xids=(
            XidEvent(
                code=31, pci_address=gpu(7, 0, 0).pci_address, pid=36100, process_name="python",
                message="pid=36100, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS",
                at_ns=TAKEN_NS - 40 * 3600 * SECOND,
            ),
        ),
        workloads=(
            slurm_job("48213", "alice", "nlp", ("minor:0", "minor:1"), 9.3),
            slurm_job("48220", "bob", "vision", ("minor:2",), 5.6),
            slurm_job("48230", "erin", "speech", ("minor:6",), 27.0),
        ),
    )  # fmt: skip


if __name__ == "__main__":
    target = Path(__file__).with_name("compromised-node.json.gz")
    write(str(target), compromised_node())
