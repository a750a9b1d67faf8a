from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import Unavailable
from gpuwarden.model import NodeKind
from gpuwarden.sensors import device_nodes
from gpuwarden.sensors.device_nodes import Majors, kind_of
from gpuwarden.sensors.seen import Seen
from tests.support.recorded_host import RecordedHost

NODE = Path(__file__).parent.parent / "hosts" / "nvidia-node"
MAJORS = Majors(
    {
        195: "nvidia",
        226: "drm",
        261: "accel",
        235: "kfd",
        511: "nvidia-uvm",
        237: "nvidia-caps",
        234: "nvidia-nvswitch",
        499: "habanalabs",
        400: "neuron",
    },
    {100: "dxg"},
)


@pytest.mark.parametrize(
    ("major", "minor", "kind"),
    [
        (195, 0, "nvidia-gpu"),
        (195, 127, "nvidia-gpu"),
        (195, 255, "nvidia-ctl"),
        (195, 254, "nvidia-modeset"),
        (511, 0, "nvidia-uvm"),
        (511, 1, "nvidia-uvm-tools"),
        (237, 5, "nvidia-caps"),
        (234, 0, "nvidia-other"),
        (226, 0, "drm-card"),
        (226, 127, "drm-card"),
        (226, 128, "drm-render"),
        (226, 300, "drm-render"),
        (261, 0, "accel"),
        (235, 0, "kfd"),
        (499, 0, "habana"),
        (400, 3, "other"),
        (10, 100, "other"),
        (10, 101, None),
        (1, 3, None),
        (510, 0, None),
    ],
)
def test_kind_of(major: int, minor: int, kind: NodeKind | None) -> None:
    assert kind_of(major, minor, MAJORS) == kind


def test_majors_come_from_the_character_devices_alone() -> None:
    majors = device_nodes.read_majors(RecordedHost(NODE))
    assert majors.names == {
        195: "nvidia",
        226: "drm",
        234: "nvidia-nvswitch",
        236: "nvidia-caps-imex-channels",
        237: "nvidia-caps",
        511: "nvidia-uvm",
    }
    assert majors.misc == {}


@given(st.binary(max_size=400))
def test_any_bytes_give_a_table(data: bytes) -> None:
    for text in (data, b"Character devices:\n195 nvidia\n" + data):
        for name in {**device_nodes.parse_devices(text), **device_nodes.parse_misc(text)}.values():
            name.encode("utf-8")


@given(st.text(max_size=80))
def test_a_pci_address_is_normal_or_none(text: str) -> None:
    assert device_nodes.parse_uevent_pci(text) is None
    assert device_nodes.parse_uevent_pci(f"A=b\nPCI_SLOT_NAME=0000:AF:00.1\n{text}") == (
        "00000000:af:00.1"
    )


def test_nodes_are_found_by_number_under_any_name() -> None:
    nodes = {n.path: n for n in device_nodes.read(RecordedHost(NODE), Seen())}
    assert {path: (n.major, n.minor, n.kind) for path, n in nodes.items()} == {
        "/dev/a name of its own": (195, 0, "nvidia-gpu"),
        "/dev/nvidia0": (195, 0, "nvidia-gpu"),
        "/dev/nvidia1": (195, 1, "nvidia-gpu"),
        "/dev/nvidiactl": (195, 255, "nvidia-ctl"),
        "/dev/nvidia-modeset": (195, 254, "nvidia-modeset"),
        "/dev/nvidia-uvm": (511, 0, "nvidia-uvm"),
        "/dev/nvidia-uvm-tools": (511, 1, "nvidia-uvm-tools"),
        "/dev/nvidia-caps/nvidia-cap1": (237, 1, "nvidia-caps"),
        "/dev/dri/card0": (226, 0, "drm-card"),
        "/dev/dri/renderD128": (226, 128, "drm-render"),
    }
    render = nodes["/dev/dri/renderD128"]
    assert (render.pci_address, render.mode, render.gid) == ("00000000:05:00.0", 0o660, 44)


def test_no_driver_is_absent_not_empty(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n")
    with pytest.raises(Unavailable, match="no accelerator"):
        list(device_nodes.read(RecordedHost(tmp_path), Seen()))
