"""One probe object in the kernel: checked, sized, loaded; all of it or none."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

from gpuwarden.errors import Unavailable
from gpuwarden.probes.layouts import Layouts
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.loading import NOT_LOADED, check_kernel_types, check_object, explained


class ProbeObject:
    """Programs and maps of an object file, in the kernel until the ExitStack it came with ends.

    ``sizes``: map → entries (ring buffers: bytes) where they differ from the object's own;
    ``programs``: those to load. Nothing is attached.
    Errors: Unavailable (no object, kernel too old), Denied, Malformed (object and ``among``, the
    layouts of what it exchanges, differ); nothing stays loaded then.
    """

    def __init__(
        self,
        bpf: Libbpf,
        stack: ExitStack,
        path: str,
        *,
        among: Layouts,
        programs: tuple[str, ...],
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.bpf = bpf
        self._check(path, among)
        self._programs: dict[str, int] = {}
        self._maps: dict[str, int] = {}
        try:
            with ExitStack() as loading:
                self._load(loading, path, programs, sizes or {})
                stack.push(loading.pop_all())
        except OSError as error:
            raise explained(bpf, error) from error

    def _check(self, path: str, among: Layouts) -> None:
        """What loading needs of this machine and of the object. Errors: Unavailable, Malformed."""
        check_kernel_types()
        check_object(path, among)

    def _prepare(self, program: int) -> None:
        """Before a program is loaded. Errors: OSError."""

    def _load(
        self, stack: ExitStack, path: str, programs: tuple[str, ...], sizes: Mapping[str, int]
    ) -> None:
        bpf = self.bpf
        self._object = bpf.pointer("bpf_object__open_file", path.encode(), None)
        stack.callback(bpf.call, "bpf_object__close", self._object)
        for name in programs:
            found = bpf.pointer("bpf_object__find_program_by_name", self._object, name.encode())
            bpf.checked("bpf_program__set_autoload", found, True)
            self._prepare(found)
            self._programs[name] = found
        for name, entries in sizes.items():
            bpf.checked("bpf_map__set_max_entries", self._map(name), entries)
        bpf.checked("bpf_object__load", self._object)

    def _map(self, name: str) -> int:
        return self.bpf.pointer("bpf_object__find_map_by_name", self._object, name.encode())

    def program(self, name: str) -> int:
        """libbpf's pointer to a program that was loaded."""
        return self._programs[name]

    def map(self, name: str) -> int:
        """The descriptor of a map. Errors: OSError if the object has none of this name."""
        if name not in self._maps:
            self._maps[name] = self.bpf.checked("bpf_map__fd", self._map(name))
        return self._maps[name]

    def put(self, name: str, key: bytes, value: bytes) -> None:
        """Sets an entry of a map. Errors: OSError."""
        self.bpf.checked("bpf_map_update_elem", self.map(name), key, value, 0)

    def get(self, name: str, key: bytes, length: int) -> bytes | None:
        """The value of a key, ``length`` bytes as the map has them; None if there is none."""
        value = ctypes.create_string_buffer(length)
        done = self.bpf.call("bpf_map_lookup_elem", self.map(name), key, value)
        return None if done < 0 else value.raw


class ObjectHolder:
    """A probe with one object: what it loads and attaches goes with the probe's end."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._object: ProbeObject | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Detaches and unloads. Twice does nothing."""
        self._stack.close()

    def _left(self) -> None:
        self._object = None

    @property
    def _loaded(self) -> ProbeObject:
        if self._object is None:
            raise Unavailable(NOT_LOADED)
        return self._object
