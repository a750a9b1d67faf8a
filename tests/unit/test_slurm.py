"""What Slurm answers, and what gpuwarden makes of it when the answer is late, cut or forged."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Malformed, TimedOut, Unavailable
from gpuwarden.expected import slurm
from gpuwarden.expected.slurm import jobs as slurm_jobs
from gpuwarden.expected.slurm.gres import Gres, parse_gres
from gpuwarden.host import CommandOutput
from gpuwarden.model import CgroupPlacement, Process, SourceRun, Workload
from gpuwarden.sensors.seen import Seen, StatLine
from tests.support.recorded_host import RecordedHost

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
CASES = Path(__file__).parents[3] / "shared" / "cases"
NODE = "gpu-006"
HEADER = "JOBID|STATE|UID|USER|ACCOUNT|PARTITION|START_TIME|NODELIST\n"
PIDS_HEADER = "PID      JOBID    STEPID   LOCALID GLOBALID\n"
UNKNOWN = CommandOutput(1, b"", b"slurm_load_jobs error: Invalid job id specified\n")
DOWN = CommandOutput(1, b"", b"slurm_load_jobs error: Unable to contact slurm controller\n")
SLUID = "s0123456789ABC"


def said(text: str) -> CommandOutput:
    return CommandOutput(0, text.encode(), b"")


def job_text(job: str, gres: str = "gpu:a100:1(IDX:0)", state: str = "RUNNING") -> str:
    return (
        f"JobId={job} JobName=train\n"
        "   UserId=alice(1001) GroupId=users(100) MCS_label=N/A\n"
        f"   JobState={state} Reason=None Dependency=(null)\n"
        "   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*\n"
        "   JOB_GRES=gpu:a100:1\n"
        "     Nodes=gpu-[001-005] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:6-7)\n"
        f"     Nodes={NODE} CPU_IDs=0-3 Mem=16384 GRES={gres}\n"
        "   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0\n\n"
    )


def row(job: str, state: str = "RUNNING") -> str:
    return f"{job}|{state}|1001|alice|vision|gpu|1796035660|{NODE}\n"


@dataclass
class Answers:
    """What each of Slurm's commands prints; a missing one is not installed."""

    ping: CommandOutput = field(
        default_factory=lambda: said("Slurmctld(primary) at ctl is DOWN\nSlurmctld(backup) is UP\n")
    )
    squeue: CommandOutput | Exception = field(default_factory=lambda: said(HEADER))
    node: CommandOutput = field(
        default_factory=lambda: said(f"NodeName={NODE} Arch=x86_64\n   Gres=gpu:a100:8(S:0-1)\n")
    )
    aliases: CommandOutput = field(default_factory=lambda: said(f"{NODE}\n"))
    listpids: CommandOutput = field(default_factory=lambda: said(PIDS_HEADER))
    jobs: dict[str, CommandOutput | Exception] = field(default_factory=dict)
    json: CommandOutput | Exception = field(default_factory=lambda: UNKNOWN)
    asked: list[list[str]] = field(default_factory=list)


class SlurmHost(RecordedHost):
    """A recorded tree whose Slurm commands answer as told."""

    def __init__(self, root: Path, answers: Answers) -> None:
        super().__init__(root)
        self.answers = answers

    @property
    def is_local(self) -> bool:
        return True

    def command(
        self, argv: list[str], *, deadline_seconds: float, environment: dict[str, str] | None = None
    ) -> CommandOutput:
        assert 0 < deadline_seconds <= slurm.COMMAND_SECONDS
        assert (environment or {}).get("SLURM_TIME_FORMAT") == "%s"
        self.answers.asked.append(argv)
        answer = self._answer(argv)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, argv: list[str]) -> CommandOutput | Exception:
        answers = self.answers
        if argv[0] == "squeue":
            return answers.json if "--json" in argv else answers.squeue
        if argv[1:] == ["ping"]:
            return answers.ping
        if argv[1:] == ["listpids"]:
            return answers.listpids
        if argv[1:] == ["show", "aliases"]:
            return answers.aliases
        if argv[1:3] == ["show", "node"]:
            assert argv[3] == NODE
            return answers.node
        assert argv[1:4] == ["show", "job", "-d"]
        return answers.jobs.get(argv[4], UNKNOWN)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/slurm.conf").write_text("ProctrackType=proctrack/cgroup\n")
    (tmp_path / "proc/77").mkdir(parents=True)
    (tmp_path / "proc/77/cmdline").write_bytes(b"/usr/sbin/slurmd\0-D\0")
    (tmp_path / "proc/77/environ").write_bytes(b"HOME=/root\0")
    (tmp_path / "proc/77/exe").symlink_to("/usr/sbin/slurmd")
    return tmp_path


def table(comm: str = "slurmd") -> dict[int, StatLine]:
    return {77: StatLine(77, comm, "S", 1, 77, 77, 0, 0, 100, 0, 1)}


def seen_with(**environment_by_pid: str) -> Seen:
    """A running slurmd, and processes ``p<pid>`` that carry a job id in their environment."""
    seen = Seen(table=table())
    for name, job in environment_by_pid.items():
        seen.add(Process(pid=int(name[1:]), start_time_ticks=1, environment={"SLURM_JOB_ID": job}))
    return seen


def ask(
    root: Path, answers: Answers, seen: Seen | None = None
) -> tuple[SourceRun, dict[str, Workload]]:
    run, workloads = slurm.read(SlurmHost(root, answers), seen or seen_with())
    assert run.workloads == len(workloads)
    return run, {workload.job_id or "": workload for workload in workloads}


def test_a_running_job_is_a_workload_with_this_nodes_gpus(root: Path) -> None:
    answers = Answers(
        squeue=said(HEADER + row("42")),
        jobs={"42": said(job_text("42", "gpu:a100:2(IDX:0,3)"))},
        listpids=said(PIDS_HEADER + "-1 42 extern 0 0\n900 42 0 0 0\n901 42 0 1 1\n"),
    )
    run, workloads = ask(root, answers)
    assert (run.state, run.reason, run.running, run.scheduled) == ("ok", "", ("42",), True)
    job = workloads["42"]
    assert job.gpus == ("minor:0", "minor:3")
    assert (job.user, job.uid, job.account, job.partition) == ("alice", 1001, "vision", "gpu")
    assert job.pids == (900, 901)
    assert job.started_at_ns == 1796035660 * 10**9
    assert not job.shared


def test_a_node_without_gpu_gres_is_not_scheduled_by_slurm(root: Path) -> None:
    run, _ = ask(root, Answers(node=said(f"NodeName={NODE} Arch=x86_64\n   Gres=(null)\n")))
    assert (run.state, run.scheduled) == ("ok", False)


def test_gres_conf_decides_what_an_index_means(root: Path) -> None:
    (root / "etc/slurm/gres.conf").write_text("Include nvml.conf\n")
    (root / "etc/slurm/nvml.conf").write_text("AutoDetect=nvml\n")
    answers = Answers(squeue=said(HEADER + row("42")), jobs={"42": said(job_text("42"))})
    assert ask(root, answers)[1]["42"].gpus == ("index:0",)
    (root / "etc/slurm/gres.conf").write_text("Name=gpu File=/dev/nvidia[4-7]\n")
    assert ask(root, answers)[1]["42"].gpus == ("minor:4",)


def test_the_daemons_own_settings_name_the_node_and_the_cluster(root: Path) -> None:
    (root / "etc/slurm/slurm.conf").rename(root / "etc/slurm/other.conf")
    (root / "proc/77/environ").write_bytes(
        b"SLURMD_NODENAME=" + NODE.encode() + b"\0SLURM_CONF=/etc/slurm/other.conf\0"
    )
    answers = Answers(aliases=said("wrong\n"))
    assert ask(root, answers)[0].state == "ok"
    (root / "proc/77/environ").write_bytes(b"SLURM_CONF=/etc/slurm/other.conf\0")
    (root / "proc/77/cmdline").write_bytes(b"slurmd\0-N\0" + NODE.encode() + b"\0")
    assert ask(root, answers)[0].state == "ok"


LOST: list[CommandOutput | Exception] = [
    DOWN,
    TimedOut("squeue: no answer within 2 s"),
    Unavailable("squeue: not installed"),
    CommandOutput(0, b"", b""),
    CommandOutput(0, b"\n", b""),
    CommandOutput(0, HEADER.encode(), b"slurm_load_jobs error: Socket timed out\n"),
    CommandOutput(0, b"", b"squeue: error: Invalid node name gpu-006\n"),
    said((HEADER + row("42"))[:-4]),
    said(row("42")),
    said(HEADER + "42|RUNNING\n"),
    said(HEADER + "slurm_load_jobs error|x|1|a|b|c|d|e\n"),
]


@pytest.mark.parametrize("answer", LOST)
def test_a_squeue_that_fails_never_means_no_jobs(
    root: Path, answer: CommandOutput | Exception
) -> None:
    run, workloads = ask(root, Answers(squeue=answer), seen_with(p5="42"))
    assert run.state == "failed"
    assert run.reason
    assert run.remedy
    assert (run.running, run.ended, workloads) == ((), (), {})


def test_a_controller_that_is_down_is_not_asked_for_jobs(root: Path) -> None:
    answers = Answers(ping=CommandOutput(1, b"Slurmctld(primary) at ctl is DOWN\n", b""))
    run, _ = ask(root, answers, seen_with(p5="42"))
    assert (run.state, run.running, run.ended) == ("failed", (), ())
    # squeue retries for many seconds where ping answers at once.
    assert not any(argv[0] == "squeue" for argv in answers.asked)


def test_an_answering_controller_that_does_not_know_a_job_ends_it(root: Path) -> None:
    run, _ = ask(root, Answers(), seen_with(p5="7", p6="007", p7="x; rm", p8="-1"))
    assert run.ended == ("7",)


@pytest.mark.parametrize(
    ("state", "ended", "running"),
    [
        ("COMPLETED", True, False),
        ("CANCELLED", True, False),
        ("FAILED", True, False),
        ("TIMEOUT", True, False),
        ("OUT_OF_MEMORY", True, False),
        ("COMPLETING", False, True),
        ("SUSPENDED", False, True),
        ("PENDING", False, False),
        ("A_STATE_OF_THE_FUTURE", False, False),
    ],
)
def test_states(root: Path, state: str, ended: bool, running: bool) -> None:
    answers = Answers(squeue=said(HEADER + row("7", state)), jobs={"7": said(job_text("7"))})
    run, workloads = ask(root, answers, seen_with(p5="7"))
    assert run.state == "ok"
    assert ("7" in run.ended) == ended
    assert ("7" in run.running) == running
    assert ("7" in workloads) == running


def test_a_job_that_runs_elsewhere_is_neither_running_here_nor_ended(root: Path) -> None:
    run, workloads = ask(root, Answers(jobs={"7": said(job_text("7"))}), seen_with(p5="7"))
    assert (run.state, run.running, run.ended, workloads) == ("ok", (), (), {})
    assert "job 7 is RUNNING, but not on this node" in run.reason


def test_a_job_that_is_not_answered_for_is_neither_running_nor_ended(root: Path) -> None:
    run, _ = ask(root, Answers(jobs={"7": DOWN}), seen_with(p5="7"))
    assert (run.state, run.running, run.ended) == ("ok", (), ())
    assert "job 7 was not answered for" in run.reason


def test_a_running_job_whose_gpus_cannot_be_learned_fails_the_source(root: Path) -> None:
    answers = Answers(
        squeue=said(HEADER + row("7") + row("8")),
        jobs={"7": TimedOut("scontrol: no answer"), "8": said(job_text("8"))},
    )
    run, workloads = ask(root, answers)
    assert run.state == "failed"
    assert "job 7" in run.reason
    assert set(run.running) == {"7", "8"}
    assert set(workloads) == {"8"}


def test_job_ids_come_from_sockets_cgroups_and_listpids_too(root: Path) -> None:
    (root / "var/spool/slurmd").mkdir(parents=True)
    (root / f"var/spool/slurmd/{NODE}_11.4294967291").touch()
    (root / "var/spool/slurmd/hwloc_topo_whole.xml").touch()
    seen = seen_with()
    seen.add(Process(pid=5, start_time_ticks=1, cgroup=CgroupPlacement(slurm_job="12")))
    answers = Answers(listpids=said(PIDS_HEADER + "900 13 batch 0 0\n"))
    run, _ = ask(root, answers, seen)
    assert run.ended == ("11", "12", "13")


def test_a_sluid_is_confirmed_by_the_steps_own_pids(root: Path) -> None:
    seen = seen_with()
    for pid, name in ((900, SLUID), (901, "s0123456789XYZ")):
        seen.add(Process(pid=pid, start_time_ticks=1, cgroup=CgroupPlacement(slurm_job=name)))
    answers = Answers(
        squeue=said(HEADER + row("42")),
        jobs={"42": said(job_text("42"))},
        listpids=said(PIDS_HEADER + "900 42 batch 0 0\n"),
    )
    run, _ = ask(root, answers, seen)
    assert set(run.running) == {"42", SLUID}
    assert "SLUID" in run.reason
    assert not any(argv[-1].startswith("s0") for argv in answers.asked)


def test_a_forged_job_name_gets_no_gpus(root: Path) -> None:
    # 22.05 prints a job's name as it is; here one ends in whole lines that look like Slurm's own.
    forged = job_text("42").replace(
        "JobName=train\n", "JobName=x\n" + "\n".join(job_text("42").split("\n")[1:8]) + "\n"
    )
    detail = (
        '{"jobs": [{"job_id": 42, "job_state": "RUNNING", "nodes": "gpu-006",'
        ' "gres_detail": ["gpu:a100:1(IDX:5)"]}], "errors": []}'
    )
    answers = Answers(squeue=said(HEADER + row("42")), jobs={"42": said(forged)}, json=said(detail))
    run, workloads = ask(root, answers)
    assert run.state == "ok"
    assert workloads["42"].gpus == ("minor:5",)
    answers.json = CommandOutput(1, b"", b"squeue: unrecognized option '--json'\n")
    run, workloads = ask(root, answers)
    assert run.state == "failed"
    assert workloads == {}


def test_a_name_with_one_forged_line_changes_nothing() -> None:
    printed = (FIXTURES / "scontrol-job-22.05.txt").read_bytes()
    job = slurm_jobs.parse_scontrol_job(printed, "1", "gpu-007")
    assert job.gres == (Gres(name="gpu", type="h100", count=1, indices=(0,)),)
    assert (job.uid, job.user, job.states) == (65534, "nobody", ("RUNNING",))
    for cut in (10, 200, 900):
        with pytest.raises(Malformed):
            slurm_jobs.parse_scontrol_job(printed[:cut], "1", "gpu-007")
    with pytest.raises(Malformed):
        slurm_jobs.parse_scontrol_job(printed, "2", "gpu-007")


def test_loose_process_tracking_is_said(root: Path) -> None:
    (root / "etc/slurm/slurm.conf").write_text("Include part.conf\n")
    (root / "etc/slurm/part.conf").write_text("proctracktype=proctrack/pgid\n")
    assert "proctrack/pgid" in ask(root, Answers())[0].reason


def test_absent_without_slurm(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    run, workloads = slurm.read(RecordedHost(tmp_path), Seen(table=table("sshd")))
    assert (run.state, workloads) == ("absent", [])


def test_absent_where_only_the_client_is_installed(root: Path) -> None:
    answers = Answers(aliases=CommandOutput(1, b"", b"No alias found\n"))
    run, _ = ask(root, answers, Seen(table=table("sshd")))
    assert run.state == "absent"


def test_a_users_process_called_slurmd_is_not_slurm(root: Path) -> None:
    (root / "etc/slurm/slurm.conf").unlink()
    (root / "files.txt").write_text("/proc/77 mode=040555 uid=1001\n")

    class LiveHost(SlurmHost):
        @property
        def is_live(self) -> bool:
            return True

    run, _ = slurm.read(LiveHost(root, Answers()), Seen(table=table()))
    assert run.state == "absent"


def test_a_mounted_root_with_slurm_has_failed_with_a_remedy(root: Path) -> None:
    run, _ = slurm.read(RecordedHost(root), Seen(table=table()))
    assert run.state == "failed"
    assert "munge" in run.remedy


def test_both_styles_of_json() -> None:
    old = slurm_jobs.parse_squeue_json((FIXTURES / "squeue-22.05.json").read_bytes(), "gpu-007")
    assert old["1"].gres == parse_gres("gpu:h100:1(IDX:0)")
    assert old["2"].gres == parse_gres("gpu:h100:1(IDX:1)")
    assert old["1"].is_running
    assert old["3"].is_elsewhere_or_waiting
    new = (FIXTURES / "squeue-24.11.json").read_bytes()
    assert slurm_jobs.parse_squeue_json(new, "gpu-005")["42"].gres == parse_gres(
        "gpu:a100:2(IDX:0-1)"
    )
    second = slurm_jobs.parse_squeue_json(new, "gpu-006")
    assert second["42"].gres == parse_gres("gpu:a100:2(IDX:2-3)")
    assert second["42"].started_at_ns == 2000 * 10**9
    assert second["43"].is_running
    assert second["43"].started_at_ns is None
    assert slurm_jobs.parse_squeue_json(new, "gpu-009")["42"].gres is None


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not here")
def test_the_collected_json_has_one_detail_a_node() -> None:
    data = (CASES / "e" / "e11-squeue-newer.json").read_bytes()
    for node, indices in (("gpu-005", (0, 1)), ("gpu-006", (2, 3))):
        jobs = slurm_jobs.parse_squeue_json(data, node)
        assert [item.indices for item in jobs["42"].gres or ()] == [indices]
        assert [item.indices for item in jobs["1005"].gres or ()] == [(0,)]


@pytest.mark.skipif(not CASES.is_dir(), reason="the collected cases are not here")
def test_two_jobs_may_share_a_gpu_by_shards_and_mps(root: Path) -> None:
    lines = (CASES / "e" / "e15-scontrol-shared-gpu.txt").read_text().splitlines()
    found = [slurm_jobs.parse_allocation([line], "cn-001") for line in lines]
    assert [[item.name for item in items or ()] for items in found] == [["shard"], ["mps"], []]
    answers = Answers(
        squeue=said(HEADER + row("1") + row("2")),
        jobs={
            "1": said(job_text("1", "shard:2(IDX:0)")),
            "2": said(job_text("2", "mps:100(IDX:0)")),
        },
    )
    _, workloads = ask(root, answers)
    assert [workloads[job].gpus for job in "12"] == [("minor:0",)] * 2
    assert all(workloads[job].shared for job in "12")


def test_json_with_errors_or_cut_off_is_no_answer() -> None:
    with pytest.raises(Unavailable):
        slurm_jobs.parse_squeue_json(b'{"jobs": [], "errors": [{"error": "x"}]}', NODE)
    for data in (b"", b"{", b"[]", b'{"errors": []}', b'{"jobs": [{"job_id": "x"}]}'):
        with pytest.raises(Malformed):
            slurm_jobs.parse_squeue_json(data, NODE)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_malformed(data: bytes) -> None:
    heads = (b"", HEADER.encode(), PIDS_HEADER.encode(), b"NodeName=x\n   Gres=", b'{"jobs": [')
    for head in heads:
        for parse in (
            slurm_jobs.parse_squeue,
            slurm_jobs.parse_listpids,
            slurm_jobs.parse_node_gres,
            lambda text: slurm_jobs.parse_squeue_json(text, NODE),
            lambda text: slurm_jobs.parse_scontrol_job(text, "1", NODE),
        ):
            try:
                parse(head + data)
            except (Malformed, Unavailable):
                continue


@given(st.data())
def test_a_job_text_with_anything_inserted_never_gains_gpus_unseen(data: st.DataObject) -> None:
    """Wherever its owner's name stands, a job either keeps its GPUs or is Malformed."""
    lines = job_text("42").split("\n")
    forged = data.draw(st.lists(st.sampled_from([*lines, "     Nodes=x", "x"]), max_size=8))
    text = "\n".join(["JobId=42 JobName=" + "\n".join(["x", *forged]), *lines[1:]])
    text = re.sub("IDX:0\\)(?=.*IDX:0\\))", "IDX:0-7)", text, flags=re.DOTALL)
    try:
        job = slurm_jobs.parse_scontrol_job(text.encode(), "42", NODE)
    except Malformed:
        return
    assert [item.indices for item in job.gres or ()] == [(0,)]
