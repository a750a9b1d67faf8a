"""What can be forged without being root, or inside a container, and proves nothing."""

from __future__ import annotations

import pytest

from tests.support.nodes import HOST_NAMESPACES, NodeBuilder, executable

# ------------------------------------------------------------------ system programs

OWN_MOUNTS = {**HOST_NAMESPACES, "mnt": 0xF0000001}


def test_a_root_owned_binary_of_another_file_tree_is_no_system_program(node: NodeBuilder) -> None:
    """A virtual environment's own root, or a bind mount in a user's namespace, looks like this."""
    node.init()
    exe = executable("/usr/bin/nvidia-smi", path_is_genuine=None)
    node.process(10, exe=exe, namespaces=OWN_MOUNTS)
    node.client(10)
    assert node.row(10).verdict != "system"


def test_a_service_with_mounts_of_its_own_and_the_hosts_binary_is_a_system_program(
    node: NodeBuilder,
) -> None:
    node.init()
    node.process(10, user="root", exe="/usr/bin/nv-hostengine", namespaces=OWN_MOUNTS)
    node.client(10)
    assert (node.row(10).verdict, node.row(10).proof) == ("system", "proven")


def test_a_system_program_upgraded_under_its_feet_stays_one(node: NodeBuilder) -> None:
    node.init()
    exe = executable("/usr/lib/xorg/Xorg", deleted=True, replaced=True)
    node.process(10, user="root", exe=exe)
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == "system"


def test_a_program_in_a_user_namespace_proves_nothing_by_its_file(node: NodeBuilder) -> None:
    node.init()
    namespaces = {**OWN_MOUNTS, "user": 0xF0000002}
    node.process(10, exe="/usr/bin/kitty", namespaces=namespaces)
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == "other-team"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("LD_PRELOAD", "/home/alice/lib/a.so", "other-team"),
        ("LD_AUDIT", "/usr/../home/alice/a.so", "other-team"),
        ("LD_PRELOAD", "./a.so", "other-team"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:/home/alice/lib", "other-team"),
        ("CUDA_INJECTION64_PATH", "/home/alice/a.so", "other-team"),
        ("LD_PRELOAD", "libgtk3-nocsd.so.0", "system"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:/var/lib/snapd/lib/gl", "system"),
    ],
)
def test_code_loaded_from_elsewhere_makes_a_system_program_its_users(
    node: NodeBuilder, name: str, value: str, verdict: str
) -> None:
    node.process(10, exe="/usr/bin/kitty", environment={name: value})
    node.client(10, kinds=("G",))
    assert node.row(10).verdict == verdict
