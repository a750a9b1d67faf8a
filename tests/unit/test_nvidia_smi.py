"""nvidia-smi dumps: what each form tells, what it cannot tell, and that no bytes break it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.model import Gpu, GpuClient
from gpuwarden.sensors import nvidia_smi
from gpuwarden.sensors.nvidia_smi import Dump, markup, read_dump
from gpuwarden.sensors.nvidia_smi.values import UNKNOWN_GPU, time_of

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "nvidia-smi"
CASES = ROOT.parent / "shared" / "cases"
MIB = 1 << 20


def dump_of(name: str) -> Dump:
    dump = read_dump((FIXTURES / name).read_bytes())
    assert dump is not None
    return dump


def client(dump: Dump, pid: int, gpu_id: str | None = None) -> GpuClient:
    found = [c for c in dump.clients if c.pid == pid and gpu_id in (None, c.gpu_id)]
    assert len(found) == 1, (pid, gpu_id, dump.clients)
    return found[0]


def gpu(dump: Dump, gpu_id: str) -> Gpu:
    return next(g for g in dump.gpus if g.id == gpu_id)


def says(dump: Dump, *words: str) -> bool:
    return any(all(word in f"{gap.what}: {gap.reason}" for word in words) for gap in dump.gaps)


# ------------------------------------------------------------------------------- public cases


def _a01(d: Dump) -> None:
    assert len([c for c in d.clients if c.pid == 3093]) == 2
    assert {c.reported_name for c in d.clients if c.pid == 3093} == {"./ethminer"}
    assert {c.kinds for c in d.clients if c.pid in (1357, 2384)} == {("G",)}
    assert [g.sm_percent for g in d.gpus] == [100, 98]
    assert says(d, "6 are attached and carries 2")


def _a02(d: Dump) -> None:
    assert [g.minor for g in d.gpus] == [1, 2, 3, 0]
    assert [g.index for g in d.gpus] == [None] * 4
    assert d.gpus[0].pci_address == "00001580:00:00.0"
    assert {(c.pid, c.memory_bytes) for c in d.clients} == {
        (58813, 576 * MIB),
        (58642, 576 * MIB),
    }
    assert gpu(d, client(d, 58642).gpu_id).minor == 2
    assert d.cuda_version is None


def _hidden(d: Dump) -> None:
    assert not d.clients
    assert says(d, "cannot see processes on this GPU")
    assert all("processes" in g.unread for g in d.gpus)


def _idle(d: Dump) -> None:
    assert d.gpus
    assert not d.clients
    assert not d.gaps
    assert not any("processes" in g.unread or g.error for g in d.gpus)


def _a06(d: Dump) -> None:
    xorg = client(d, 28543)
    assert (xorg.kinds, xorg.memory_bytes) == (("G",), 4 * MIB)
    assert d.gpus[0].memory_reserved_bytes == 197 * MIB


def _a07(d: Dump) -> None:
    _idle(d)
    whole, first, second = d.gpus
    assert (whole.mig_enabled, whole.sm_percent) == (True, None)
    assert whole.unread["sm_percent"] == "printed as N/A"
    assert [(m.gpu_instance_id, m.compute_instance_id) for m in (first, second)] == [(1, 0), (2, 0)]
    assert first.parent_id == second.parent_id == whole.id
    assert first.memory_used_bytes == 19 * MIB


def _a10(d: Dump) -> None:
    _idle(d)
    assert d.gpus[0].power_watts == 26.84


def _a11(d: Dump) -> None:
    _hidden(d)
    assert d.driver_version is None
    assert says(d, "driver version")
    assert d.gpus[0].power_watts == 66.84
    assert d.gpus[0].temperature_celsius == 37


def _a15(d: Dump) -> None:
    assert {c.pid: c.kinds for c in d.clients} == {
        1842: ("G",),
        3190: ("G",),
        4937: ("C",),
        34626: ("C", "G"),
    }
    assert client(d, 1842).reported_name == "cosmic-comp"


def _a18(d: Dump) -> None:
    # Filed as idle; 65 % busy with 9184 MiB in use and nobody listed is not.
    assert not d.clients
    assert d.gpus[0].sm_percent == 65
    assert says(d, "cannot see processes", "65 % busy")


def _a22(d: Dump) -> None:
    assert client(d, 29907).gpu_id == "00000000:01:00.0"
    assert client(d, 29907).memory_bytes == 47119 * MIB
    assert says(d, "damaged")


def _a23(d: Dump) -> None:
    _hidden(d)
    assert says(d, "cut off")


def _a24(d: Dump) -> None:
    share = client(d, 11844)
    assert share.reported_name is not None
    assert share.reported_name.endswith("NVIDIA GeForce Experience\\NVIDIA Share.exe")
    assert share.memory_bytes is None
    assert share.unread["memory_bytes"] == "printed as N/A"
    assert share.gpu_id == UNKNOWN_GPU
    assert says(d, "fragment")


def _b07(d: Dump) -> None:
    assert len(d.clients) == 6
    for pid in (31794, 27707):
        assert client(d, pid).reported_name is None
        assert "Unknown Error" in client(d, pid).unread["reported_name"]
    assert client(d, 27707).memory_bytes == 1011 * MIB
    assert gpu(d, client(d, 11827).gpu_id).index == 3


def _b17(d: Dump) -> None:
    assert sorted((c.gpu_id, c.pid) for c in d.clients) == [
        ("index:0", 1234),
        ("index:0", 5678),
        ("index:1", 1234),
    ]
    assert client(d, 1234, "index:0").kinds == ("C", "G")
    assert client(d, 5678).sm_percent is None
    assert says(d, "pid is -1: ignored")


def _b18(d: Dump) -> None:
    assert client(d, 4284).reported_name == "/opt/Some Dir, v2/bin/tool"
    assert client(d, 15840).memory_bytes is None
    for pid in (2248, 5678, 31794, 31795):
        assert client(d, pid).reported_name is None
    assert client(d, 31795).memory_bytes == 10151 * MIB


def _b28(d: Dump) -> None:
    assert gpu(d, "GPU-4").index == 4
    assert gpu(d, "GPU-4").sm_percent == 100
    assert client(d, 2151955).gpu_id == "GPU-4"
    assert client(d, 2151955).memory_bytes == 56510 * MIB
    assert says(d, "2151955", "another pid namespace")


def _g04(d: Dump) -> None:
    assert len(d.clients) == 4
    assert client(d, 1117159).memory_bytes is None
    assert "13020" in client(d, 1117159).unread["memory_bytes"]
    assert client(d, 167924).reported_name == "python: app.py"


def _g10(d: Dump) -> None:
    assert client(d, 2097235).reported_name == ".../64bit/22-0.0.11/Core_22.fah/FahCore_22"


def _g12(d: Dump) -> None:
    assert client(d, 7372).sm_percent == 2
    assert client(d, 7372).memory_bytes == 136 * MIB


def _g23(d: Dump) -> None:
    _hidden(d)
    assert (d.gpus[0].sm_percent, d.gpus[0].power_watts) == (86, 277.0)


def _g25(d: Dump) -> None:
    assert {c.reported_name for c in d.clients} == {"/tmp/nbody"}
    assert len(d.clients) == 2


PUBLIC: tuple[tuple[str, str, Callable[[Dump], None]], ...] = (
    ("a01", "nvidia-smi-xml", _a01),
    ("a02", "nvidia-smi-xml", _a02),
    ("a03", "nvidia-smi-xml", _hidden),
    ("a04", "nvidia-smi-xml", _idle),
    ("a06", "nvidia-smi-xml", _a06),
    ("a07", "nvidia-smi-xml", _a07),
    ("a09", "nvidia-smi-xml", _idle),
    ("a10", "nvidia-smi-xml", _a10),
    ("a11", "nvidia-smi-xml", _a11),
    ("a15", "nvidia-smi-xml", _a15),
    ("a18", "nvidia-smi-xml", _a18),
    ("a22", "nvidia-smi-xml", _a22),
    ("a23", "nvidia-smi-xml", _a23),
    ("a24", "nvidia-smi-xml", _a24),
    ("b07", "nvidia-smi-table", _b07),
    ("b17", "nvidia-smi-pmon", _b17),
    ("b18", "nvidia-smi-csv", _b18),
    ("b28", "nvidia-smi-csv", _b28),
    ("g04", "nvidia-smi-table", _g04),
    ("g10", "nvidia-smi-table", _g10),
    ("g12", "nvidia-smi-pmon", _g12),
    ("g23", "nvidia-smi-dmon", _g23),
    ("g25", "nvidia-smi-table", _g25),
)


@pytest.mark.parametrize(("case", "kind", "check"), PUBLIC, ids=[row[0] for row in PUBLIC])
def test_public_case(case: str, kind: str, check: Callable[[Dump], None]) -> None:
    files = list((CASES / case[0]).glob(f"{case}-*")) if CASES.is_dir() else []
    if not files:
        pytest.skip("the public cases are not beside this checkout")
    dump = read_dump(files[0].read_bytes())
    assert dump is not None
    assert dump.kind == kind
    assert {c.source for c in dump.clients} <= {kind}
    check(dump)


@pytest.mark.skipif(not CASES.is_dir(), reason="the public cases are not beside this checkout")
def test_every_public_xml_case_is_in_the_table() -> None:
    assert {path.name[:3] for path in (CASES / "a").iterdir()} <= {row[0] for row in PUBLIC}


# --------------------------------------------------------------------------------- own fixtures


def test_a_process_on_two_gpus_is_listed_on_both_and_missing_gpus_are_said() -> None:
    dump = dump_of("miner-on-two-of-six-384.xml")
    assert [(c.gpu_id[-1], c.pid) for c in dump.clients] == [("3", 3093), ("1", 1357), ("1", 3093)]
    assert [g.minor for g in dump.gpus] == [1, 0]
    assert dump.gpus[0].power_watts == 139.3
    assert "memory_reserved_bytes" in dump.gpus[0].unread
    assert says(dump, "6 are attached and carries 2")
    assert dump.taken_at_ns == 1505160732 * 10**9


def test_unbalanced_lists_do_not_move_a_process_to_another_gpu() -> None:
    dump = dump_of("unbalanced-550.xml")
    assert client(dump, 29907).gpu_id == "00000000:01:00.0"
    assert client(dump, 29908).gpu_id == "00000000:02:00.0"
    assert client(dump, 29908).reported_name == "train --set a<b && c>d & rest"
    assert says(dump, "damaged")


def test_mig_processes_join_their_own_device_and_the_rest_the_whole_gpu() -> None:
    dump = dump_of("mig-and-accounting-550.xml")
    whole = dump.gpus[0].id
    assert client(dump, 4001).gpu_id == f"{whole}/gi1/ci0"
    assert client(dump, 4001).reported_name == "python serve.py --model example"
    orphan = client(dump, 4002)
    assert (orphan.gpu_id, orphan.gpu_instance_id) == (whole, 7)
    assert orphan.kinds == ("C", "M")
    assert orphan.memory_bytes is None
    assert says(dump, "4002", "may not see")
    assert dump.gpus[0].power_watts == 66.92
    assert dump.gpus[0].accounting_enabled is True
    (ended,) = dump.accounted
    assert (ended.pid, ended.busy_ms, ended.running) == (3999, 7_200_000, False)
    assert ended.memory_max_bytes == 2048 * MIB


def test_lost_gpus_cost_only_themselves() -> None:
    dump = dump_of("lost-and-numa-595.xml")
    numa, reset, broken, busy, lost = dump.gpus
    assert numa.memory_is_numa is True
    assert "processes" not in numa.unread
    assert reset.error == "recovery action: Reset"
    assert reset.sm_percent is None
    assert "37100" in reset.unread["sm_percent"]
    assert broken.error == "ERR!"
    assert "Insufficient" in broken.unread["processes"]
    assert "97 % busy" in busy.unread["processes"]
    assert lost.pci_address == "00000000:0a:00.0"
    assert lost.error is not None
    assert lost.error.startswith("GPU is lost")


def test_a_cut_off_dump_keeps_whole_pids_and_drops_half_values() -> None:
    dump = dump_of("cut-off-550.xml")
    assert client(dump, 501).reported_name == "python"
    assert client(dump, 502).reported_name is None
    assert says(dump, "cut off")
    assert says(dump, "2 are attached and carries 1")
    assert "cut off in its process list" in dump.gpus[0].unread["processes"]


@pytest.mark.parametrize("end", ["<processes>\n", "<processes>", "<processes", ""])
def test_a_dump_cut_at_its_process_list_is_not_idle(end: str) -> None:
    text = "<nvidia_smi_log>\n<gpu id='00000000:01:00.0'><minor_number>12" + end
    dump = read_dump(text.encode())
    assert dump is not None
    assert "cut off" in dump.gpus[0].unread["processes"]
    # 12 may have been the beginning of 123.
    assert dump.gpus[0].minor == (12 if end.endswith(("\n", ">")) else None)


def test_a_fragment_of_several_entries_is_read() -> None:
    dump = dump_of("fragment.xml")
    assert [c.pid for c in dump.clients] == [11844, 11845]
    assert client(dump, 11844).kinds == ("C", "G")


def test_raw_bytes_in_a_name_survive() -> None:
    assert client(dump_of("raw-bytes.xml"), 42).reported_name == "evil\x1b[2J\\xff\x01name"


def test_csv_names_take_what_the_other_columns_leave() -> None:
    dump = dump_of("apps-with-commas.csv")
    assert client(dump, 4284).reported_name == "/opt/Some Dir, v2/bin/tool"
    assert client(dump, 4285).reported_name == "a, b,c , 1"
    assert client(dump, 4285).memory_bytes == 513 * MIB
    assert client(dump, 2248).reported_name is None
    assert says(dump, "graphics processes")
    assert says(dump, "on which GPU")


def test_csv_blocks_of_one_file_join_on_the_uuid() -> None:
    dump = dump_of("gpus-then-apps.csv")
    assert [g.index for g in dump.gpus] == [4, 5]
    assert client(dump, 2151955).gpu_id == "GPU-4"
    assert "processes" not in gpu(dump, "GPU-5").unread


def test_csv_without_a_header_is_read_by_its_shape() -> None:
    dump = dump_of("apps-without-header.csv")
    assert client(dump, 777).reported_name == "python, x.py"
    assert gpu(dump, client(dump, 777).gpu_id).name == "NVIDIA L4"
    assert client(dump, 778).memory_bytes == 2048 * MIB
    assert client(dump, 779).memory_bytes is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("process_name, pid, used_gpu_memory [MiB]\n#quiet, 5, 3 MiB\n", "#quiet"),
        ("process_name, pid\nnvidia-smi --query-gpu=uuid, 5\n", "nvidia-smi --query-gpu=uuid"),
        ("pid, process_name\n5, pid, name\n", "pid, name"),
        ("|  0  5  C   Processes: Driver Version: 1   3MiB |\n", "Processes: Driver Version: 1"),
        ("|  0  5  C   <nvidia_smi_log>   3MiB |\n", "<nvidia_smi_log>"),
        ("# gpu pid type sm command\n 0 5 C 1 # gpu pwr sm\n", "# gpu pwr sm"),
    ],
)
def test_a_process_cannot_hide_by_being_called_like_the_dump(text: str, name: str) -> None:
    dump = read_dump(text.encode())
    assert dump is not None
    assert client(dump, 5).reported_name == name


def test_accounting_is_not_a_list_of_running_processes() -> None:
    dump = dump_of("accounted.csv")
    assert [(a.pid, a.busy_ms, a.sm_percent) for a in dump.accounted] == [(900, 12000, 45)]
    assert not dump.clients
    assert says(dump, "cannot see processes", "no list of running")


def test_pmon_loops_give_samples_and_the_newest_plausible_value() -> None:
    dump = dump_of("pmon-three-loops.txt")
    train = client(dump, 1234)
    assert [s.sm_percent for s in train.samples] == [40, 60]
    assert train.sm_percent == 60
    assert train.memory_bytes == 950 * MIB
    assert train.reported_name == "python3 train"
    assert [g.index for g in dump.gpus] == [0, 1]
    assert says(dump, "pid is -1")


def test_pmon_without_header_is_read_by_its_shape() -> None:
    dump = dump_of("pmon-bare.txt")
    assert client(dump, 7372).memory_bytes == 136 * MIB
    assert client(dump, 7373).kinds == ("C", "G")
    assert client(dump, 7373).memory_bytes is None
    assert [g.index for g in dump.gpus] == [0, 1, 2]


def test_dmon_tells_of_gpus_and_says_that_processes_are_unseen() -> None:
    dump = dump_of("dmon.txt")
    assert [(g.index, g.sm_percent) for g in dump.gpus] == [(0, 86), (1, None)]
    _hidden(dump)


def test_the_plain_table_gives_gpus_and_processes() -> None:
    dump = dump_of("table-535.txt")
    first, second = dump.gpus
    assert (first.index, first.pci_address) == (0, "00000000:84:00.0")
    assert (first.sm_percent, first.memory_used_bytes) == (97, 20002 * MIB)
    assert second.error == "ERR!"
    assert dump.driver_version == "535.86.05"
    assert client(dump, 1117).unread["memory_bytes"].startswith("cut off")
    assert client(dump, 1118).kinds == ("C", "G")
    assert client(dump, 1119).reported_name is None
    assert client(dump, 1120).reported_name == "/usr/lib/xorg/Xorg"


def test_a_table_row_without_process_list_is_unseen_not_idle() -> None:
    dump = dump_of("table-old.txt")
    assert gpu(dump, "index:2").unread["processes"] == "its row reads Not Supported"
    assert client(dump, 13386).memory_bytes == 1205 * MIB


def test_a_failure_message_is_never_a_clean_node() -> None:
    assert says(dump_of("no-driver.txt"), "could not see them")
    for text in (
        "Failed to initialize NVML: Driver/library version mismatch\n",
        "Failed to initialize NVML: Unknown Error\n",
        "No devices were found\n",
    ):
        dump = read_dump(text.encode())
        assert dump is not None
        assert dump.gaps


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"hello", b"{}", b"a,b\n1,2\n", b"id, name, value\n1, x, 3\n", b"| a | b |\n"],
)
def test_other_text_is_no_dump(data: bytes) -> None:
    assert read_dump(data) is None


def test_utf_16_of_a_windows_redirect_reads() -> None:
    text = (FIXTURES / "miner-on-two-of-six-384.xml").read_text()
    dump = read_dump(text.encode("utf-16"))
    assert dump is not None
    assert len(dump.clients) == 3


def test_entities_and_nesting_do_not_burst() -> None:
    bomb = (
        '<!DOCTYPE nvidia_smi_log [<!ENTITY a "xxxxxxxx"><!ENTITY b "&a;&a;&a;&a;">]>\n'
        "<nvidia_smi_log><gpu id='00000000:01:00.0'><processes><process_info><pid>7</pid>"
        "<process_name>&b;&#xD800;&lt;</process_name></process_info></processes></gpu>"
        "</nvidia_smi_log>"
    )
    dump = read_dump(bomb.encode())
    assert dump is not None
    assert client(dump, 7).reported_name == "&b;&#xD800;<"
    with pytest.raises(Malformed, match="nested deeper"):
        read_dump(b"<nvidia_smi_log>" + b"<x>" * 5000)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markup, "TAG_LIMIT", 100)
    with pytest.raises(Malformed, match="tags"):
        read_dump(b"<nvidia_smi_log>" + b"<x></x>" * 100)
    monkeypatch.setattr(nvidia_smi, "LINE_LIMIT", 10)
    with pytest.raises(Malformed, match="lines"):
        read_dump(b"\n" * 11)
    monkeypatch.setattr(nvidia_smi, "DUMP_LIMIT_BYTES", 10)
    with pytest.raises(Malformed, match="MiB"):
        read_dump(b"x" * 11)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("Thu Apr 11 14:36:26 2019", 1554993386 * 10**9),
        ("Tue Dec  3 05:27:00 2019", 1575350820 * 10**9),
        ("2024/03/25 14:41:34.250", 1711377694_250_000_000),
        ("Thu Foo 11 14:36:26 2019", None),
        ("Thu Apr 11 14:36:26 9999", None),
        ("", None),
    ],
)
def test_times_are_read_as_utc(text: str, ns: int | None) -> None:
    assert time_of(text) == ns


# ------------------------------------------------------------------------------------ properties

PROCESSES = st.lists(
    st.tuples(
        st.integers(1, (1 << 22) - 1),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40),
        st.sampled_from(["C", "G", "C+G", "M+C"]),
    ),
    max_size=6,
    unique_by=lambda row: row[0],
)


@given(st.lists(PROCESSES, min_size=1, max_size=4))
@settings(deadline=None)
def test_no_process_of_a_well_formed_dump_is_lost(
    gpus: list[list[tuple[int, str, str]]],
) -> None:
    text = "<?xml version='1.0'?>\n<nvidia_smi_log>\n<driver_version>550.1</driver_version>\n"
    text += f"<attached_gpus>{len(gpus)}</attached_gpus>\n"
    for i, processes in enumerate(gpus):
        text += f'<gpu id="00000000:{i:02x}:00.0"><supported_clocks/><processes>'
        for pid, name, kind in processes:
            text += (
                f"<process_info><pid>{pid}</pid><type>{kind}</type><process_name>{escape(name)}"
                "</process_name><used_memory>1 MiB</used_memory></process_info>"
            )
        text += "</processes></gpu>\n"
    text += "</nvidia_smi_log>\n"
    dump = read_dump(text.encode())
    assert dump is not None
    # The slow, plain way: the standard library's conforming parser.
    expected = [
        (f"00000000:{i:02x}:00.0", info.findtext("pid"))
        for i, element in enumerate(ElementTree.fromstring(text).iter("gpu"))
        for info in element.iter("process_info")
    ]
    assert [(c.gpu_id, str(c.pid)) for c in dump.clients] == expected
    names = {pid: name for processes in gpus for pid, name, _ in processes}
    for found in dump.clients:
        if found.reported_name is not None and len(gpus) == 1:
            assert found.reported_name == names[found.pid]
    assert not says(dump, "damaged")


@given(PROCESSES)
@settings(deadline=None)
def test_no_process_of_a_csv_is_lost(processes: list[tuple[int, str, str]]) -> None:
    text = "pid, process_name, used_gpu_memory [MiB]\n" + "".join(
        f"{pid}, {name}, 5 MiB\n" for pid, name, _ in processes
    )
    dump = read_dump(text.encode())
    assert dump is not None
    assert [c.pid for c in dump.clients] == [pid for pid, _, _ in processes]
    assert {c.memory_bytes for c in dump.clients} <= {5 * MIB}
    for found, (_, name, _) in zip(dump.clients, processes, strict=True):
        assert found.reported_name in (name.strip(), None)


SAMPLES = sorted(FIXTURES.iterdir())
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=8,
)


def mutated(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    for how, where, what in edits:
        at = int(where * len(data))
        if how == "flip":
            data = data[:at] + what + data[at + len(what) :]
        elif how == "insert":
            data = data[:at] + what + data[at:]
        elif how == "delete":
            data = data[:at] + data[at + len(what) ** 2 :]
        else:
            data = data[: at + 1]
    return data


def sound(data: bytes) -> None:
    try:
        dump = read_dump(data)
    except Malformed:
        return
    if dump is None:
        return
    known = {g.id for g in dump.gpus}
    assert {c.gpu_id for c in dump.clients} <= known
    keys = [(c.gpu_id, c.pid) for c in dump.clients]
    assert len(keys) == len(set(keys))
    assert all(0 < c.pid < 1 << 22 for c in dump.clients)
    for text in [c.reported_name or "" for c in dump.clients] + [g.reason for g in dump.gaps]:
        text.encode()


@pytest.mark.parametrize("path", SAMPLES, ids=[path.name for path in SAMPLES])
def test_damaged_dumps_give_a_result_or_malformed(path: Path) -> None:
    original = path.read_bytes()

    @given(EDITS)
    @settings(max_examples=60, deadline=None)
    def check(edits: list[tuple[str, float, bytes]]) -> None:
        sound(mutated(original, edits))

    check()


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_any_bytes_give_a_result_or_malformed(data: bytes) -> None:
    sound(data)
    sound(b"<nvidia_smi_log>" + data)
    sound(b"# gpu pid type sm mem command\n" + data)
    sound(b"pid, process_name\n" + data)
    sound(b"| Processes:\n" + data)


@given(
    st.lists(
        st.sampled_from(
            [
                " ",
                "|",
                "0",
                "C",
                "N/A",
                "<",
                ">",
                "&",
                ",",
                "-",
                "\n",
                "GPU-1",
                "# gpu pid",
                "<gpu id='1'>",
                "<pid>",
                "</pid>",
                "<process_info>",
                "<process_name>",
                "</gpu>",
                "<![CDATA[",
                "<!--",
                "12",
                "MiB",
            ]
        )
    )
)
@settings(deadline=None)
def test_any_sequence_of_the_formats_own_words_is_survived(words: list[str]) -> None:
    sound("".join(words).encode())


@pytest.mark.parametrize(
    "unit",
    [
        b"<!--",
        b"<process_name>",
        b"<![CDATA[",
        b"<!A",
        b"<gpu id='1'",
        b"| 0  1 C " + b" " * 50,
        b" ",
        b"|   0  a",
        b"#  ",
        b"1, ",
    ],
)
def test_time_is_linear_in_hostile_repetition(unit: bytes) -> None:
    # A quadratic reader would need hours here; the limits or the end must come soon.
    sound(b"<nvidia_smi_log>\n" + unit * (2_000_000 // len(unit)))
    sound(b"| Processes:\n" + unit * (200_000 // len(unit)))
