"""The decision tree: what is asked first, what the path says, and what the dead leave behind."""

from __future__ import annotations

import pytest

from gpuwarden import judge as judge_module
from gpuwarden.finding import VERDICT_SEVERITY, VERDICTS
from gpuwarden.rules.registry import RULES, Rule
from tests.support.nodes import SECOND_NS, TAKEN_AT_NS, NodeBuilder, executable, gpu_id

MINER = ("./rig", "-a", "kawpow", "-o", "stratum+tcp://pool.example:6060", "-u", "WALLET_X.rig")
HASHCAT = ("hashcat", "-m", "22000", "-a", "3", "hashes.hc22000", "?d?d?d?d?d?d")

# ------------------------------------------------------------------ people and programs


def test_a_persons_process_names_the_person(node: NodeBuilder) -> None:
    node.process(10, user="bob", tty="pts/3")
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("other-team", "bob")
    assert row.path[-1] == "a proven owner? yes: bob"


def test_who_logged_in_outweighs_whom_the_process_became(node: NodeBuilder) -> None:
    node.process(10, user="root", loginuid=1001, login_user="bob", exe="/srv/tool")
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("other-team", "bob (logged in; runs as root)")


def test_a_daemon_of_nobody_is_unattributed_and_names_its_unit(node: NodeBuilder) -> None:
    node.source("systemd", running=("odd.service",))
    node.process(10, user="root", exe="/srv/odd", cgroup="/system.slice/odd.service")
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unattributed"
    assert row.path[-1].endswith("unit odd.service, confirmed by systemd; not in the policy")


def test_a_root_owned_display_server_is_proven(node: NodeBuilder) -> None:
    node.process(10, user="root", exe="/usr/lib/xorg/Xorg", argv=("Xorg", ":0"))
    node.client(10, kinds=("G",), memory_mib=4)
    row = node.row(10)
    assert (row.verdict, row.proof) == ("system", "proven")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/home/alice/Xorg", {}),
        ("/usr/bin/Xorg", {"owner_uid": 1000}),
        ("/usr/bin/Xorg", {"mode": 0o100777}),
        ("/usr/bin/Xorg", {"directory_writable_by": (-1,)}),
        ("/opt/x/Xorg", {"path_is_genuine": False}),
        ("/usr/bin/Xorg", {"deleted": True}),
    ],
)
def test_a_name_does_not_make_a_system_program(
    node: NodeBuilder, path: str, fields: dict[str, object]
) -> None:
    node.process(10, exe=executable(path, **fields))
    node.client(10)
    assert node.row(10).verdict != "system"


def test_a_system_programs_file_does_not_prove_what_was_preloaded_into_it(
    node: NodeBuilder,
) -> None:
    node.process(10, exe="/usr/bin/nv-hostengine", environment={"LD_PRELOAD": "/dev/shm/.l.so"})
    node.client(10)
    assert node.row(10).verdict == "suspicious"


def test_a_busy_system_program_that_an_init_script_starts_stays_one(node: NodeBuilder) -> None:
    node.process(10, user="root", exe="/usr/bin/nv-hostengine")
    node.client(10, sm_percent=99, memory_mib=100)
    node.autostart("init-script", "/etc/init.d/dcgm", "exec /usr/bin/nv-hostengine")
    assert node.row(10).verdict == "system"


def test_a_system_program_whose_binary_is_unread_is_only_claimed(node: NodeBuilder) -> None:
    node.process(10, user="root", exe=None, argv=("/usr/bin/nv-hostengine",))
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.proof) == ("system", "claimed")


@pytest.mark.parametrize(
    ("namespace", "verdict"), [("gpu-operator", "system"), ("research", "rogue-container")]
)
def test_a_cluster_add_on_is_known_by_digest_and_namespace(
    node: NodeBuilder, namespace: str, verdict: str
) -> None:
    node.source("kubernetes", scheduled=True)
    node.pod("exporter", namespace=namespace, image="registry.example/nvidia/dcgm-exporter:3.3")
    node.process(10, user="root", container="exporter")
    node.client(10)
    assert node.row(10).verdict == verdict


def test_an_unread_binary_of_nobody_is_unreadable(node: NodeBuilder) -> None:
    node.process(10, user="root", exe=None, unread={"exe": "permission denied"})
    node.client(10)
    row = node.row(10)
    assert row.verdict == "unreadable"
    assert row.path[-1] == "its binary? permission denied"
    assert row.unknown == ("exe: permission denied",)


# ------------------------------------------------------------------ signs come first


def test_a_miner_inside_an_expected_job_is_a_miner_and_its_job_is_named(node: NodeBuilder) -> None:
    node.process(10, exe="/home/alice/rig", argv=MINER, cgroup=node.job("7", ["index:0"]))
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.workload, row.owner) == ("cryptominer", "job 7", "alice")
    assert row.path == ("signs? a complete miner command line, inside job 7",)


def test_a_miner_inside_an_expected_pod_is_a_miner(node: NodeBuilder) -> None:
    node.pod("train")
    node.pod_given("train", [f"uuid:{gpu_id(0)}"])
    node.process(10, user="root", exe="/tmp/rig", argv=MINER, container="train")
    node.client(10)
    assert node.row(10).verdict == "cryptominer"


def test_one_kind_of_evidence_is_suspicious_and_names_whom_to_ask(node: NodeBuilder) -> None:
    node.process(10, exe=executable("/home/alice/a.out", deleted=True))
    node.client(10)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("suspicious", "alice")
    assert row.path[-1] == "signs? one kind of evidence: masquerade"


def test_a_known_name_with_saturated_compute_is_two_kinds(node: NodeBuilder) -> None:
    node.process(10, exe="/home/alice/xmrig", argv=("./xmrig",))
    node.client(10, sm_percent=40)
    assert node.row(10).verdict == "suspicious"
    node.clients.clear()
    node.client(10, sm_percent=99, memory_mib=500)
    row = node.row(10)
    assert row.verdict == "cryptominer"
    assert row.path[0].endswith("two independent kinds of evidence: signature and behaviour")


def test_saturated_compute_alone_says_nothing(node: NodeBuilder) -> None:
    node.process(10, user="bob")
    node.client(10, sm_percent=100, memory_mib=500)
    assert node.row(10).verdict == "other-team"


def test_one_sign_on_an_expected_process_is_told_and_does_not_accuse(node: NodeBuilder) -> None:
    exe = executable("/home/alice/a.out", deleted=True)
    node.process(10, exe=exe, cgroup=node.job("7", ["index:0"]))
    node.client(10)
    report = node.judge()
    assert [r.verdict for r in report.rows] == ["expected"]
    assert [(f.rule, f.severity) for f in report.findings] == [
        ("expected_process_with_signs", "warning")
    ]


def test_a_gpu_child_of_a_known_application_does_not_inherit_its_trust(node: NodeBuilder) -> None:
    node.process(10, user="bob", argv=("python3", "main.py"))
    node.process(11, user="bob", exe="/tmp/.x/worker", argv=("./worker",), ppid=10)
    node.client(10)
    node.client(11)
    assert node.row(10).verdict == "other-team"
    assert node.row(11).verdict == "suspicious"


def test_hash_cracking_is_named_and_never_mining_and_the_policy_may_allow_it(
    node: NodeBuilder,
) -> None:
    node.process(10, user="bob", exe="/usr/bin/hashcat", argv=HASHCAT)
    node.client(10, sm_percent=100, memory_mib=500)
    row = node.row(10)
    assert row.verdict == "suspicious"
    assert row.path[-1] == "signs? hash-cracking that the policy does not allow"
    allowed = node.row(10, policy="allow_activities: [hash-cracking]")
    assert allowed.verdict == "other-team"
    assert any("allowed by the policy" in e.text for e in allowed.evidence)


@pytest.mark.parametrize(
    ("library", "verdict"),
    [
        ("/home/alice/.conda/lib/libjemalloc.so.2", "other-team"),
        ("/home/alice/.x/l.so", "suspicious"),
        ("/home/alice/lib/.l.so", "suspicious"),
        ("/dev/shm/l.so", "suspicious"),
    ],
)
def test_a_preloaded_library_is_a_sign_where_honest_ones_do_not_lie(
    node: NodeBuilder, library: str, verdict: str
) -> None:
    node.process(10, environment={"LD_PRELOAD": library})
    node.client(10)
    assert node.row(10).verdict == verdict


# ------------------------------------------------------------------ the dead and the hidden


def test_a_defunct_owner_is_a_zombie_context(node: NodeBuilder) -> None:
    node.process(10, exe=None, argv=(), state="Z")
    node.client(10)
    assert node.row(10).verdict == "zombie-context"


def test_a_dead_pid_with_inheritors_names_them_and_they_share_its_verdict(
    node: NodeBuilder,
) -> None:
    node.client(10)
    node.process(11, process_group=10, session_id=10)
    node.holds_gpu(11)
    row = node.row(10)
    assert (row.verdict, row.owner) == ("zombie-context", "alice")
    assert row.path[-1] == "who holds its descriptors? pid 11 (python3.11)"
    heir = node.row(11)
    assert (heir.verdict, heir.inherited_from, heir.listed) == ("zombie-context", 10, False)
    assert [f.rule for f in node.judge().findings] == ["gpu_zombie_context"]


def test_a_dead_pid_that_nobody_holds_says_so(node: NodeBuilder) -> None:
    node.client(10)
    assert node.row(10).path == ("in /proc? no: the process is dead", "who holds it? nobody")


def test_a_dead_pid_says_when_the_holders_were_not_seen(node: NodeBuilder) -> None:
    node.sensor("holders", "failed")
    node.client(10)
    assert node.row(10).path[-1] == "who holds it? not seen: the holders sensor did not work"


def test_without_proc_a_pid_is_not_called_dead(node: NodeBuilder) -> None:
    node.sensor("processes", "failed")
    node.client(10)
    assert node.row(10).verdict == "unreadable"


def test_in_another_pid_namespace_a_number_is_nobody() -> None:
    node = NodeBuilder(host_pid_namespace=False)
    node.gpu(0)
    node.client(10)
    node.client(11)
    node.process(11, user="bob")  # a stranger with the number of the driver's pid
    for pid in (10, 11):
        row = node.row(pid)
        assert (row.verdict, row.binary) == ("unreadable", None)
        assert "another pid namespace" in row.path[0]
    # What holds the device under that number is the very process.
    node.holds_gpu(11)
    assert node.row(11).verdict == "other-team"


def test_a_hidden_pid_is_suspicious_and_a_miner_with_a_second_kind(node: NodeBuilder) -> None:
    node.hidden(10, "driver", "kill")
    node.client(10)
    assert node.row(10).verdict == "suspicious"
    node.hidden(11, "lookup")
    node.process(11, exe="/home/alice/xmrig", argv=("xmrig",))
    node.client(11)
    assert node.row(11).verdict == "cryptominer"
    assert {f.rule for f in node.judge().findings} >= {"process_hidden", "gpu_cryptominer"}


def test_stuck_in_the_kernel_after_a_fault_of_its_own_gpu_is_hung(node: NodeBuilder) -> None:
    node.process(10, state="D", started_at_ns=TAKEN_AT_NS - 3600 * SECOND_NS)
    node.client(10)
    assert node.row(10).verdict == "other-team"
    node.xid(119, 1)  # another GPU's
    node.xid(119, at_ns=TAKEN_AT_NS - 7200 * SECOND_NS)  # before it started
    node.xid(119, trusted=False)  # anybody can write that
    assert node.row(10).verdict == "other-team"
    node.xid(119)
    row = node.row(10)
    assert row.verdict == "zombie-context"
    assert "Xid 119 after it started" in row.path[0]


def test_a_holder_that_was_gone_a_moment_later_is_not_a_zombie(node: NodeBuilder) -> None:
    node.holds_gpu(10)
    assert node.row(10).verdict == "unreadable"


# ------------------------------------------------------------------ holders and GPUs alone


def test_a_worker_takes_the_verdict_of_the_client_it_descends_from(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.process(11, ppid=10)
    node.client(10)
    node.holds_gpu(10)
    node.holds_gpu(11)
    row = node.row(11)
    assert (row.verdict, row.inherited_from, row.workload) == ("expected", 10, "job 7")
    assert node.judge().findings == ()


def test_a_miner_that_only_holds_the_device_keeps_its_own_verdict(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.client(10)
    gone = executable("/home/alice/x", deleted=True)
    node.process(11, exe="/tmp/rig", argv=MINER, ppid=10)
    node.process(12, exe=gone, argv=("x",), ppid=10)
    for pid, wanted in ((11, "cryptominer"), (12, "suspicious")):
        node.holds_gpu(pid)
        assert (node.row(pid).verdict, node.row(pid).inherited_from) == (wanted, None)


def test_a_worker_takes_the_row_of_its_own_gpu(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.client(10, 1)
    node.client(10, 0)
    for pid, gpu, wanted in ((11, 0, "expected"), (12, 1, "wrong-gpu")):
        node.process(pid, ppid=10)
        node.holds_gpu(pid, gpu)
        assert node.row(pid).verdict == wanted


def test_a_holder_of_control_nodes_only_has_no_row(node: NodeBuilder) -> None:
    node.process(10)
    node.holder(10, kind="nvidia-ctl")
    node.holder(10, kind="nvidia-uvm")
    assert node.judge().rows == ()


def test_an_unlisted_holder_has_a_row_and_is_reported(node: NodeBuilder) -> None:
    node.process(10, user="bob")
    node.holds_gpu(10, 1)
    row = node.row(10)
    assert (row.verdict, row.gpu, row.listed) == ("other-team", "1", False)
    assert "holder_not_listed" in {f.rule for f in node.judge().findings}


def test_memory_that_a_holder_explains_is_not_leaked() -> None:
    node = NodeBuilder()
    node.gpu(0, memory_used_bytes=20 << 30)
    assert node.row(None).verdict == "leaked-memory"
    node.process(10)
    node.holds_gpu(10)
    assert [r.pid for r in node.judge().rows] == [10]


def test_memory_is_not_called_leaked_when_the_holders_were_not_seen() -> None:
    node = NodeBuilder()
    node.gpu(0, memory_used_bytes=20 << 30)
    node.gap("holders", "descriptors of 3 processes")
    assert node.row(None).verdict == "unreadable"
    node.gaps.clear()
    node.sensor("holders", "failed")
    assert node.row(None).verdict == "unreadable"


def test_a_lost_gpu_is_unreadable_not_idle() -> None:
    node = NodeBuilder()
    node.gpu(0, error="GPU is lost")
    row = node.row(None)
    assert (row.verdict, row.path) == ("unreadable", ("readable? no: GPU is lost",))


# ------------------------------------------------------------------ the judgement as a whole


def test_every_verdict_has_its_severity() -> None:
    assert set(VERDICT_SEVERITY) == set(VERDICTS)
    assert {v for v in VERDICTS if VERDICT_SEVERITY[v] == "critical"} == {
        "rogue-container",
        "cryptominer",
    }


def test_a_rule_that_breaks_costs_only_itself(
    node: NodeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> object:
        raise KeyError("a defect")

    broken = tuple(
        Rule(rule.advisory, breaks) if rule.advisory.id == "process_hidden" else rule  # type: ignore[arg-type]
        for rule in RULES
    )
    monkeypatch.setattr(judge_module, "RULES", broken)
    node.process(10, exe="/home/alice/rig", argv=MINER)
    node.client(10)
    report = node.judge()
    assert [f.rule for f in report.findings] == ["gpu_cryptominer"]
    states = {run.rule: run.state for run in report.rules}
    assert states["process_hidden"] == "failed"
    assert set(states) == {rule.advisory.id for rule in RULES}


@pytest.mark.parametrize("order", [(10, 11), (11, 10)])
def test_of_several_kin_the_same_one_is_named_whatever_the_order(
    node: NodeBuilder, order: tuple[int, int]
) -> None:
    for pid in order:
        node.process(pid, session_id=9, process_group=9, user="bob")
        node.client(pid)
    node.process(12, session_id=9, process_group=9, user="bob")
    node.holds_gpu(12)
    assert node.row(12).inherited_from == 10


def test_a_hidden_directory_beside_the_systems_programs_is_a_hiding_place(
    node: NodeBuilder,
) -> None:
    node.process(10, user="root", exe="/usr/lib/.x/daemon")
    node.client(10)
    assert node.row(10).verdict == "suspicious"
