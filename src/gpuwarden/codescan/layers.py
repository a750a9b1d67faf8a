"""Which files of an image's layers a container of it would still have.

What a child told of the layers is put together here; a path's hash is all that is needed of it.
Source: OCI image specification, layer: whiteouts concern lower layers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from gpuwarden.code.module import Place
from gpuwarden.codescan.images import PATH_HASH_BYTES, path_hash
from gpuwarden.codescan.tar import entry_path
from gpuwarden.codescan.tasks import ImageManifest, Layer

Blob = tuple[str, ...]
ALIASES_LIMIT = 256
LOOKS_LIMIT = 20_000_000
"""Look-ups in all; what comes after them is taken for not hidden."""


class _Hashes:
    def __init__(self, raw: bytes) -> None:
        whole = len(raw) - len(raw) % PATH_HASH_BYTES
        self._sorted: npt.NDArray[np.uint64] = np.sort(np.frombuffer(raw[:whole], "<u8"))

    def __contains__(self, hashed: int) -> bool:
        at = int(np.searchsorted(self._sorted, np.uint64(hashed)))
        return at < len(self._sorted) and int(self._sorted[at]) == hashed


class _Layer:
    def __init__(self, layer: Layer) -> None:
        self.paths, self.leaves = _Hashes(layer.paths), _Hashes(layer.leaves)
        self.removed, self.opaque = _Hashes(layer.removed), _Hashes(layer.opaque)
        self.names: dict[str, list[str]] = {}
        """Path → other names that hard links give it."""
        for path, target in layer.links:
            self.names.setdefault(target, []).append(path)


class Layers:
    """The layers and images of one target."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._layers: dict[Blob, _Layer] = {}
        self.images: list[ImageManifest] = []
        self._looks = LOOKS_LIMIT
        self._answers: dict[tuple[Blob, str], str] = {}

    def add(self, layer: Layer) -> None:
        """A tar archive that may be a layer of one of the images."""
        self._layers[layer.blob] = _Layer(layer)

    def missing(self) -> Iterator[tuple[ImageManifest, Blob]]:
        """Layers that an image names and that are not here, or could not be read."""
        for image in self.images:
            for blob in image.layers:
                if blob not in self._layers:
                    yield image, blob

    def hidden(self, place: Place) -> str:
        """Why no container of the images here would have the file at ``place``; empty if one has.

        A layer that is in no image hides nothing and is hidden by nothing.
        """
        for depth in range(len(place.members) - 1, 0, -1):
            blob = place.members[:depth]
            if blob in self._layers:
                path = entry_path(place.members[depth])
                if (blob, path) not in self._answers:
                    self._answers[blob, path] = self._hidden(blob, path)
                return self._answers[blob, path]
        return ""

    def _hidden(self, blob: Blob, path: str) -> str:
        reason = ""
        for image in self.images:
            for position, one in enumerate(image.layers):
                if one == blob:
                    reason = self._hidden_in(image.layers, position, path)
                    if not reason:
                        return ""
        return reason

    def _hidden_in(self, layers: tuple[Blob, ...], position: int, path: str) -> str:
        first = ""
        for at, name in self._names(layers, position, path):
            reason = self._gone(layers, at, name)
            if not reason:
                return ""
            first = first or reason
        return first

    def _names(
        self, layers: tuple[Blob, ...], position: int, path: str
    ) -> Iterator[tuple[int, str]]:
        """The path in its layer, and names that hard links give the same file, there or later."""
        waiting, seen = [(position, path)], {(position, path)}
        while waiting:
            at, name = waiting.pop(0)
            yield at, name
            for later in range(at, len(layers)):
                layer = self._layers.get(layers[later])
                for other in layer.names.get(name, ()) if layer is not None else ():
                    if (later, other) not in seen and len(seen) < ALIASES_LIMIT:
                        seen.add((later, other))
                        waiting.append((later, other))

    def _gone(self, layers: tuple[Blob, ...], position: int, path: str) -> str:
        own = self._hash(path)
        above = [self._hash(folder) for folder in _folders(path)]
        for later in range(position + 1, len(layers)):
            layer = self._layers.get(layers[later])
            if layer is None:
                continue
            self._looks -= 2 + 3 * len(above)
            if self._looks < 0:
                return ""
            where = f"in layer {later + 1} of {len(layers)}"
            if own in layer.paths or any(one in layer.leaves for one in above):
                return f"replaced {where}"
            if own in layer.removed or any(
                one in layer.removed or one in layer.opaque for one in above
            ):
                return f"deleted {where}"
        return ""

    def _hash(self, path: str) -> int:
        return int.from_bytes(path_hash(path, self._key), "little")


def _folders(path: str) -> Iterable[str]:
    """Every folder that the path is in, the root (empty) among them."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]
