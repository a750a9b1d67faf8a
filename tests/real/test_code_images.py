"""Images by name, from real engines: what their own export holds, layer over layer."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.codescan.image_names import Export, NamedImage, find_image
from gpuwarden.errors import UsageError
from tests.support.code_scans import code, docker_archive, names, oci_blobs, scanned, tar_of
from tests.support.containers import dockerd, no_new_cgroups, require_docker, run
from tests.support.cri import containerd
from tests.support.packages import require, require_root

pytestmark = pytest.mark.real

NAME = "localhost/gpuwarden-test/code:1"
LAYERS = [
    tar_of({"opt/kept.so": code("kept"), "opt/gone.so": code("gone")}),
    tar_of({"opt/.wh.gone.so": b"", "opt/added.so": code("added")}),
]
Load = Callable[[Path], None]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image as ``docker save`` writes it."""
    require_root()
    path = tmp_path_factory.mktemp("archive") / "image.tar"
    path.write_bytes(docker_archive(LAYERS, [NAME]))
    return path


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def podman(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, environment: pytest.MonkeyPatch
) -> Iterator[str]:
    """podman with a storage of its own, that has the image."""
    require("podman")
    scratch = tmp_path_factory.mktemp("podman")
    settings = scratch / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{scratch}/root"\nrunroot = "{scratch}/run"\n'
    )
    environment.setenv("CONTAINERS_STORAGE_CONF", str(settings))
    with no_new_cgroups():
        run("podman", "load", "--input", str(archive))
        yield "podman"
        run("podman", "rmi", "--all", "--force", check=False)


@pytest.fixture(scope="module")
def docker(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, environment: pytest.MonkeyPatch
) -> Iterator[str]:
    """A Docker daemon of our own, that has the image."""
    require_docker()
    scratch = tmp_path_factory.mktemp("docker")
    with no_new_cgroups(), dockerd(scratch, scratch / "docker.sock") as engine:
        environment.setenv("DOCKER_HOST", f"unix://{engine.socket}")
        engine("load", "--input", str(archive))
        yield "docker"


@pytest.fixture(scope="module")
def ctr(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, environment: pytest.MonkeyPatch
) -> Iterator[str]:
    """A containerd of our own, that has the image where Kubernetes has its."""
    require("containerd")
    scratch = tmp_path_factory.mktemp("containerd")
    with containerd(scratch, scratch / "containerd.sock") as engine:
        environment.setenv("CONTAINERD_ADDRESS", str(engine.socket))
        oci = scratch / "oci.tar"
        oci.write_bytes(tar_of(oci_blobs([gzip.compress(layer) for layer in LAYERS], NAME)))
        load = ("images", "import", "--snapshotter", "native", str(oci))
        run("ctr", "--namespace", "k8s.io", *load)
        yield "containerd"


@pytest.mark.parametrize("engine", ["podman", "docker", "ctr"])
def test_an_image_by_name_is_what_its_containers_would_run(
    engine: str, request: pytest.FixtureRequest
) -> None:
    name = request.getfixturevalue(engine)
    report = scanned(f"{name}:{NAME}")
    assert [problem.reason for problem in report.problems] == []
    assert names(report) == ["added", "kept"]
    assert names(report, hidden=True) == ["gone"]
    [target] = report.targets
    assert (target.name, target.what) == (f"{name}:{NAME}", "image")
    assert target.digest.startswith("sha256:")


def test_a_name_alone_asks_the_engines_that_are_here(podman: str) -> None:
    assert find_image(NAME).engine == podman
    assert find_image("gpuwarden-test/code:1").name == "gpuwarden-test/code:1"
    with pytest.raises(UsageError, match="no image of that name in podman"):
        find_image("gpuwarden-test/absent:1")


def test_a_short_name_is_found_in_containerd(ctr: str) -> None:
    assert find_image("containerd:gpuwarden-test/code:1").name == NAME
    assert find_image(f"containerd:{NAME}").name == NAME
    with pytest.raises(UsageError, match="no image of that name in containerd"):
        find_image("containerd:code")


@pytest.mark.parametrize("name", ["-rm", "--help", "a b", "x;y", "a\nb", "", "$(x)"])
def test_what_is_no_name_is_given_to_no_program(name: str) -> None:
    with pytest.raises(UsageError, match="not an image's name"):
        find_image(f"podman:{name}")


def test_an_export_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuwarden.codescan import targets

    half = f"printf '{'x' * 600}'; echo no such layer >&2; exit 3"
    image = NamedImage("docker", "broken:1", ("sh", "-c", half))
    monkeypatch.setattr(targets, "find_image", lambda name: image)
    report = scanned("broken:1")
    [problem] = report.problems
    assert problem.reason == "the export ended with status 3: no such layer"
    assert problem.place.target == "docker:broken:1"


def test_an_export_that_nobody_reads_ends() -> None:
    export = Export(NamedImage("docker", "endless:1", ("yes",)))
    os.read(export.descriptor, 10)
    assert export.close().startswith("the export ended with status")
