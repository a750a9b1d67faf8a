"""AMD GPUs and their compute processes from a recorded sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Malformed, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, Gpu, GpuClient
from gpuwarden.sensors import amd
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost

HOSTS = Path(__file__).parents[1] / "hosts"


@pytest.fixture
def facts() -> list[Gpu | GpuClient | Gap]:
    return list(amd.read(RecordedHost(HOSTS / "amd-two-gpus"), Seen()))


def test_a_gpu_is_told_in_full(facts: list[Gpu | GpuClient | Gap]) -> None:
    first, _ = (fact for fact in facts if isinstance(fact, Gpu))
    assert (first.id, first.pci_address) == ("00000000:03:00.0", "00000000:03:00.0")
    assert (first.vendor, first.kfd_gpu_id, first.render_minor) == ("amd", 45061, 128)
    assert first.name == "AMD INSTINCT MI210 (fixture)"
    assert first.memory_total_bytes == 68702699520
    assert first.memory_used_bytes == 12 << 30
    assert (first.sm_percent, first.memory_busy_percent) == (97, 12)
    assert (first.temperature_celsius, first.power_watts) == (61, 251.5)
    assert (first.memory_is_numa, first.unread) == (False, {})


def test_what_a_gpu_does_not_tell_is_unread(facts: list[Gpu | GpuClient | Gap]) -> None:
    _, second = (fact for fact in facts if isinstance(fact, Gpu))
    # Its location is bus 83, device 1, function 0 of domain 1.
    assert second.pci_address == "00000001:83:01.0"
    assert second.name == "aldebaran"
    assert second.memory_total_bytes == 68702699520
    assert second.memory_used_bytes is None
    assert "not there" in second.unread["memory_used_bytes"]
    assert (second.sm_percent, "sm_percent" in second.unread) == (None, True)


def test_clients_are_those_that_use_a_gpu(facts: list[Gpu | GpuClient | Gap]) -> None:
    clients = {(c.pid, c.gpu_id): c for c in facts if isinstance(c, GpuClient)}
    assert set(clients) == {
        (4100, "00000000:03:00.0"),
        (4200, "00000001:83:01.0"),
        (4400, "00000000:03:00.0"),
    }
    busy = clients[(4100, "00000000:03:00.0")]
    assert (busy.kinds, busy.source) == (("C",), "kfd")
    assert busy.memory_bytes == 8 << 30
    assert busy.sm_percent == 50  # 52 of 416/4 compute units
    assert busy.engine_ns == {"sdma": 2_500_000}
    queued = clients[(4200, "00000001:83:01.0")]
    assert (queued.memory_bytes, queued.sm_percent) == (0, None)
    assert "sm_percent" in queued.unread
    damaged = clients[(4400, "00000000:03:00.0")]
    assert (damaged.memory_bytes, "memory_bytes" in damaged.unread) == (None, True)


class Refusing(RecordedHost):
    """A host that keeps some paths from us."""

    refused = ""

    def read_bytes(self, path: str, limit: int = 1 << 20) -> bytes:
        if path == self.refused:
            raise Denied(f"{path}: permission denied")
        return super().read_bytes(path, limit)

    def names(self, path: str) -> list[str]:
        if path == self.refused:
            raise Denied(f"{path}: permission denied")
        return super().names(path)


@pytest.mark.parametrize(
    ("refused", "what", "gpus"),
    [
        ("/sys/class/kfd/kfd/topology/nodes/2/gpu_id", "KFD node 2", 1),
        ("/sys/class/kfd/kfd/proc", "processes on AMD GPUs", 2),
        ("/sys/class/kfd/kfd/proc/4100", "KFD process 4100", 2),
    ],
)
def test_what_is_refused_is_a_gap(refused: str, what: str, gpus: int) -> None:
    host = Refusing(HOSTS / "amd-two-gpus")
    host.refused = refused
    facts = list(amd.read(host, Seen()))
    assert [fact.what for fact in facts if isinstance(fact, Gap)] == [what]
    assert len([fact for fact in facts if isinstance(fact, Gpu)]) == gpus


def test_a_machine_without_kfd_is_absence(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        list(amd.read(Host(str(tmp_path)), Seen()))


def test_a_machine_with_only_a_cpu_node_is_absence(tmp_path: Path) -> None:
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "gpu_id").write_text("0\n")
    with pytest.raises(Unavailable):
        list(amd.read(Host(str(tmp_path)), Seen()))


def test_the_parts_of_a_partitioned_gpu_have_ids_of_their_own(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{number}00\n")
        (node / "properties").write_text("location_id 768\ndomain 0\n")
    gpus = [f for f in amd.read(Host(str(tmp_path)), Seen()) if isinstance(f, Gpu)]
    assert [gpu.id for gpu in gpus] == [
        "00000000:03:00.0",
        "00000000:03:00.0/1",
        "00000000:03:00.0/2",
    ]


@given(st.text(max_size=300))
def test_any_text_is_properties_or_malformed(text: str) -> None:
    properties = amd.parse_properties(text)
    assert all(value >= 0 for value in properties.values())
    node = amd.Node(1, properties)
    assert node.pci_address is None or len(node.pci_address) == 16
    assert node.compute_units is None or node.compute_units >= 0
    try:
        assert 0 <= amd.parse_number(text) < 1 << 60
    except Malformed:
        pass


def test_a_number_that_no_report_can_hold_is_malformed() -> None:
    with pytest.raises(Malformed):
        amd.parse_number("99999999999999999999")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            key: st.integers(0, 10**20)
            for key in ("location_id", "domain", "simd_count", "simd_per_cu", "drm_render_minor")
        },
    )
)
def test_any_numbers_give_an_address_or_none(properties: dict[str, int]) -> None:
    node = amd.Node(1, properties)
    assert node.pci_address is None or len(node.pci_address) == 16
    assert node.render_minor is None or node.render_minor > 0
    assert node.compute_units is None or node.compute_units >= 0
