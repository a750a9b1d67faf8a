"""Image archives: which documents name an image's layers, and what a layer does to those below.

Sources: OCI image specification (image-layout, manifest, image-index, layer: whiteouts), Docker
image specification 1.2 (``manifest.json`` of ``docker save``).
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpuwarden.code.module import Place, Record
from gpuwarden.codescan.tar import TarMember, entry_path
from gpuwarden.codescan.tasks import DOCUMENT_LIMIT_BYTES, ImageManifest, Layer
from gpuwarden.errors import Malformed
from gpuwarden.pattern import pattern

INDEX, DOCKER_MANIFEST = "index.json", "manifest.json"
WHITEOUT, OPAQUE, WHITEOUT_OF_WHITEOUTS = ".wh.", ".wh..wh..opq", ".wh..wh."
MANIFESTS_LIMIT = 256
LAYERS_LIMIT = 1024
ENTRIES_LIMIT = 4_000_000
DOCUMENTS_LIMIT_BYTES = 64 << 20
LINKS_LIMIT = 100_000
LINKS_LIMIT_BYTES = 16 << 20
NAME_LIMIT = 1024
PATH_HASH_BYTES = 8

_BLOB = pattern(r"blobs/[a-z0-9]{1,32}/[0-9a-f]{32,128}\Z")
_DIGEST = pattern(r"([a-z0-9]{1,32}):([0-9a-f]{32,128})\Z")
_CONFIG = pattern(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?\Z")
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_ATTESTATION = ("vnd.docker.reference.type", "attestation-manifest")


class _Descriptor(Record, frozen=True):
    digest: str = ""
    annotations: dict[str, str] | None = None


class _OciDocument(Record, frozen=True):
    """An index or a manifest: the same bytes can be either."""

    manifests: list[_Descriptor] | None = None
    layers: list[_Descriptor] | None = None


class _DockerImage(Record, frozen=True, rename="pascal"):
    config: str = ""
    repo_tags: list[str] | None = None
    layers: list[str] | None = None


_oci = msgspec.json.Decoder(_OciDocument)
_docker = msgspec.json.Decoder(list[_DockerImage])


def is_document(name: str, size: int) -> bool:
    """Whether a member of an archive, or a file of a layout, may be one that names layers."""
    is_named = name in (INDEX, DOCKER_MANIFEST) or _BLOB.match(name) is not None
    return is_named and size <= DOCUMENT_LIMIT_BYTES


def manifests(
    documents: Mapping[str, bytes], links: Mapping[str, str], base: tuple[str, ...] = ()
) -> Iterator[ImageManifest]:
    """The images that the documents of one archive or layout tell of.

    ``links`` are the archive's own links, ``base`` the members down to it. Errors: Malformed for a
    document that is named and is not what it should be; those before it were given.
    """
    told = False
    if INDEX in documents:
        for image in _oci_images(documents, documents[INDEX], "", set()):
            told = True
            yield _under(base, image, {})
    # Both are there in archives for old and new readers, and tell of the same images.
    if not told and DOCKER_MANIFEST in documents:
        for image in _docker_images(documents[DOCKER_MANIFEST]):
            yield _under(base, image, links)


def _under(
    base: tuple[str, ...], image: tuple[str, str, list[str]], links: Mapping[str, str]
) -> ImageManifest:
    name, digest, layers = image
    if len(layers) > LAYERS_LIMIT:
        raise Malformed(f"image manifest of {len(layers)} layers")
    followed = [links.get(entry_path(layer), entry_path(layer)) for layer in layers]
    return ImageManifest(
        name=name[:NAME_LIMIT], digest=digest, layers=tuple((*base, one) for one in followed)
    )


def _oci_images(
    documents: Mapping[str, bytes], index: bytes, name: str, seen: set[str]
) -> Iterator[tuple[str, str, list[str]]]:
    descriptors = _decoded(_oci, index, "image index").manifests or []
    if len(descriptors) > MANIFESTS_LIMIT:
        raise Malformed(f"image index of {len(descriptors)} manifests")
    for descriptor in descriptors:
        notes = descriptor.annotations or {}
        if notes.get(_ATTESTATION[0]) == _ATTESTATION[1]:
            continue
        called = next((notes[key] for key in _NAMES if key in notes), name)
        blob = documents.get(_blob(descriptor.digest))
        # An index of many platforms is often saved with the blobs of one; and one may name itself.
        if blob is None or descriptor.digest in seen or len(seen) >= MANIFESTS_LIMIT:
            continue
        seen.add(descriptor.digest)
        document = _decoded(_oci, blob, "image manifest")
        if document.layers is not None:
            yield called, descriptor.digest, [_blob(layer.digest) for layer in document.layers]
        elif document.manifests is not None:
            yield from _oci_images(documents, blob, called, seen)


def _docker_images(text: bytes) -> Iterator[tuple[str, str, list[str]]]:
    images = _decoded(_docker, text, DOCKER_MANIFEST)
    if len(images) > MANIFESTS_LIMIT:
        raise Malformed(f"{DOCKER_MANIFEST} of {len(images)} images")
    for image in images:
        config = _CONFIG.match(image.config)
        name = ", ".join((image.repo_tags or [])[:8])
        yield name, f"sha256:{config[1]}" if config else "", image.layers or []


def _blob(digest: str) -> str:
    found = _DIGEST.match(digest)
    if not found:
        raise Malformed("image manifest: a digest that is none")
    return f"blobs/{found[1]}/{found[2]}"


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes, what: str) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"{what}: {error}") from error


class LayerNotes:
    """What is noted of one tar archive's entries while it is read, in case it is a layer."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._paths, self._leaves = bytearray(), bytearray()
        self._removed, self._opaque = bytearray(), bytearray()
        self._links: list[tuple[str, str]] = []
        self._link_bytes = 0
        self.overfull = ""
        """Why not all was noted."""

    def note(self, member: TarMember) -> None:
        """One entry more."""
        path = entry_path(member.name)
        directory, _, name = path.rpartition("/")
        if name == OPAQUE:
            self._opaque += self._hash(directory)
        elif name.startswith(WHITEOUT_OF_WHITEOUTS):
            return
        elif name.startswith(WHITEOUT):
            self._removed += self._hash(posixpath.join(directory, name[len(WHITEOUT) :]))
        elif len(self._paths) >= ENTRIES_LIMIT * PATH_HASH_BYTES:
            self.overfull = f"a layer of more than {ENTRIES_LIMIT} entries"
        else:
            hashed = self._hash(path)
            self._paths += hashed
            if member.kind != "directory":
                self._leaves += hashed
            if member.kind == "hard link":
                self._link(path, entry_path(member.link))

    def _link(self, path: str, target: str) -> None:
        self._link_bytes += len(path) + len(target)
        if len(self._links) >= LINKS_LIMIT or self._link_bytes > LINKS_LIMIT_BYTES:
            self.overfull = f"a layer of more than {LINKS_LIMIT} hard links"
        else:
            self._links.append((path, target))

    def layer(self, blob: tuple[str, ...]) -> Layer:
        """All that was noted."""
        return Layer(
            blob=blob,
            paths=bytes(self._paths),
            leaves=bytes(self._leaves),
            removed=bytes(self._removed),
            opaque=bytes(self._opaque),
            links=tuple(self._links),
        )

    def _hash(self, path: str) -> bytes:
        return path_hash(path, self._key)


def path_hash(path: str, key: bytes) -> bytes:
    """The keyed hash by which parent and child speak of a path."""
    raw = path.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=PATH_HASH_BYTES, key=key).digest()


class ArchiveNotes:
    """What is noted of an archive while its members are read, in case it holds an image."""

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.layers: list[tuple[Place, LayerNotes]] = []
        self._room = DOCUMENTS_LIMIT_BYTES

    def wants(self, member: TarMember) -> bool:
        """Whether a member may be a document of an image."""
        path = entry_path(member.name)
        return is_document(path, member.size) and member.size <= self._room

    def keep(self, name: str, text: bytes) -> None:
        """A document, by its path in the archive."""
        self._room -= len(text)
        self.documents[entry_path(name)] = text

    def link(self, member: TarMember) -> None:
        """A link of the archive's own: old ``docker save`` links layers that are the same."""
        if len(self.links) < LINKS_LIMIT:
            path = entry_path(member.name)
            near = posixpath.dirname(path) if member.kind == "symbolic link" else ""
            self.links[path] = entry_path(posixpath.join(near, member.link))
