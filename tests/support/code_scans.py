"""Scans of GPU code in tests: real confined children, and archives built to be looked into."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpuwarden.code.report import CodeReport, FoundModule
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.codescan.targets import Targets
from gpuwarden.codescan.tasks import Assess
from tests.support.gpu_images import KernelImage, cubin


def scanned(
    *targets: Path | str, assess: Assess | None = None, options: Options | None = None
) -> CodeReport:
    """What a scan of these finds, by two children."""
    options = options or Options()
    made = Targets(options.workers)
    return scan_code(
        [made.target(str(target)) for target in targets], made.numbers, assess, options
    )


def code(name: str, sm: int = 80) -> bytes:
    """A cubin that no other name gives."""
    return cubin([KernelImage(name, hashlib.sha256(name.encode()).digest() * 8)], sm=sm)


def names(report: CodeReport, *, hidden: bool = False) -> list[str]:
    """The kernels' names of what was found, sorted; only what is hidden, or only what is not."""
    found = [one for one in report.modules if one.is_hidden is hidden]
    return sorted(kernel.name for one in found for kernel in one.module.kernels)


def module_of(report: CodeReport, kernel: str) -> FoundModule:
    """The one module that has this kernel."""
    [found] = [one for one in report.modules if any(k.name == kernel for k in one.module.kernels)]
    return found


class Entry(Struct, frozen=True):
    """What a tar archive is to hold under a name: bytes, or a link, device, folder."""

    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""


def tar_of(
    entries: Mapping[str, bytes | Entry] | Sequence[tuple[str, bytes | Entry]],
    *,
    style: int = tarfile.PAX_FORMAT,
) -> bytes:
    """A tar archive of these, in their order; one name may come twice in a sequence."""
    out = io.BytesIO()
    pairs = list(entries.items()) if isinstance(entries, Mapping) else entries
    with tarfile.open(fileobj=out, mode="w", format=style) as archive:
        for name, given in pairs:
            entry = given if isinstance(given, Entry) else Entry(given)
            member = tarfile.TarInfo(name)
            member.type, member.linkname = entry.kind, entry.link
            member.size = len(entry.data)
            archive.addfile(member, io.BytesIO(entry.data))
    return out.getvalue()


def docker_archive(layers: Sequence[bytes], tags: Sequence[str] = ("app:1",)) -> bytes:
    """What ``docker save`` wrote before it wrote OCI layouts: the manifest comes last."""
    config = _config(layers)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    paths = [f"{hashlib.sha256(layer).hexdigest()}/layer.tar" for layer in layers]
    manifest = [{"Config": config_name, "RepoTags": list(tags), "Layers": paths}]
    members = [*zip(paths, layers, strict=True), (config_name, config)]
    return tar_of([*members, ("manifest.json", json.dumps(manifest).encode())])


def _config(layers: Sequence[bytes]) -> bytes:
    """An image's configuration: engines check the layers' digests when they load it."""
    plain = [gzip.decompress(layer) if layer[:2] == b"\x1f\x8b" else layer for layer in layers]
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in plain]
    return json.dumps(
        {
            "architecture": "amd64" if platform.machine() == "x86_64" else "arm64",
            "os": "linux",
            "config": {"Cmd": ["/none"]},
            "history": [{"created_by": "test"} for _ in layers],
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
    ).encode()


def oci_blobs(layers: Sequence[bytes], name: str = "app:1") -> dict[str, bytes]:
    """The files of an OCI image layout."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(_config(layers), "config.v1+json"),
        "layers": [
            blob(layer, "layer.v1.tar" + ("+gzip" if layer[:2] == b"\x1f\x8b" else ""))
            for layer in layers
        ],
    }
    described = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    described["annotations"] = {
        "org.opencontainers.image.ref.name": name,
        "io.containerd.image.name": name,
    }
    index = {"schemaVersion": 2, "manifests": [described]}
    return {
        "index.json": json.dumps(index).encode(),
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        **blobs,
    }


def write_tree(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Files below a folder, by their names."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
