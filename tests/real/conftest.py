"""What the tests of the probe share: its objects built, a program that opens devices, groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuwarden.probes.cuda.calls import CallSettings
from tests.support import cuda_bed, cuda_modules
from tests.support.cuda_containers import CudaContainers, cuda_containers
from tests.support.cuda_probing import RING, Probing, probing
from tests.support.idle import Idlers, idlers
from tests.support.probes import build, control_groups, openers
from tests.support.stopping import StopProbe, stop_probe


@pytest.fixture(scope="module")
def built() -> None:
    """The probe's objects, up to date."""
    build()


@pytest.fixture(scope="module")
def opener() -> Iterator[Path]:
    """The program of ``tests/support/openers.c``."""
    with openers() as binary:
        yield binary


@pytest.fixture
def groups() -> Iterator[Callable[[str], Path]]:
    """Makes control groups in a hierarchy, by its name; they are gone afterwards."""
    with control_groups() as make:
        yield make


@pytest.fixture(scope="module")
def cuda_engine() -> Iterator[CudaContainers]:
    """podman with an image whose program calls the stand-in CUDA driver library."""
    with cuda_containers() as made:
        yield made


@pytest.fixture
def stopper() -> Iterator[StopProbe]:
    """A probe that stops whoever loads a module from memory, as far as it is let."""
    with stop_probe() as made:
        made.attach(cuda_bed.bed().library())
        yield made


@pytest.fixture(scope="module")
def bulk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of nine megabytes, which is none."""
    path = tmp_path_factory.mktemp("bulk") / "image"
    path.write_bytes(b"\x7fELF" + os.urandom(9_000_000))
    return path


@pytest.fixture(scope="module")
def calls_seen(built: None) -> Iterator[Probing]:
    """Probes of calls, attached to the bed's library."""
    with probing(cuda_bed.bed().library(), settings=CallSettings(ring_bytes=RING)) as made:
        yield made


@pytest.fixture
def probe(calls_seen: Probing) -> Probing:
    """The same, with nothing told so far."""
    told = calls_seen.drain()
    for kind in (told.loads, told.contexts, told.returns, told.names):
        kind.clear()
    return calls_seen


@pytest.fixture(scope="module")
def cubin() -> Path:
    """A module of one matrix product."""
    return cuda_modules.made("gemm")


@pytest.fixture(scope="module")
def fatbin() -> Path:
    """The same for several architectures."""
    return cuda_modules.made("gemm", "fatbin")


@pytest.fixture
def idle() -> Iterator[Idlers]:
    """Processes that do nothing, made as a test likes; they end with it."""
    with idlers() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder under /tmp, since pytest's own may be elsewhere; one that others can enter."""
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.geteuid() and str(parent) not in ("/", "/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return tmp_path
