"""The table over the collected public cases: each one to what the product must say of it.

The cases themselves lie beside the checkout and are not part of it; without them that skips. The
ones that matter most stand in ``tests/fixtures/cases`` in our own words and are always run. Where a
case's own answer cannot be had from its input, or is wrong, ``ARGUED`` says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.expected.kubernetes import parse_pod_resources
from gpuwarden.expected.slurm import gres as slurm_gres
from gpuwarden.expected.slurm import jobs as slurm_jobs
from gpuwarden.falco_losses import FalcoLosses, drop_findings
from gpuwarden.finding import Report, Row
from gpuwarden.judge import judge
from gpuwarden.model import Container, PersistenceEntry, Snapshot
from gpuwarden.policy import Policy
from gpuwarden.rules.miner_signs import line_signs
from gpuwarden.rules.respawn import oddities, preload_is_known
from gpuwarden.sensors.autostarts.cron import parse_crontab
from gpuwarden.sensors.autostarts.startup_files import parse_preload
from gpuwarden.sensors.autostarts.supervisord import parse_supervisord
from gpuwarden.sensors.autostarts.systemd_units import parse_unit
from gpuwarden.sensors.cgroup import place
from gpuwarden.sensors.falco import FalcoDrop, FalcoEvent, parse_body, parse_event, parse_line
from gpuwarden.sensors.falco_join import FalcoContext, device_of
from gpuwarden.sensors.runtimes.docker_api import parse_docker_inspect
from gpuwarden.sensors.xid_lines import parse_lines
from gpuwarden.snapshot import open_recording
from tests.support.cases import ARGUED, CGROUPS, DUMPS, MINER_LINES, SAID, XIDS
from tests.support.nodes import HOST_NAMESPACES, NodeBuilder, executable, gpu_id

CASES = Path(__file__).parents[3] / "shared" / "cases"
FILES = {
    path.name[:3]: (path / "ps.txt" if path.is_dir() else path)
    for kind in "abcdefg"
    for path in sorted((CASES / kind).glob("*"))
}

OWN = {path.stem: path for path in sorted((Path(__file__).parents[1] / "fixtures/cases").glob("*"))}


def text_of(case: str) -> str:
    return FILES[case].read_text()


def lines_of(case: str) -> list[str]:
    return [line for line in text_of(case).splitlines() if line.strip()]


def replayed(case: str) -> tuple[Snapshot, Report]:
    snapshot = open_recording(str(FILES[case]))
    return snapshot, judge(snapshot, Policy())


def verdicts(report: Report) -> dict[str, str]:
    return {f"{row.gpu} {row.pid}": row.verdict for row in report.rows}


# ------------------------------------------------------------------ a, b, g: what a dump tells


def check_dump(case: str) -> None:
    snapshot, report = replayed(case)
    assert verdicts(report) == DUMPS[case]
    told = [f"{g.what}: {g.reason}" for g in snapshot.gaps]
    told += [step for row in report.rows for step in row.path]
    assert any(SAID.get(case, "") in line for line in [*told, ""])


# ------------------------------------------------------------------ b: incidents as nodes


def client(node: NodeBuilder, argv: str | tuple[str, ...], **process: Any) -> Row:
    words = tuple(argv.split()) if isinstance(argv, str) else argv
    node.process(4242, argv=words, **process)
    node.client(4242, sm_percent=None)
    return node.row(4242)


def plain() -> NodeBuilder:
    node = NodeBuilder()
    node.init()
    node.gpu(0)
    return node


def check_b01() -> None:
    line = next(x for x in lines_of("b01") if "kawpow" in x)
    padded = ("python3" + " " * 90, *line.split()[1:])
    row = client(
        plain(),
        padded,
        exe="/root/stable-diffusion-webui/kjgj3hg5s/miner",
        comm="miner",
        cwd="/root/stable-diffusion-webui/kjgj3hg5s",
        cwd_deleted=True,
    )
    assert row.verdict == "cryptominer"
    assert {"signature", "masquerade"} <= {e.kind for e in row.evidence}
    # Without its arguments the blanks alone give it away.
    hidden = client(plain(), ("python3" + " " * 90,), exe="/root/x/miner", comm="miner")
    assert hidden.verdict == "suspicious"


def check_b03() -> None:
    line = next(x for x in lines_of("b03") if x.startswith("argv")).removeprefix("argv ")
    node = plain()
    job = node.job("7", ["index:0"])
    row = client(
        node,
        line,
        exe=executable("/tmp/ultralytics_runner", deleted=True),
        comm="ultralytics_run",
        cgroup=job,
    )
    assert (row.verdict, row.workload) == ("cryptominer", "job 7")


def check_b06() -> None:
    line = lines_of("b06")[0]
    row = client(plain(), line, exe="/home/alice/xmrig-notls")
    assert row.verdict == "cryptominer"


def check_b07() -> None:
    _, report = replayed("b07")
    assert verdicts(report) == {
        "0 31794": "unreadable",
        "1 7653": "unattributed",
        "1 13386": "unattributed",
        "1 27707": "unreadable",
        "2 18049": "unattributed",
        "3 11827": "unattributed",
    }
    assert "dead, defunct or in another pid namespace" in report.rows[0].path[-1]
    node = plain()
    node.process(31794, exe=None, argv=(), state="Z", comm="python")
    node.client(31794)
    node.process(31800, ppid=31794, process_group=31794)
    node.holds_gpu(31800)
    assert node.row(31794).verdict == "zombie-context"
    assert node.row(31800).inherited_from == 31794


def check_b09() -> None:
    """The job's id is only in a path; a batch system's cgroup is named, its controller unasked."""
    line = next(x for x in lines_of("b09") if x.startswith("19166"))
    words = line.split(maxsplit=4)[-1]
    row = client(plain(), words, exe="/usr/local/cuda/bin/nvcc", user="bob", cpu_seconds=13_155_565)
    assert row.verdict == "other-team"
    assert row.owner == "bob"


def check_b10() -> None:
    line = next(x for x in lines_of("b10") if x.startswith("sshd-update"))
    node = plain()
    entry = f"*/5 * * * * /root/.ssh/{line}"
    node.persistence += parse_crontab(entry, "/var/spool/cron/crontabs/root", False)
    row = client(node, line, exe="/root/.ssh/sshd-update", user="root")
    assert row.verdict == "cryptominer"
    assert {"signature", "masquerade", "persistence"} <= {e.kind for e in row.evidence}
    assert "autostart_suspicious" in {f.rule for f in node.judge().findings}


def check_b20() -> None:
    node = NodeBuilder()
    node.gpu(0, memory_used_bytes=9 << 30)
    node.source("slurm", scheduled=True, ended=("7",))
    for pid in (31, 32):
        node.process(pid, ppid=1, cgroup=node.job_path("7"))
        node.holds_gpu(pid)
    assert verdicts(node.judge()) == {"0 31": "orphaned-job", "0 32": "orphaned-job"}


def check_b23() -> None:
    node = plain()
    node.pod("inference")
    node.pod_given("inference", [f"uuid:{gpu_id(0)}"])
    pids = [int(line.split()[0]) for line in lines_of("b23") if line[0].isdigit()]
    for pid in pids:
        node.process(pid, user="root", container="inference", exe="/usr/bin/python3.11")
        node.client(pid)
    assert len(pids) == 5
    assert set(verdicts(node.judge()).values()) == {"expected"}


def check_b24() -> None:
    node = plain()
    node.process(50, user="bob", argv=("python3", "main.py"))
    node.client(50)
    row = client(node, ("./x",), user="bob", exe="/tmp/.x/x", ppid=50)
    assert row.verdict == "suspicious"
    assert node.row(50).verdict == "other-team"


def check_b27() -> None:
    node = plain()
    node.container("workspace", device_requests=("all",))
    row = client(node, ("./xmrig",), user="root", exe="/root/xmrig", container="workspace")
    assert row.verdict == "suspicious"
    node = plain()
    node.container("workspace", device_requests=("all",))
    node.process(4242, user="root", exe="/root/xmrig", argv=("./xmrig",), container="workspace")
    node.client(4242, sm_percent=99)
    assert node.row(4242).verdict == "cryptominer"


# ------------------------------------------------------------------ c: cgroups


def check_cgroup(case: str) -> None:
    placement = place(text_of(case).splitlines())
    for name, wanted in CGROUPS[case].items():
        found = getattr(placement, name)
        if name == "container_id" and found is not None:
            found = found[:12]
        assert found == wanted, name


# ------------------------------------------------------------------ d: kernel log


def check_log(case: str) -> None:
    events = parse_lines(text_of(case))
    assert len(events) == len(XIDS[case])
    for event, (code, address) in zip(events, XIDS[case], strict=True):
        assert event.code == code
        assert event.pci_address is not None
        assert event.pci_address.endswith(address)
        assert event.process_name != "<unknown>"
    if case == "d02":
        assert [e.truncated for e in events] == [False] * 10 + [True]
        assert events[1].process_name == "ray::WorkerDict"
    if case == "d05":
        assert {e.pid for e in events} == {None, 1234}
    if case == "d10":
        assert [e.trusted for e in events] == [True] * 5 + [False]
    # Whoever a line names was there; a log alone accuses nobody.
    node = plain()
    node.xids += events
    report = node.judge()
    assert report.rows == ()
    assert {f.rule for f in report.findings} == {"gpu_fault_logged"}


# ------------------------------------------------------------------ e: schedulers and runtimes


def inspected(case: str) -> Container:
    return parse_docker_inspect(FILES[case].read_bytes())


def in_container(node: NodeBuilder, container: Container) -> Row:
    node.containers.append(container)
    path = f"/docker/{container.id}"
    if container.pod_uid is not None:
        path = f"/kubepods/burstable/pod{container.pod_uid}/{container.id}"
    own_mounts = {**HOST_NAMESPACES, "mnt": 4_026_540_000}
    node.process(4242, user="root", cgroup=path, namespaces=own_mounts)
    node.client(4242)
    return node.row(4242)


def given_pod(node: NodeBuilder, container: Container) -> None:
    node.workload(
        "kubernetes",
        f"pod {container.pod_name}",
        [f"uuid:{gpu_id(0)}"],
        pod_uid=container.pod_uid,
        pod_name=container.pod_name,
        pod_namespace=container.pod_namespace,
    )


def check_e02() -> None:
    container = inspected("e02")
    assert not container.device_requests
    assert not container.devices
    assert in_container(plain(), container).verdict == "rogue-container"


def check_e03() -> None:
    container = inspected("e03")
    assert container.visible_devices == "GPU-dc0671b0-61a4-443e-f456-f8fa6359b788"
    assert (container.privileged, container.pod_name) == (True, "tensorflowcifar10-worker-0")
    node = plain()
    given_pod(node, container)
    assert in_container(node, container).verdict == "expected"


def check_e05() -> None:
    container = inspected("e05")
    assert [d for d in container.devices if d[-1].isdigit()] == [
        f"/dev/nvidia{i}" for i in (3, 2, 1, 0)
    ]
    row = in_container(plain(), container)
    assert (row.verdict, row.owner) == ("unattributed", "user1 (says its environment)")


def check_e06() -> None:
    container = inspected("e06")
    node = plain()
    node.source("kubernetes", scheduled=True)
    row = in_container(node, container)
    assert row.owner == "namespace default, user1 (says its environment)"
    node = plain()
    given_pod(node, container)
    assert in_container(node, container).verdict == "expected"


def check_e07() -> None:
    workloads = parse_pod_resources(json.loads(text_of("e07")))
    references = [reference for w in workloads for reference in w.gpus]
    assert all("::" not in reference for reference in references)
    mig = "uuid:MIG-4894e267-46d0-557e-b826-500e978d88d1"
    sharing = [w for w in workloads if mig in w.gpus]
    assert len(sharing) == 3
    assert all(w.shared for w in sharing)


def check_e08() -> None:
    pods = {w.name: w.gpus for w in parse_pod_resources(json.loads(text_of("e08")))}
    assert pods["ns1/pod11"][0] == "pci:00000000:c5:00.0"
    assert "xcp:10" in pods["ns2/pod22"]


def check_e11() -> None:
    data = FILES["e11"].read_bytes()
    for host, wanted in (("gpu-005", (0, 1)), ("gpu-006", (2, 3))):
        jobs = slurm_jobs.parse_squeue_json(data, host)
        assert [g.indices for g in jobs["42"].gres or ()] == [wanted]
        assert [g.indices for g in jobs["1005"].gres or ()] == [(0,)]


def check_e12() -> None:
    found = [[g.indices for g in slurm_gres.parse_gres(x) if g.is_gpu] for x in lines_of("e12")]
    assert found[0] == [(), (5,), (0, 1)]
    assert found[7] == [()]  # IDX:N/A
    assert found[9] == [(0, 1, 2, 3, 4, 6, 7)]
    assert found[15] == [None]  # (S:0-1) are sockets
    assert [g.type for g in slurm_gres.parse_gres(lines_of("e12")[14])] == ["1080ti", "980gtx"]


def check_e15() -> None:
    gres = [slurm_jobs.parse_allocation([line], "cn-001") for line in lines_of("e15")]
    assert [[g.indices for g in items or ()] for items in gres] == [[(0,)], [(0,)], []]
    node = plain()
    for pid, job, user in ((10, "7", "alice"), (11, "8", "bob")):
        node.process(pid, user=user, cgroup=node.job(job, ["minor:0"], user=user, shared=True))
        node.client(pid)
    assert set(verdicts(node.judge()).values()) == {"expected"}


# ------------------------------------------------------------------ e: Falco's events


def falco_event(found: FalcoEvent | FalcoDrop) -> FalcoEvent:
    assert isinstance(found, FalcoEvent)
    return found


def check_e18() -> None:
    event = falco_event(parse_event(FILES["e18"].read_bytes()))
    assert (event.pod_name, event.pod_namespace) == ("storage-provisioner", "kube-system")
    assert event.pod_uid == "75cf460d-dd27-41e7-9d29-19b517dc730f"
    assert not {"pod_name", "pod_namespace", "pod_uid"} & set(event.unread)
    assert event.process is not None
    assert (event.process.container_id, event.process.on_host) == ("ee90b4bfa6d7", False)
    # Benign: a connection to the API server is no use of a GPU.
    assert isinstance(device_of(event, ()), FalcoContext)


def check_e20() -> None:
    lost, host, container, curl = (falco_event(parse_line(line)) for line in lines_of("e20"))
    assert lost.process is not None
    assert lost.process.pid is None
    assert "which no process has" in lost.unread["pid"]
    assert {"comm", "exe_path", "parent_comm", "command_line"} <= set(lost.unread)
    assert host.process is not None
    assert (host.process.container_id, host.process.on_host) == (None, True)
    assert host.file is None
    assert "directory" in host.unread["file"]
    assert container.process is not None
    assert (container.process.pid, container.process.uid) == (3085201, None)
    assert container.process.container_id == "d9f922a096f2"
    assert curl.process is not None
    assert (curl.process.command_line, curl.process.on_host) == ("curl ca.minexmr.com", True)
    for event in (lost, host, container, curl):
        assert isinstance(device_of(event, ()), FalcoContext)
    # Somebody who looks at a pool's web page mines nothing, not even with a GPU in hand.
    assert line_signs("curl ca.minexmr.com").strength in ("none", "weak")
    row = client(plain(), "curl ca.minexmr.com", exe="/usr/bin/curl")
    assert row.verdict == "other-team"


def check_e21() -> None:
    event = falco_event(parse_event(FILES["e21"].read_bytes()))
    assert event.process is None
    assert (event.source, event.hostname, event.tags) == (None, None, ())
    assert event.rule == "Create HostNetwork Pod"
    assert isinstance(device_of(event, ()), FalcoContext)


def check_e22() -> None:
    body = parse_body(FILES["e22"].read_bytes())
    assert body.malformed == []
    test, number, text, classic = body.taken
    for drop in (number, text):
        assert isinstance(drop, FalcoDrop)
        assert drop.drops == 815508
        losses = FalcoLosses()
        losses.add([drop], received_ns=1)
        (finding,) = drop_findings(losses, at_ns=2)
        assert "815508 system calls lost" in finding.evidence[0].text
    assert falco_event(test).source == "syscalls"
    assert falco_event(classic).at_ns == 1507591916746609046


# ------------------------------------------------------------------ f: miners and what starts them


def check_miner_lines(case: str) -> None:
    found = [line_signs(line) for line in lines_of(case)]
    complete = [s for s in found if s.activity == "mining" and s.strength == "complete"]
    nothing = [s for s in found if s.strength == "none"]
    assert (len(complete), len(nothing)) == MINER_LINES[case]


def check_f04() -> None:
    command, _, library = lines_of("f04")
    assert line_signs(command).strength == "complete"
    node = plain()
    node.persistence += parse_preload(library)
    node.hidden(4242, "lookup")
    assert client(node, command, exe="/root/wildrig-multi").verdict == "cryptominer"
    rules = {f.rule for f in node.judge().findings}
    assert {"preload_library_unknown", "process_hidden", "gpu_cryptominer"} <= rules


def check_f06() -> None:
    check_miner_lines("f06")
    shell = lines_of("f06")[3]
    row = client(plain(), shell, user="root", exe="/bin/sh")
    assert row.verdict == "suspicious"
    assert "never computes on a GPU" in row.evidence[0].text


def check_f07() -> None:
    check_miner_lines("f07")
    line = lines_of("f07")[0]
    exe = executable("/home/alice/1.31/python", links_python=False)
    row = client(plain(), line, exe=exe)
    assert row.verdict == "cryptominer"
    bare = client(plain(), ("./python",), exe=exe)
    assert bare.verdict == "suspicious"


def odd(entries: list[PersistenceEntry]) -> list[bool]:
    return [bool(oddities(entry)) for entry in entries]


def check_f12() -> None:
    entries = parse_crontab(text_of("f12"), "/var/spool/cron/crontabs/root", False)
    assert odd(entries) == [True, True, False, True]
    # Tied to what it started, the quiet line is evidence as well.
    node = plain()
    node.persistence += entries
    exe = executable("/usr/lib/mysql/mysql", deleted=True)
    row = client(node, ("/usr/lib/mysql/mysql",), user="root", exe=exe)
    assert any(e.kind == "persistence" for e in row.evidence)


def check_f14() -> None:
    entries = parse_unit(text_of("f14"), "/etc/systemd/system/dot-sh.service")
    assert odd(entries) == [True]
    node = plain()
    node.source("systemd", running=("dot-sh.service",))
    node.persistence += entries
    exe = executable("/bin/.sh", deleted=True)
    row = client(node, ("/bin/.sh", "-c"), user="root", exe=exe,
                 cgroup="/system.slice/dot-sh.service")  # fmt: skip
    assert row.verdict == "cryptominer"
    assert {"persistence", "masquerade"} <= {e.kind for e in row.evidence}


def check_f16() -> None:
    entries = parse_supervisord(text_of("f16"), "/etc/.supervisor/supervisord.conf")
    assert odd(entries) == [True]


def check_f17() -> None:
    entries = parse_crontab(text_of("f17"), "/var/spool/cron/crontabs/root", False)
    assert odd(entries) == [True]
    assert any(reason.startswith("runs a miner") for reason in oddities(entries[0]))


def check_f19() -> None:
    path = lines_of("f19")[0]
    row = client(plain(), (path,), exe=path, comm="kdevtmpfsi", user="root")
    assert row.verdict == "cryptominer"
    assert any("like a kernel thread" in e.text for e in row.evidence)


def check_f21() -> None:
    entries = [entry for line in lines_of("f21") for entry in parse_preload(line)]
    assert len(entries) == 2
    assert all(preload_is_known(entry) for entry in entries)


def check_f23() -> None:
    mining, quiet = lines_of("f23")
    assert (line_signs(mining).activity, line_signs(mining).strength) == ("mining", "complete")
    assert line_signs(quiet).strength == "none"


# ------------------------------------------------------------------ g: benign look-alikes


def check_benign(case: str, *, only: Callable[[str], bool] = lambda line: True) -> None:
    """A person's process is asked about, a job's is expected; neither is ever accused."""
    lines = [line for line in lines_of(case) if not line.startswith("#") and only(line)]
    assert lines
    for line in lines:
        node = plain()
        name = line.split()[0]
        exe = name if name.startswith("/") else f"/usr/bin/{name.rsplit('/', 1)[-1]}"
        asked = client(node, line, exe=exe, user="alice")
        assert asked.verdict in ("other-team", "system"), line
        node = plain()
        job = node.job("7", ["index:0"])
        expected = client(node, line, exe=exe, cgroup=job)
        assert expected.verdict in ("expected", "system"), line
        assert node.judge().findings == ()


def check_g02() -> None:
    check_benign("g02")
    miner = lines_of("g02")[1].removeprefix("# against: ")
    assert line_signs(miner).strength == "complete"


def check_g04() -> None:
    check_dump("g04")
    row = client(plain(), ("VLLM::EngineCore",), comm="VLLM::EngineCor")
    assert row.verdict == "other-team"


def check_named_activity(case: str, word: str, exe: str) -> None:
    """Not mining, said to be what it is, and the policy's to allow."""
    for line in lines_of(case):
        if line.startswith("|"):
            continue
        node = plain()
        node.process(4242, argv=tuple(line.split()), exe=exe)
        node.client(4242, sm_percent=99, memory_mib=200)
        row = node.row(4242)
        assert row.verdict == "suspicious"
        assert word in row.path[-1]
        assert node.row(4242, policy=f"allow_activities: [{word}]").verdict == "other-team"


def check_g10() -> None:
    _, report = replayed("g10")
    assert verdicts(report) == {"0 2097235": "suspicious"}
    check_named_activity("g10", "volunteer-computing", "/usr/bin/FAHCoreWrapper")


def check_g13() -> None:
    for line in lines_of("g13")[:2]:
        node = plain()
        node.source("systemd", running=("nvidia-dcgm.service",))
        row = client(
            node,
            line,
            exe="/usr/bin/nv-hostengine",
            user="root",
            cgroup="/system.slice/nvidia-dcgm.service",
        )
        assert (row.verdict, row.proof) == ("system", "proven")


def check_g17() -> None:
    assert line_signs(text_of("g17")).strength == "none"


def check_g23() -> None:
    check_dump("g23")
    node = plain()
    node.process(4242)
    node.client(4242, sm_percent=99, memory_mib=300)
    assert node.row(4242).verdict == "other-team"


def check_g25() -> None:
    _, report = replayed("g25")
    assert verdicts(report) == {"0 197976": "unattributed", "0 198051": "unattributed"}
    node = plain()
    node.pod("share")
    node.pod_given("share", [f"uuid:{gpu_id(0)}"])
    row = client(node, ("/tmp/nbody",), exe="/tmp/nbody", user="root", container="share")
    assert row.verdict == "expected"


# ------------------------------------------------------------------ the table

CHECKS: dict[str, Callable[[], None]] = {
    **{case: lambda case=case: check_dump(case) for case in DUMPS if case not in ("g04", "g23")},  # type: ignore[misc]
    **{case: lambda case=case: check_cgroup(case) for case in CGROUPS},  # type: ignore[misc]
    **{case: lambda case=case: check_log(case) for case in XIDS},  # type: ignore[misc]
    "b01": check_b01,
    "b03": check_b03,
    "b06": check_b06,
    "b07": check_b07,
    "b09": check_b09,
    "b10": check_b10,
    "b20": check_b20,
    "b23": check_b23,
    "b24": check_b24,
    "b27": check_b27,
    "e02": check_e02,
    "e03": check_e03,
    "e05": check_e05,
    "e06": check_e06,
    "e07": check_e07,
    "e08": check_e08,
    "e11": check_e11,
    "e12": check_e12,
    "e15": check_e15,
    "e18": check_e18,
    "e20": check_e20,
    "e21": check_e21,
    "e22": check_e22,
    "f01": lambda: check_miner_lines("f01"),
    "f04": check_f04,
    "f06": check_f06,
    "f07": check_f07,
    "f10": lambda: check_miner_lines("f10"),
    "f12": check_f12,
    "f14": check_f14,
    "f16": check_f16,
    "f17": check_f17,
    "f19": check_f19,
    "f21": check_f21,
    "f22": lambda: check_miner_lines("f22"),
    "f23": check_f23,
    "g01": lambda: check_benign("g01"),
    "g02": check_g02,
    "g04": check_g04,
    "g05": lambda: check_benign("g05"),
    "g06": lambda: check_benign("g06"),
    "g08": lambda: check_benign("g08"),
    "g10": check_g10,
    "g11": lambda: check_named_activity("g11", "hash-cracking", "/usr/bin/hashcat"),
    "g13": check_g13,
    "g17": check_g17,
    "g22": lambda: check_benign("g22"),
    "g23": check_g23,
    "g25": check_g25,
}  # fmt: skip


@pytest.mark.skipif(not FILES, reason="the collected cases are not beside this checkout")
@pytest.mark.parametrize("case", sorted(CHECKS))
def test_the_right_answer(case: str) -> None:
    CHECKS[case]()


# These build their node from what is told, and read no file.
WITHOUT_FILE = ("b20", "b24", "b27")


@pytest.mark.parametrize("case", [*sorted(OWN), *WITHOUT_FILE])
def test_the_right_answer_in_our_own_words(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FILES", OWN)
    CHECKS[case]()


@pytest.mark.skipif(not FILES, reason="the collected cases are not beside this checkout")
def test_every_case_has_its_entry() -> None:
    assert set(FILES) == set(CHECKS)


def test_an_argument_belongs_to_a_case_and_says_something() -> None:
    assert set(ARGUED) <= set(CHECKS)
    assert all(len(reason.split()) > 8 for reason in ARGUED.values())
