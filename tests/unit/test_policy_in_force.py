"""What a policy changes: who is expected by which key, and which findings exceptions silence."""

from __future__ import annotations

import pytest

from tests.support.nodes import NodeBuilder, executable, gpu_id

MINER = ("./rig", "-a", "kawpow", "-o", "stratum+tcp://pool.example:6060", "-u", "WALLET_X.rig")


def _entry(match: str, more: str = "") -> str:
    return f"workloads: [{{name: ours, match: {{{match}}}{more}}}]"


# ------------------------------------------------------------------ workloads


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ("pod_namespace: research", True),
        ("pod_namespace: [other, research]", True),
        ("pod_namespace: resea", False),
        ("pod_name: 'train*'", True),
        ("pod_name: trai", False),
        ("pod_labels: {team: vision}", True),
        ("pod_labels: {team: vision, tier: gold}", False),
        ("image: registry.example/train", True),
        ("image: registry.example/train:1", True),
        ("image: registry.example/train:2", False),
        ("image: registry.example/tra", False),
        ("image: train", False),
        ("pod_namespace: research, pod_name: other", False),
    ],
)
def test_a_pod_matches_whole_words_of_what_the_runtime_confirms(
    node: NodeBuilder, match: str, fits: bool
) -> None:
    node.source("kubernetes", scheduled=True)
    node.pod("train", pod_labels={"team": "vision"})
    node.process(10, user="root", container="train")
    node.client(10)
    assert (node.row(10, policy=_entry(match)).verdict == "expected") is fits


def test_an_image_digest_matches_the_digest(node: NodeBuilder) -> None:
    node.container("x")
    node.process(10, user="root", container="x")
    node.client(10)
    digest = node.containers[0].image_digest
    assert node.row(10, policy=_entry(f"image_digest: '{digest}'")).verdict == "expected"
    assert node.row(10, policy=_entry("image_digest: 'sha256:00'")).verdict != "expected"


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ("slurm_account: physics", True),
        ("slurm_partition: gpu", True),
        ("slurm_user: alice", True),
        ("slurm_user: bob", False),
        ("user: alice", True),
        ("user: '1000'", True),
        ("user: ali", False),
        ("binary: /usr/bin/python3.11", True),
        ("binary: /usr/bin/python3*", True),
        ("binary: /usr/bin/python3", False),
        ("binary: /home/*", False),
    ],
)
def test_a_process_matches_by_job_account_and_binary(
    node: NodeBuilder, match: str, fits: bool
) -> None:
    # Its job was given GPU 1; the policy alone may expect it on GPU 0.
    node.process(10, cgroup=node.job("7", ["index:1"], account="physics", partition="gpu"))
    node.client(10)
    assert (node.row(10, policy=_entry(match)).verdict == "expected") is fits


def test_a_unit_matches_only_when_systemd_confirms_it(node: NodeBuilder) -> None:
    node.process(10, user="root", exe="/srv/r", cgroup="/system.slice/render@1.service")
    node.client(10)
    assert node.row(10, policy=_entry("unit: 'render@*'")).verdict == "unattributed"
    node.source("systemd", running=("render@1.service",))
    assert node.row(10, policy=_entry("unit: 'render@*'")).verdict == "expected"


def test_a_match_by_a_binary_that_others_can_write_is_only_a_claim(node: NodeBuilder) -> None:
    node.process(10, exe=executable("/srv/tool", mode=0o100777))
    node.client(10)
    row = node.row(10, policy=_entry("binary: /srv/tool"))
    assert row.verdict == "other-team"
    assert "only claims to be ours" in row.path[0]


def test_a_users_own_binary_narrows_a_match_by_that_user_and_proves_nothing_alone(
    node: NodeBuilder,
) -> None:
    own = executable("/home/alice/env/bin/train", directory_writable_by=(1000,))
    node.process(10, exe=own)
    node.process(11, exe=own, user="bob")
    node.client(10)
    node.client(11)
    both = _entry("user: alice, binary: /home/alice/env/bin/train")
    assert node.row(10, policy=both).verdict == "expected"
    assert node.row(11, policy=both).verdict != "expected"
    alone = _entry("binary: /home/alice/env/bin/train")
    assert node.row(10, policy=alone).verdict == "other-team"


@pytest.mark.parametrize(
    ("gpus", "verdict"),
    [
        ("all", "expected"),
        ("[0]", "expected"),
        ("['0']", "expected"),
        ("[1, 2]", "wrong-gpu"),
        (f"[{gpu_id(0)}]", "expected"),
        ("['00000000:10:00.0']", "expected"),
        ("['minor:0']", "expected"),
    ],
)
def test_a_policy_entry_covers_the_gpus_it_names(
    node: NodeBuilder, gpus: str, verdict: str
) -> None:
    node.process(10)
    node.client(10)
    row = node.row(10, policy=_entry("user: alice", f", owner: a team, gpus: {gpus}"))
    assert (row.verdict, row.owner) == (verdict, "a team")


def test_a_policy_entry_does_not_clear_a_miner(node: NodeBuilder) -> None:
    node.process(10, exe="/home/alice/rig", argv=MINER)
    node.client(10)
    assert node.row(10, policy=_entry("user: alice")).verdict == "cryptominer"


def test_a_peer_that_the_policy_does_not_list_is_a_sign(node: NodeBuilder) -> None:
    policy = _entry("user: alice", ", egress: ['10.0.0.0/8', '192.0.2.7:443']")
    node.process(10)
    node.client(10)
    node.connection(10, "10.1.2.3", 9999)
    node.connection(10, "192.0.2.7", 443)
    assert node.judge(policy).findings == ()
    node.connection(10, "192.0.2.7", 444)
    report = node.judge(policy)
    assert [f.rule for f in report.findings] == ["expected_process_with_signs"]
    assert "192.0.2.7:444" in report.findings[0].evidence[0].text


# ------------------------------------------------------------------ exceptions


def _exception(rule: str, more: str) -> str:
    return f"exceptions: [{{rule: {rule}, reason: demo, {more}}}]"


def test_an_exception_silences_its_rule_for_what_it_names_and_nothing_else(
    node: NodeBuilder,
) -> None:
    policy = _exception("gpu_process_of_other_team", "match: {user: bob}, expires: 2026-02-01")
    for pid, user in ((10, "bob"), (11, "carol")):
        node.process(pid, user=user)
        node.client(pid)
    report = node.judge(policy)
    assert {f.subject.pid: f.silenced_by for f in report.findings} == {
        10: "exception of the policy: demo (until 2026-02-01)",
        11: None,
    }
    assert {r.pid: r.silenced_by is not None for r in report.rows} == {10: True, 11: False}


def test_an_expired_exception_no_longer_silences_and_says_so(node: NodeBuilder) -> None:
    policy = _exception("gpu_process_of_other_team", "match: {user: bob}, expires: 2025-12-31")
    node.process(10, user="bob")
    node.client(10)
    assert {f.rule: f.silenced_by for f in node.judge(policy).findings} == {
        "gpu_process_of_other_team": None,
        "exception_expired": None,
    }


def test_an_exception_holds_on_its_last_day(node: NodeBuilder) -> None:
    policy = _exception("gpu_process_of_other_team", "match: {user: bob}, expires: 2026-01-01")
    node.process(10, user="bob")
    node.client(10)
    assert [f.silenced_by is not None for f in node.judge(policy).findings] == [True]


def test_an_exception_by_a_claim_does_not_silence(node: NodeBuilder) -> None:
    policy = _exception("gpu_process_suspicious", "match: {binary: /srv/tool}")
    node.process(10, exe=executable("/srv/tool", deleted=True))
    node.client(10)
    assert [f.silenced_by for f in node.judge(policy).findings] == [None]


def test_an_exception_by_path_is_for_files_and_not_for_what_a_process_calls_itself(
    node: NodeBuilder,
) -> None:
    policy = """
        exceptions:
          - {rule: gpu_cryptominer, reason: a file, path: rig}
          - {rule: autostart_suspicious, reason: known, path: /etc/cron.d/x}
    """
    node.process(10, exe="/home/alice/rig", argv=MINER)
    node.client(10)
    node.autostart("cron", "/etc/cron.d/x", "* * * * * root /tmp/.x/go", "/tmp/.x/go", line=3)
    silenced = {f.rule: f.silenced_by is not None for f in node.judge(policy).findings}
    assert silenced == {"gpu_cryptominer": False, "autostart_suspicious": True}


def test_an_exception_by_gpu_number_means_that_gpu_and_no_other_gpus_mig_device() -> None:
    node = NodeBuilder()
    node.gpu(0)
    node.gpu(1, mig_enabled=True)
    for pid, gpu in ((10, 0), (11, node.mig(1, 0))):
        node.process(pid, user="bob")
        node.client(pid, gpu)
    report = node.judge(_exception("gpu_process_of_other_team", "gpu: 0"))
    assert {f.subject.pid: f.silenced_by is not None for f in report.findings} == {
        10: True,
        11: False,
    }


def test_an_exception_for_one_gpu_does_not_cover_the_process_on_another(node: NodeBuilder) -> None:
    node.process(10, user="bob")
    node.client(10, 0)
    node.client(10, 1)
    report = node.judge(_exception("gpu_process_of_other_team", "gpu: 0"))
    assert [f.silenced_by for f in report.findings] == [None]
