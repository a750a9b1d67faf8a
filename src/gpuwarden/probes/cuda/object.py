"""A probe of the CUDA layer with its object in the kernel, whose programs become uprobes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType

from gpuwarden.errors import Unavailable
from gpuwarden.probes import uprobes
from gpuwarden.probes.layouts import Layouts
from gpuwarden.probes.libbpf import Libbpf
from gpuwarden.probes.loading import NOT_LOADED
from gpuwarden.probes.probe_object import ProbeObject

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UPROBES = "/sys/bus/event_source/devices/uprobe"
_REMEDY = "a kernel with CONFIG_DEBUG_INFO_BTF and CONFIG_UPROBE_EVENTS, 5.15 or later"


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


def uprobe_object(
    bpf: Libbpf,
    stack: ExitStack,
    path: str,
    *,
    among: Layouts,
    programs: tuple[str, ...],
    sizes: Mapping[str, int] | None = None,
) -> ProbeObject:
    """An object whose programs ``uprobes.attach`` takes. Errors: as ``ProbeObject``."""
    if not os.path.exists(UPROBES):
        raise Unavailable(
            "this kernel has no uprobes: calls of the CUDA driver library cannot be seen",
            remedy=_REMEDY,
        )
    return ProbeObject(
        bpf, stack, path, among=among, programs=programs, sizes=sizes, prepared=uprobes.prepare
    )
