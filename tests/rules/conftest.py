"""Nodes that rules over device opens and over CUDA are tried on."""

from __future__ import annotations

import pytest

from tests.rules.cuda_node import CudaNode
from tests.rules.open_node import OpenNode


@pytest.fixture
def kube() -> OpenNode:
    """A node of a cluster whose kubelet answers."""
    node = OpenNode()
    node.source("kubernetes", scheduled=True)
    return node


@pytest.fixture
def slurm() -> OpenNode:
    """A node on which Slurm hands out the GPUs."""
    node = OpenNode()
    node.source("slurm", scheduled=True)
    return node


@pytest.fixture
def training() -> CudaNode:
    """A container of the declared workload; pid 200 trains in it, in one primary context."""
    node = CudaNode()
    node.container("train", devices=("/dev/nvidia0",))
    node.process(200, container="train", user="root")
    node.watched(200)
    node.context(200)
    return node
