"""DRM clients of several drivers, and the GPUs that only DRM knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Denied, Unavailable
from gpuwarden.host import Host
from gpuwarden.model import Gap, Gpu, GpuClient, Holder
from gpuwarden.sensors import drm
from gpuwarden.sensors.seen import Seen, StatLine
from tests.support.recorded_host import RecordedHost

CASE = Path(__file__).parents[1] / "hosts" / "drm-mixed"
XE, AMD, SOC = "00000000:4d:00.0", "00000000:83:00.0", "renderD131"


def holder(pid: int, minor: int, *descriptors: int) -> Holder:
    path = f"/dev/dri/renderD{minor}"
    return Holder(
        pid=pid, major=226, minor=minor, kind="drm-render", path=path, descriptors=descriptors
    )


def line(pid: int, start: int) -> StatLine:
    return StatLine(pid, "p", "S", 1, pid, pid, 0, 0, start, 0, 1)


def look(
    *holders: Holder, gpus: tuple[Gpu, ...] = (), clients: tuple[GpuClient, ...] = ()
) -> list[Gpu | GpuClient | Gap]:
    seen = Seen(holders=list(holders), gpus=list(gpus), clients=list(clients))
    seen.table = {pid: line(pid, pid) for pid in (500, 501, 600, 601, 700)}
    return list(drm.read(RecordedHost(CASE), seen))


def clients_of(facts: list[Gpu | GpuClient | Gap]) -> list[GpuClient]:
    return [fact for fact in facts if isinstance(fact, GpuClient)]


def test_gpus_are_those_that_can_compute() -> None:
    gpus = {gpu.id: gpu for gpu in look() if isinstance(gpu, Gpu)}
    assert set(gpus) == {XE, AMD, SOC}
    assert (gpus[XE].vendor, gpus[XE].render_minor, gpus[XE].card_minor) == ("intel", 128, 1)
    assert (gpus[AMD].vendor, gpus[AMD].minor) == ("amd", 129)
    assert (gpus[SOC].vendor, gpus[SOC].pci_address) == ("other", None)
    assert "memory_used_bytes" in gpus[XE].unread


def test_a_gpu_that_is_known_is_not_told_again() -> None:
    known = (
        Gpu(id="GPU-amd", vendor="amd", pci_address=AMD, render_minor=129),
        Gpu(id="soc", vendor="other", render_minor=131),
    )
    facts = look(holder(600, 129, 4), holder(700, 131, 3), gpus=known)
    assert [fact.id for fact in facts if isinstance(fact, Gpu)] == [XE]
    assert [(c.gpu_id, c.pid) for c in clients_of(facts)] == [("GPU-amd", 600), ("soc", 700)]


def test_two_descriptors_of_one_client_count_once() -> None:
    [client] = clients_of(look(holder(500, 128, 7, 8)))
    assert (client.gpu_id, client.pid, client.source) == (XE, 500, "drm")
    assert client.kinds == ("C",)
    assert client.memory_bytes == 512 << 20
    assert client.engine_ns == {}
    assert "cycles" in client.unread["engine_ns"]
    assert "sm_percent" in client.unread


def test_an_inherited_client_belongs_to_its_oldest_process() -> None:
    facts = look(holder(501, 128, 7), holder(500, 128, 7, 8))
    assert [client.pid for client in clients_of(facts)] == [500]


def test_several_clients_of_a_process_add_up_with_the_older_keys() -> None:
    [client] = clients_of(look(holder(600, 129, 4, 5)))
    assert client.kinds == ("G",)
    assert client.memory_bytes == 2 << 20
    assert client.engine_ns == {"gfx": 900_000_001}


def test_a_device_without_an_address_is_known_by_its_minor() -> None:
    [client] = clients_of(look(holder(700, 131, 3)))
    assert (client.gpu_id, client.kinds) == (SOC, ("G",))
    assert client.engine_ns == {"fragment": 5000}
    assert client.memory_bytes == 4 << 20


def test_only_opening_it_makes_no_client() -> None:
    assert clients_of(look(holder(601, 129, 4))) == []


def test_a_client_that_kfd_told_of_is_not_told_again() -> None:
    told = GpuClient(gpu_id=AMD, pid=600, source="kfd")
    assert clients_of(look(holder(600, 129, 4, 5), clients=(told,))) == []


@pytest.mark.parametrize("gone", [holder(999, 128, 3), holder(801, 128, 3), holder(800, 128, 3)])
def test_vanished_empty_and_nvidia_ones_cost_nothing(gone: Holder) -> None:
    facts = look(gone, holder(500, 128, 7))
    assert [client.pid for client in clients_of(facts)] == [500]
    assert not [fact for fact in facts if isinstance(fact, Gap)]


def test_what_may_not_be_read_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Host, path: str, limit: int = 0) -> bytes:
        if "fdinfo" in path:
            raise Denied("no")
        return (CASE / path.lstrip("/")).read_bytes()

    monkeypatch.setattr(RecordedHost, "read_bytes", refuse)
    facts = look(holder(500, 128, 7), holder(600, 129, 4))
    [gap] = (fact for fact in facts if isinstance(fact, Gap))
    assert gap.count == 2
    assert clients_of(facts) == []


def test_a_machine_without_drm_is_absence(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        list(drm.read(Host(str(tmp_path)), Seen()))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_client_or_none(data: bytes) -> None:
    start = b"drm-driver:\tx\ndrm-client-id:\t1\ndrm-resident-"
    for text in (data, start + data, start + b"vram:\t" + data):
        client = drm.parse_fdinfo(text)
        if client is not None:
            assert 0 <= (client.memory_bytes or 0) < 1 << 60
            assert set(client.kinds) <= {"C", "G"}
    drm.parse_uevent(data.decode("latin-1"))
