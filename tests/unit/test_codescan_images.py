"""Image archives and layouts: what a container would have, and what later layers took away."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.code.module import Place
from gpuwarden.codescan import images
from gpuwarden.codescan.images import LayerNotes, manifests
from gpuwarden.codescan.layers import Layers
from gpuwarden.codescan.streams import Buffered, MemoryStream
from gpuwarden.codescan.tar import members
from gpuwarden.codescan.tasks import ImageManifest, Layer
from gpuwarden.errors import Malformed
from tests.support.code_scans import (
    Entry,
    code,
    docker_archive,
    module_of,
    names,
    oci_blobs,
    scanned,
    tar_of,
    write_tree,
)

FOLDER = Entry(kind=b"5")

LOWEST = tar_of(
    {
        "opt/kept.so": code("kept"),
        "opt/deleted.so": code("deleted"),
        "opt/replaced.so": code("replaced"),
        "opt/folder/in.so": code("in deleted folder"),
        "opt/opaque/in.so": code("in opaque folder"),
        "opt/made-link/in.so": code("in replaced folder"),
        "opt/original.so": code("hard linked"),
        "opt/other-name.so": Entry(kind=b"1", link="opt/original.so"),
    }
)
UPPER = tar_of(
    {
        "opt": FOLDER,
        "opt/.wh.deleted.so": b"",
        "./opt/replaced.so": code("replacement"),
        "opt/.wh.folder": b"",
        "opt/opaque": FOLDER,
        "opt/opaque/.wh..wh..opq": b"",
        "opt/opaque/new.so": code("in opaque folder, new"),
        "opt/made-link": Entry(kind=b"2", link="/usr"),
        "opt/.wh.original.so": b"",
        "opt/.wh..wh.plnk": b"",
    }
)
VISIBLE = ["hard linked", "in opaque folder, new", "kept", "replacement"]
HIDDEN = [
    "deleted",
    "in deleted folder",
    "in opaque folder",
    "in replaced folder",
    "replaced",
]

FORMS: dict[str, Callable[[Path], Path]] = {}


def form(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    FORMS[make.__name__] = make
    return make


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@form
def docker_save(folder: Path) -> Path:
    return written(folder / "image.tar", docker_archive([LOWEST, UPPER]))


@form
def docker_save_gzipped(folder: Path) -> Path:
    return written(folder / "image.tar.gz", gzip.compress(docker_archive([LOWEST, UPPER])))


@form
def oci_archive(folder: Path) -> Path:
    layers = [gzip.compress(LOWEST), zstandard.compress(UPPER)]
    return written(folder / "image.tar", tar_of(oci_blobs(layers)))


@form
def oci_layout(folder: Path) -> Path:
    return write_tree(folder / "layout", oci_blobs([gzip.compress(LOWEST), UPPER]))


@pytest.mark.parametrize("form", FORMS)
def test_what_a_container_has_is_told_and_the_rest_is_counted(tmp_path: Path, form: str) -> None:
    report = scanned(FORMS[form](tmp_path))
    assert not report.problems
    assert names(report) == VISIBLE
    assert names(report, hidden=True) == HIDDEN
    [target] = report.targets
    assert (target.what, target.modules, target.hidden) == ("image", len(VISIBLE), len(HIDDEN))
    assert target.digest.startswith("sha256:")
    reasons = {name: module_of(report, name).sightings[0].hidden for name in HIDDEN}
    assert reasons == {
        "deleted": "deleted in layer 2 of 2",
        "in deleted folder": "deleted in layer 2 of 2",
        "in opaque folder": "deleted in layer 2 of 2",
        "in replaced folder": "replaced in layer 2 of 2",
        "replaced": "replaced in layer 2 of 2",
    }


def test_a_file_that_comes_again_is_seen_where_it_came_last(tmp_path: Path) -> None:
    layers = [tar_of({"x": code("x")}), tar_of({".wh.x": b""}), tar_of({"x": code("x"), "y": b"y"})]
    report = scanned(written(tmp_path / "i.tar", docker_archive(layers)))
    sightings = module_of(report, "x").sightings
    assert [bool(one.hidden) for one in sightings] == [True, False]
    assert names(report) == ["x"]


def test_of_two_images_it_is_enough_that_one_has_it(tmp_path: Path) -> None:
    base, top = tar_of({"x": code("x"), "y": code("y")}), tar_of({".wh.x": b""})
    both = json.loads(one_manifest(docker_archive([base, top])))
    both.append({"Config": "", "RepoTags": ["base:1"], "Layers": both[0]["Layers"][:1]})
    entries = [(path, layer) for path, layer in zip(both[0]["Layers"], [base, top], strict=True)]
    archive = tar_of([*entries, ("manifest.json", json.dumps(both).encode())])
    report = scanned(written(tmp_path / "i.tar", archive))
    assert names(report) == ["x", "y"]


def one_manifest(archive: bytes) -> bytes:
    [text] = [
        m.data.read(1 << 20)
        for m in members(Buffered(MemoryStream(archive)), 100)
        if m.name == "manifest.json"
    ]
    return text


def test_layers_that_are_links_to_others_are_followed(tmp_path: Path) -> None:
    layer, top = tar_of({"x": code("x")}), tar_of({".wh.x": b""})
    manifest = [{"Config": "", "RepoTags": None, "Layers": ["a/layer.tar", "b/layer.tar"]}]
    archive = tar_of(
        {
            "a/layer.tar": Entry(kind=b"2", link="../c/layer.tar"),
            "c/layer.tar": layer,
            "b/layer.tar": top,
            "manifest.json": json.dumps(manifest).encode(),
        }
    )
    report = scanned(written(tmp_path / "i.tar", archive))
    assert names(report, hidden=True) == ["x"]
    assert not report.problems


def test_a_layer_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    blobs = oci_blobs([tar_of({"x": code("x")}), tar_of({".wh.x": b""})])
    missing = [name for name in blobs if name.startswith("blobs/")][2]
    del blobs[missing]
    report = scanned(written(tmp_path / "i.tar", tar_of(blobs)))
    assert names(report) == ["x"]
    [problem] = report.problems
    assert problem.place.members == (missing,)
    assert problem.reason == "a layer of app:1 that is not there"


def test_an_image_in_an_archive_keeps_its_layers(tmp_path: Path) -> None:
    archive = tar_of({"images/app.tar": docker_archive([LOWEST, UPPER]), "readme": b"text"})
    report = scanned(written(tmp_path / "bundle.tar", archive))
    assert names(report) == VISIBLE
    assert report.targets[0].what == "archive"
    assert module_of(report, "kept").sightings[0].place.members[0] == "images/app.tar"


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[",
        b"{}",
        b"[{}]",
        b'[{"Layers": ["../../etc/passwd"]}]',
        b'[{"Layers": 3}]',
        b"[" * 100_000,
        b'[{"Layers": ["x", "x", "x"]}]',
    ],
)
def test_documents_that_are_wrong_leave_what_was_found(tmp_path: Path, manifest: bytes) -> None:
    archive = tar_of({"x": tar_of({"y": code("y")}), "manifest.json": manifest})
    assert names(scanned(written(tmp_path / "i.tar", archive))) == ["y"]


def test_an_index_that_names_itself_comes_to_an_end() -> None:
    digest = "sha256:" + "ab" * 32
    index = json.dumps({"manifests": [{"digest": digest}] * 200}).encode()
    documents = {"index.json": index, "blobs/sha256/" + "ab" * 32: index}
    assert list(manifests(documents, {})) == []


json_values: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["manifests", "layers", "digest", "annotations", "Layers", "Config", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
texts = st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode())


@given(
    st.dictionaries(
        st.sampled_from(["index.json", "manifest.json", "blobs/sha256/" + "0" * 64]), texts
    )
)
def test_any_documents_give_images_or_malformed(documents: dict[str, bytes]) -> None:
    try:
        for image in manifests(documents, {}, ("base",)):
            assert all(layer[0] == "base" for layer in image.layers)
    except Malformed:
        pass


# ------------------------------------------------------------------------------ against a model

NAMES = ["a", "b", "a/x", "a/y", "b/x", "a/x/p", "a/y/q", "b/x/r"]
KEY = b"key"
Operation = tuple[str, str]


def notes_of(operations: Sequence[Operation]) -> LayerNotes:
    entries: list[tuple[str, bytes | Entry]] = []
    for what, path in operations:
        folder, _, name = path.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        if what == "file":
            entries.append((path, b""))
        elif what == "folder":
            entries.append((path, FOLDER))
        elif what == "delete":
            entries.append((f"{prefix}.wh.{name}", b""))
        else:
            entries.append((f"{path}/.wh..wh..opq", b""))
    notes = LayerNotes(KEY)
    for member in members(Buffered(MemoryStream(tar_of(entries))), 100):
        notes.note(member)
    return notes


def unpacked(layers: Sequence[Sequence[Operation]]) -> Mapping[str, tuple[int, str]]:
    """Path → (layer, kind) after unpacking one layer over the other, step by step."""
    tree: dict[str, tuple[int, str]] = {}
    for number, operations in enumerate(layers):

        def drop(below: str, number: int = number) -> None:
            for path in [p for p in tree if p.startswith(below) and tree[p][0] != number]:
                del tree[path]

        for what, path in operations:
            if what in ("delete", "opaque"):
                drop(path + "/")
                if what == "delete" and tree.get(path, (number,))[0] != number:
                    del tree[path]
        for what, path in operations:
            if what == "file":
                drop(path + "/")
            if what in ("file", "folder"):
                tree[path] = (number, what)
    return tree


layers_of_operations = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["file", "folder", "delete", "opaque"]), st.sampled_from(NAMES)),
        max_size=4,
        unique_by=lambda operation: operation[1],
    ),
    min_size=1,
    max_size=4,
)


@given(layers_of_operations)
def test_what_is_hidden_is_what_unpacking_leaves_out(
    operations: list[list[Operation]],
) -> None:
    table = Layers(KEY)
    blobs = [(f"layer {number}",) for number in range(len(operations))]
    for blob, steps in zip(blobs, operations, strict=True):
        table.add(notes_of(steps).layer(blob))
    table.images.append(ImageManifest(name="i", digest="", layers=tuple(blobs)))
    tree = unpacked(operations)
    for number, steps in enumerate(operations):
        for what, path in steps:
            if what == "file":
                place = Place(target="t", members=(*blobs[number], path))
                is_there = tree.get(path) == (number, "file")
                assert (table.hidden(place) == "") == is_there


@given(st.binary(max_size=64), st.binary(max_size=64), st.binary(max_size=64))
def test_any_bytes_of_a_layer_are_looked_up(paths: bytes, leaves: bytes, removed: bytes) -> None:
    table = Layers(KEY)
    blobs = (("1",), ("2",))
    table.add(Layer(blob=blobs[0], links=(("a", "a"), ("b", "a"), ("a", "b"))))
    table.add(Layer(blob=blobs[1], paths=paths, leaves=leaves, removed=removed))
    table.images.append(ImageManifest(name="", digest="", layers=blobs))
    assert isinstance(table.hidden(Place(target="t", members=("1", "a"))), str)


def test_a_layer_of_too_many_entries_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "ENTRIES_LIMIT", 3)
    layer = tar_of({f"{n}": b"x" for n in range(5)} | {"x": code("x")})
    report = scanned(written(tmp_path / "i.tar", docker_archive([layer])))
    assert names(report) == ["x"]
    [problem] = report.problems
    assert problem.reason.startswith("a layer of more than 3 entries")
