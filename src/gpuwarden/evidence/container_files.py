"""The containers of the subjects: what their runtimes say, and the files that these keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpuwarden.evidence.masks import mask_json, mask_text
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host import Host
from gpuwarden.model import Container
from gpuwarden.node import Node
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.runtimes import runc_state

CONTAINERS_LIMIT = 16
DOCUMENT_LIMIT_BYTES = 4 << 20
PLAIN_LIMIT = 12


def collect(shelf: Shelf, host: Host, node: Node, groups: Iterable[Sequence[str]]) -> None:
    """One folder each, by the first characters of its id; image and digest among what is told.

    ``groups``: the lines of /proc/PID/cgroup of each subject, as they were read of itself.
    """
    identities = list(
        dict.fromkeys(identity for lines in groups for _, identity in containers_in(place(lines)))
    )
    for number, identity in enumerate(identities[:CONTAINERS_LIMIT]):
        plain = "".join(one for one in identity if one.isascii() and one.isalnum())
        below = shelf.below(f"{number}-{plain[:PLAIN_LIMIT] or 'x'}", f"container {identity[:64]}")
        container = node.containers.get(identity) or runc_state.look_up(host, identity)
        if container is None:
            below.unread("what its runtime says", "no runtime here knows it")
        else:
            _container(below, container)
        for count, path in enumerate(runc_state.files(host, identity)):
            _document(below, host, path, f"{count}-{path.rpartition('/')[2]}")
    if len(identities) > CONTAINERS_LIMIT:
        shelf.left_out(f"{len(identities) - CONTAINERS_LIMIT} containers", "too many")


def _container(shelf: Shelf, container: Container) -> None:
    document = mask_json(msgspec.to_builtins(container))
    what = f"image {container.image or 'not known'}, {container.image_digest or 'no digest'}"
    shelf.put_json("container.json", document, what)
    if container.pod_uid is not None:
        pod = {name: value for name, value in document.items() if name.startswith("pod_")}
        shelf.put_json("pod.json", pod, "pod")


def _document(shelf: Shelf, host: Host, path: str, name: str) -> None:
    """A runtime's own JSON, secrets masked; what is none is kept as text."""
    with shelf.trying(path):
        data = host.read_bytes(path, DOCUMENT_LIMIT_BYTES + 1)
        if len(data) > DOCUMENT_LIMIT_BYTES:
            shelf.left_out(path, f"larger than {DOCUMENT_LIMIT_BYTES >> 20} MiB")
            return
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            text = mask_text(data.decode("utf-8", "backslashreplace"))
            shelf.put(name, text.encode(), f"{path}, secrets masked, no JSON")
            return
        shelf.put_json(name, mask_json(document), f"{path}, secrets masked")
