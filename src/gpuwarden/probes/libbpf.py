"""The few functions of the distribution's libbpf.so.1 that the loader uses, typed, by ctypes.

The one option structure (``uprobes.py``) has the size of the oldest libbpf, which all take.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpuwarden.errors import Unavailable

SONAME = "libbpf.so.1"
_LOG_BYTES = 1 << 20
_LOG_KEEP = 40
_LOG_LINE = 400
_WARNING = 0

Pointer = int | None
_handle, _integer, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_PRINT = ctypes.CFUNCTYPE(_integer, _integer, _text, _handle)
RING_CALLBACK = ctypes.CFUNCTYPE(_integer, _handle, _handle, ctypes.c_size_t)

# name → (result, arguments): libbpf.h and bpf.h of libbpf 1.0.
_FUNCTIONS: dict[str, tuple[object, Sequence[object]]] = {
    "bpf_object__open_file": (_handle, (_text, _handle)),
    "bpf_object__load": (_integer, (_handle,)),
    "bpf_object__close": (None, (_handle,)),
    "bpf_object__find_program_by_name": (_handle, (_handle, _text)),
    "bpf_object__find_map_by_name": (_handle, (_handle, _text)),
    "bpf_program__set_autoload": (_integer, (_handle, ctypes.c_bool)),
    "bpf_program__set_expected_attach_type": (_integer, (_handle, ctypes.c_uint)),
    "bpf_program__fd": (_integer, (_handle,)),
    "bpf_program__attach": (_handle, (_handle,)),
    "bpf_program__attach_cgroup": (_handle, (_handle, _integer)),
    "bpf_program__attach_tracepoint": (_handle, (_handle, _text, _text)),
    "bpf_program__attach_iter": (_handle, (_handle, _handle)),
    "bpf_program__attach_uprobe_opts": (
        _handle,
        (_handle, _integer, _text, ctypes.c_size_t, _handle),
    ),
    "bpf_link__destroy": (_integer, (_handle,)),
    "bpf_link__fd": (_integer, (_handle,)),
    "bpf_obj_get": (_integer, (_text,)),
    "bpf_obj_pin": (_integer, (_integer, _text)),
    "bpf_iter_create": (_integer, (_integer,)),
    "bpf_map__fd": (_integer, (_handle,)),
    "bpf_map__set_max_entries": (_integer, (_handle, ctypes.c_uint32)),
    "bpf_map_update_elem": (_integer, (_integer, _handle, _handle, ctypes.c_uint64)),
    "bpf_map_lookup_elem": (_integer, (_integer, _handle, _handle)),
    "bpf_map_delete_elem": (_integer, (_integer, _handle)),
    "bpf_map_lookup_and_delete_elem": (_integer, (_integer, _handle, _handle)),
    "bpf_map_get_next_key": (_integer, (_integer, _handle, _handle)),
    "ring_buffer__new": (_handle, (_integer, RING_CALLBACK, _handle, _handle)),
    "ring_buffer__poll": (_integer, (_handle, _integer)),
    "ring_buffer__consume": (_integer, (_handle,)),
    "ring_buffer__epoll_fd": (_integer, (_handle,)),
    "ring_buffer__free": (None, (_handle,)),
    "libbpf_num_possible_cpus": (_integer, ()),
    "libbpf_set_print": (_handle, (_PRINT,)),
}


class Libbpf:
    """The library itself; ``said`` holds its last warnings. Errors: Unavailable."""

    def __init__(self, soname: str = SONAME) -> None:
        try:
            self._library = ctypes.CDLL(soname, use_errno=True)
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.restype = result
                function.argtypes = tuple(arguments)
        except (OSError, AttributeError) as error:
            raise Unavailable(
                f"eBPF needs {soname}, and it cannot be loaded: {error}",
                remedy="apt-get install libbpf1 (elsewhere: the package libbpf, 1.0 or later)",
            ) from error
        self._libc = ctypes.CDLL(None)
        self._libc.vsnprintf.argtypes = [_handle, ctypes.c_size_t, _text, _handle]
        self.said: list[str] = []
        self._print = _PRINT(self._keep)  # libbpf keeps the pointer as long as the process lives
        self._library.libbpf_set_print(self._print)

    def call(self, name: str, *arguments: object) -> int:
        """Calls a function that gives an int; negative ones are errors, as -errno."""
        ctypes.set_errno(0)
        done = getattr(self._library, name)(*arguments)
        return 0 if done is None else int(done)

    def pointer(self, name: str, *arguments: object) -> int:
        """Calls a function that gives a pointer. Errors: OSError if it is NULL."""
        ctypes.set_errno(0)
        found = getattr(self._library, name)(*arguments)
        if not found:
            code = ctypes.get_errno()
            raise OSError(code, f"{name}: {os.strerror(code)}")
        return int(found)

    def checked(self, name: str, *arguments: object) -> int:
        """``call`` that raises OSError instead of giving a negative number."""
        done = self.call(name, *arguments)
        if done < 0:
            raise OSError(-done, f"{name}: {os.strerror(-done)}")
        return done

    def _keep(self, level: int, template: bytes, arguments: int | None) -> int:
        if level > _WARNING:
            return 0
        buffer = ctypes.create_string_buffer(_LOG_BYTES)
        self._libc.vsnprintf(buffer, _LOG_BYTES, template, arguments)
        lines = buffer.value.decode("utf-8", "backslashreplace").splitlines()
        self.said.extend(line.strip()[:_LOG_LINE] for line in lines[-_LOG_KEEP:] if line.strip())
        del self.said[:-_LOG_KEEP]
        return 0


_lock = threading.Lock()
_loaded: list[Libbpf] = []


@contextmanager
def library() -> Iterator[Libbpf]:
    """The one Libbpf of this program, its warnings emptied. Errors: Unavailable."""
    with _lock:
        if not _loaded:
            _loaded.append(Libbpf())
        _loaded[0].said.clear()
        yield _loaded[0]
