"""What a pod-resources answer gives to whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.errors import Malformed
from gpuwarden.expected.kubernetes import parse_pod_resources
from gpuwarden.model import Workload

CASES = Path(__file__).parents[3] / "shared/cases/e"
recorded = pytest.mark.skipif(not CASES.is_dir(), reason="no recorded cases beside this checkout")
GPU = "GPU-aaaa0000-1111-2222-3333-444455556666"
MIG = "MIG-4894e267-46d0-557e-b826-500e978d88d1"


def case(name: str) -> dict[str, Workload]:
    return {w.name: w for w in parse_pod_resources(json.loads((CASES / name).read_text()))}


def given_to(resource: str, *ids: str, name: str = "p") -> dict[str, Any]:
    devices = [{"resource_name": resource, "device_ids": list(ids)}]
    return {"name": name, "namespace": "n", "containers": [{"name": "c", "devices": devices}]}


def gpus(resource: str, *ids: str) -> tuple[str, ...]:
    found = parse_pod_resources({"pod_resources": [given_to(resource, *ids)]})
    return found[0].gpus if found else ()


@recorded
def test_e07_replicas_join_their_gpu_and_are_shared() -> None:
    pods = case("e07-pod-resources-mig-timesliced.json")
    assert set(pods) == {"ns1/pod11", "ns2/pod21", "ns2/pod22", "ns3/pod31"}
    whole = pods["ns1/pod11"]
    assert whole.gpus == (
        "uuid:GPU-f124aa59-d406-d45b-9481-8fcd694e6c9e",
        "uuid:GPU-61a65011-6571-a6d2-5ab8-66cbb6f7f9c3",
        "uuid:MIG-2cc993d7-588c-5c28-b454-b3851897e3d7",
    )
    assert not whole.shared
    assert whole.containers == ("cont111", "cont112")
    assert pods["ns2/pod21"].gpus == (f"uuid:{MIG}",)
    for name in ("ns2/pod21", "ns2/pod22", "ns3/pod31"):
        assert f"uuid:{MIG}" in pods[name].gpus
        assert pods[name].shared
    # Not hexadecimal, and kept all the same: the kubelet's ids are opaque.
    assert "uuid:GPU-61a65011-6571-a6d2-5th8-66cbb6f7f9c3" in pods["ns3/pod31"].gpus


@recorded
def test_e08_amd_ids_are_addresses_and_partitions() -> None:
    pods = case("e08-pod-resources-amd.json")
    assert pods["ns1/pod11"].gpus == (
        "pci:00000000:c5:00.0",
        "pci:00000000:8a:00.0",
        "pci:00000000:c8:00.0",
    )
    assert pods["ns2/pod21"].gpus == ("xcp:7", "xcp:8", "xcp:9")
    assert pods["ns3/pod31"].gpus == ("pci:00000000:8d:00.0", "xcp:11", "xcp:12")


@pytest.mark.parametrize(
    ("resource", "identity", "expected"),
    [
        ("nvidia.com/gpu", GPU, (f"uuid:{GPU}",)),
        ("nvidia.com/gpu.shared", f"{GPU}::3", (f"uuid:{GPU}",)),
        ("volcano.example/vgpu", f"{GPU}-7", (f"uuid:{GPU}",)),
        ("example.org/renamed", GPU, (f"uuid:{GPU}",)),
        ("nvidia.com/mig-1g.5gb", MIG, (f"uuid:{MIG}",)),
        ("nvidia.com/gpu", f"MIG-{GPU}/5/0", (f"mig:{GPU}/5/0",)),
        ("nvidia.com/gpu", "nvidia3", ("minor:3",)),
        ("nvidia.com/gpu", "nvidia0/gi4", ("mig:0/4",)),
        ("nvidia.com/gpu", "nvidia0/vgpu1", ("id:nvidia0/vgpu1",)),
        ("amd.com/gpu", "0000:C5:00.0", ("pci:00000000:c5:00.0",)),
        ("amd.com/gpu", "c5:00.0", ("pci:00000000:c5:00.0",)),
        ("amd.com/gpu_cpx", "amdgpu_xcp_7", ("xcp:7",)),
        ("gpu.intel.com/i915", "card1-0", ("card:1",)),
        ("habana.ai/gaudi", "AC-serial", ("id:AC-serial",)),
        ("rdma/hca", "0000:c5:00.0", ()),
        ("nvidia.com/hostdev", "0000:c5:00.0", ()),
        ("hugepages-2Mi", "1", ()),
        ("example.org/fpga", "0000:c5:00.0", ()),
    ],
)
def test_device_id(resource: str, identity: str, expected: tuple[str, ...]) -> None:
    assert gpus(resource, identity) == expected


def test_two_pods_with_one_id_share_it() -> None:
    answer = {
        "pod_resources": [
            given_to("nvidia.com/gpu", GPU, name="a"),
            given_to("nvidia.com/gpu", GPU, name="b"),
            given_to("nvidia.com/gpu", "GPU-other", name="c"),
        ]
    }
    assert {w.pod_name: w.shared for w in parse_pod_resources(answer)} == {
        "a": True,
        "b": True,
        "c": False,
    }


def test_camel_case_reads_the_same() -> None:
    answer = {
        "podResources": [
            {
                "name": "p",
                "namespace": "n",
                "containers": [
                    {
                        "name": "c",
                        "devices": [{"resourceName": "nvidia.com/gpu", "deviceIds": [GPU]}],
                    }
                ],
            }
        ]
    }
    assert parse_pod_resources(answer)[0].gpus == (f"uuid:{GPU}",)


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ({"cdi_devices": [{"name": f"nvidia.com/gpu={GPU}"}]}, (f"uuid:{GPU}",)),
        ({"cdi_devices": [{"name": "nvidia.com/gpu=1"}]}, ("index:1",)),
        ({"cdi_devices": [{"name": "nvidia.com/gpu=all"}]}, ("all",)),
        ({"driver_name": "gpu.nvidia.com", "device_name": "gpu-1"}, ("minor:1",)),
        (
            {"driver_name": "gpu.example.com", "device_name": "x"},
            ("id:gpu.example.com/x",),
        ),
        ({"driver_name": "net.example.com", "device_name": "eth1"}, ()),
    ],
)
def test_claims(resource: dict[str, Any], expected: tuple[str, ...]) -> None:
    claim = {"claim_name": "c", "claim_resources": [resource]}
    container = {"name": "c", "dynamic_resources": [claim]}
    pod = {"name": "p", "namespace": "n", "containers": [container]}
    found = parse_pod_resources({"pod_resources": [pod]})
    assert (found[0].gpus if found else ()) == expected


def test_an_empty_answer_gives_nothing() -> None:
    assert parse_pod_resources({}) == []
    assert parse_pod_resources({"pod_resources": []}) == []


@pytest.mark.parametrize("answer", [None, 1, "x", [], {"error": "x"}])
def test_what_is_no_answer_is_malformed(answer: object) -> None:
    with pytest.raises(Malformed):
        parse_pod_resources(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
IDS = st.lists(
    st.text() | st.sampled_from([GPU, MIG, f"{GPU}::1", "nvidia0/gi1", "all", "²", "0000:c5:00.0"])
)
DEVICES = st.fixed_dictionaries(
    {}, optional={"resource_name": st.text() | JSON, "device_ids": IDS | JSON}
)
CLAIM = st.fixed_dictionaries(
    {},
    optional={
        "driver_name": JSON,
        "device_name": st.text(),
        "cdi_devices": st.lists(st.fixed_dictionaries({"name": st.text()})) | JSON,
    },
)
CONTAINER = st.fixed_dictionaries(
    {},
    optional={
        "name": JSON,
        "devices": st.lists(DEVICES, max_size=3) | JSON,
        "dynamic_resources": st.lists(
            st.fixed_dictionaries({"claim_resources": st.lists(CLAIM) | JSON})
        ),
    },
)
POD = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(),
        "namespace": JSON,
        "containers": st.lists(CONTAINER, max_size=3) | JSON,
    },
)


@given(JSON | st.fixed_dictionaries({"pod_resources": st.lists(POD, max_size=4) | JSON}))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_gives_workloads_or_malformed(answer: object) -> None:
    try:
        workloads = parse_pod_resources(answer)
    except Malformed:
        return
    assert all(workload.gpus for workload in workloads)
