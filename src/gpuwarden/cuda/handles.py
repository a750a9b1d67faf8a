"""Which kernel of which module a handle is, as far as the calls that gave it were seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gpuwarden.model import LoadedModule
from gpuwarden.probes.cuda.records import HandleNamed

HANDLES_LIMIT = 1 << 16
LOADS_LIMIT = 1 << 13
STEPS = 4
"""A function is of a kernel, that of a module, that of a library."""

Kernel = tuple[str, str]
"""(name, digest of its module); what is not known is empty."""


class Handles:
    """The handles of one process; bounded, the oldest make room."""

    def __init__(self) -> None:
        self._named: OrderedDict[int, tuple[str, int]] = OrderedDict()
        self._load_of: OrderedDict[int, int] = OrderedDict()
        self._modules: OrderedDict[int, tuple[LoadedModule, ...]] = OrderedDict()
        self._kernels: dict[int, Kernel] = {}
        """What was found for a handle, until something new is known."""

    def named(self, handle: HandleNamed) -> None:
        """A handle was given; the driver may give the number of one that is gone."""
        self._named[handle.handle] = (handle.name, handle.of)
        self._named.move_to_end(handle.handle)
        if len(self._named) > HANDLES_LIMIT:
            self._named.popitem(last=False)
        self._kernels.clear()

    def came(self, number: int, handle: int) -> None:
        """What a load came to."""
        if handle:
            self._load_of[handle] = number
            self._load_of.move_to_end(handle)
            if len(self._load_of) > LOADS_LIMIT:
                self._load_of.popitem(last=False)
            self._kernels.clear()

    def examined(self, number: int, modules: Iterable[LoadedModule]) -> None:
        """What was in a load."""
        self._modules[number] = tuple(modules)
        if len(self._modules) > LOADS_LIMIT:
            self._modules.popitem(last=False)
        self._kernels.clear()

    def kernel(self, handle: int) -> Kernel:
        """The kernel of a handle."""
        found = self._kernels.get(handle)
        if found is None:
            found = self._kernels[handle] = self._find(handle)
        return found

    def _find(self, handle: int) -> Kernel:
        name, of = "", handle
        for _ in range(STEPS):
            step = self._named.get(of)
            if step is None:
                break
            name, of = name or step[0], step[1]
        number = self._load_of.get(of)
        modules = self._modules.get(number, ()) if number is not None else ()
        return name, _module_with(name, modules)


def _module_with(name: str, modules: Iterable[LoadedModule]) -> str:
    """The digest of the module that has the kernel; of those for several architectures the first.

    A module tells only its first kernels: one that has more than it tells may have it.
    """
    perhaps = ""
    for module in modules:
        if name and name in module.kernels:
            return module.digest
        if not perhaps and module.kernel_count > len(module.kernels):
            perhaps = module.digest
    return perhaps
