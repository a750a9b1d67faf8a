"""The expected set as it is told, and a policy drafted from what runs and shows no signs."""

from __future__ import annotations

import json

import yaml

from gpuwarden import expectation
from gpuwarden.policy import Policy
from gpuwarden.policy_file import parse_policy
from gpuwarden.rules.registry import RULE_IDS
from tests.support.nodes import NodeBuilder, executable, policy_of

MINER = ("./rig", "-a", "kawpow", "-o", "stratum+tcp://pool.example:6060", "-u", "WALLET_X.rig")


def learnt(node: NodeBuilder) -> tuple[str, Policy]:
    text = expectation.learn(node.snapshot(), Policy())
    return text, parse_policy(text.encode(), "learnt.yaml", RULE_IDS)


# ------------------------------------------------------------------ expect


def test_the_set_names_every_source_and_what_it_gave(node: NodeBuilder) -> None:
    node.job("7", ["index:0", "index:1"], account="physics")
    node.source("kubernetes", "failed", reason="the socket refused", remedy="run as root")
    policy = policy_of("workloads: [{name: serving, owner: us, match: {user: bob}, gpus: [2]}]")
    text, complete = expectation.render(node.snapshot(), policy, "policy.yaml", as_json=False)
    assert not complete
    lines = text.splitlines()
    assert lines[lines.index("slurm: ok") + 1] == (
        "  job 7; GPUs: index:0, index:1; owner: alice; account physics"
    )
    assert "kubernetes: failed: the socket refused" in lines
    assert "  what to do: run as root" in lines
    assert lines[lines.index("policy: ok") + 1] == "  serving; GPUs: index:2; owner: us"
    assert lines[-1] == "A source failed: what it would have named is unknown, not unexpected."


def test_a_set_without_failures_is_complete(node: NodeBuilder) -> None:
    text, complete = expectation.render(node.snapshot(), Policy(), None, as_json=False)
    assert complete
    assert "policy: absent: no policy file" in text


def test_the_set_as_json_carries_its_schema_and_every_workload(node: NodeBuilder) -> None:
    node.job("7", ["index:0"])
    text, _ = expectation.render(node.snapshot(), Policy(), None, as_json=True)
    document = json.loads(text)
    assert (document["schema"], document["version"]) == ("gpuwarden.expected", 1)
    assert [w["name"] for w in document["workloads"]] == ["job 7"]
    assert {s["name"] for s in document["sources"]} == {"slurm", "kubernetes", "systemd", "policy"}


def test_names_of_jobs_do_not_reach_the_terminal_raw(node: NodeBuilder) -> None:
    node.workload("slurm", "job \x1b[2J", ["index:0"], job_id="7", user="a\nb")
    text, _ = expectation.render(node.snapshot(), Policy(), None, as_json=False)
    assert "\x1b" not in text
    assert "a\\nb" in text


# ------------------------------------------------------------------ learn


def test_what_runs_without_signs_is_drafted_and_then_expected(node: NodeBuilder) -> None:
    node.source("systemd", running=("render.service",))
    node.process(10, user="bob", exe="/usr/bin/python3.11")
    node.client(10, 1)
    node.process(11, user="root", exe="/opt/render", cgroup="/system.slice/render.service")
    node.client(11, 2)
    text, policy = learnt(node)
    assert text.startswith("# Drafted from what ran on node1 at 2026-01-01 00:00:00Z.\n")
    assert [w.match.user for w in policy.workloads] == ["bob", "root"]
    assert policy.workloads[1].match.unit == "render.service"
    assert [row.verdict for row in node.judge(policy).rows] == ["expected", "expected"]


def test_a_draft_is_narrow(node: NodeBuilder) -> None:
    node.process(10, user="bob", exe="/usr/bin/python3.11")
    node.client(10, 1)
    _, policy = learnt(node)
    node.process(11, user="bob", exe="/home/bob/other")
    node.client(11, 1)
    node.process(12, user="bob", exe="/usr/bin/python3.11")
    node.client(12, 2)
    assert {r.pid: r.verdict for r in node.judge(policy).rows} == {
        10: "expected",
        11: "other-team",
        12: "wrong-gpu",
    }


def test_what_shows_signs_is_refused_and_said_so(node: NodeBuilder) -> None:
    node.source("kubernetes", scheduled=True)
    node.process(10, exe="/home/alice/rig", argv=MINER)
    node.process(11, exe=executable("/home/alice/a.out", deleted=True))
    node.pod("tool", visible_devices="all")
    node.process(12, user="root", container="tool")
    for pid in (10, 11, 12):
        node.client(pid)
    text, policy = learnt(node)
    assert policy.workloads == []
    refused = [line for line in text.splitlines() if line.startswith("#   pid")]
    assert [line.split(",")[1].split(":")[0].strip() for line in refused] == [
        "cryptominer",
        "suspicious",
        "rogue-container",
    ]


def test_what_is_expected_or_a_system_program_needs_no_entry(node: NodeBuilder) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.client(10)
    node.process(11, user="root", exe="/usr/lib/xorg/Xorg", argv=("Xorg",))
    node.client(11, kinds=("G",))
    text, policy = learnt(node)
    assert policy.workloads == []
    assert "Not taken in" not in text


def test_a_container_is_drafted_by_what_its_runtime_confirms(node: NodeBuilder) -> None:
    node.container("notebook", device_requests=("all",))
    node.process(10, user="root", container="notebook")
    node.client(10)
    _, policy = learnt(node)
    assert policy.workloads[0].match.image_digest == node.containers[0].image_digest
    assert policy.workloads[0].match.user is None


def test_hostile_names_stay_inside_their_values(node: NodeBuilder) -> None:
    name = "x\n# evil\nworkloads: [{name: all, match: {user: alice}}]\x1b"
    node.process(10, user="bob", exe=f"/srv/{name}")
    node.client(10)
    node.process(11, exe=executable(f"/tmp/{name}", deleted=True))
    node.client(11)
    text, policy = learnt(node)
    assert [w.match.user for w in policy.workloads] == ["bob"]
    assert set(yaml.safe_load(text)) == {"version", "workloads"}
    assert "\x1b" not in text


def test_a_path_that_ends_in_a_star_is_not_learnt_as_a_pattern(node: NodeBuilder) -> None:
    node.process(10, user="bob", exe="/srv/*")
    node.client(10)
    text, policy = learnt(node)
    assert "pid 10 on GPU 0: nothing identifies it that holds" in text
    node.process(11, user="bob", exe="/srv/other")
    node.client(11)
    assert {r.pid: r.verdict for r in node.judge(policy).rows}[11] == "other-team"
