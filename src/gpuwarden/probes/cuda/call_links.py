"""What attaches the probes of calls to libraries."""

from __future__ import annotations

from gpuwarden.probes import uprobes
from gpuwarden.probes.cuda import call_points
from gpuwarden.probes.cuda.call_points import CALLS, Points
from gpuwarden.probes.cuda.library import FoundLibrary, LibraryKey
from gpuwarden.probes.cuda.records import AttachedLibrary
from gpuwarden.probes.probe_object import ProbeObject


class CallLinks:
    """The links of one loaded object, by library.

    ``no_copies``: why the programs that copy are not there; ``no_returns``: why nothing is probed
    where it returns. Empty where they are, and it is.
    """

    def __init__(self, loaded: ProbeObject, no_copies: str, no_returns: str) -> None:
        self._loaded = loaded
        self._no_copies = no_copies
        self._no_returns = no_returns
        self._attached: dict[LibraryKey, tuple[AttachedLibrary, list[uprobes.Link]]] = {}

    def attach(self, found: FoundLibrary) -> AttachedLibrary:
        """Attaches to what is watched of a library, unless that was done before."""
        if found.key in self._attached:
            return self._attached[found.key][0]
        links: list[uprobes.Link] = []
        problems = [problem for problem in (self._no_copies, self._no_returns) if problem]
        failed: set[str] = set()
        wanted = call_points.points(
            found.points, sleeping=not self._no_copies, returns=not self._no_returns
        )
        for one in wanted:
            failed |= self._attach_points(found, one, links, problems)
        names = {name for one in wanted for name in one.functions}
        offsets = {found.points[name].file_offset for name in names - failed}
        watched = [call.function for call in CALLS if call.function in found.points]
        probed = tuple(name for name in watched if found.points[name].file_offset in offsets)
        attached = AttachedLibrary(
            found.key,
            probed,
            tuple(name for name in probed if found.points[name].at_start),
            tuple(problems),
        )
        self._attached[found.key] = (attached, links)
        return attached

    def _attach_points(
        self,
        found: FoundLibrary,
        wanted: Points,
        links: list[uprobes.Link],
        problems: list[str],
    ) -> set[str]:
        """Attaches all points at once, or those that can be; the functions that cannot be."""
        bpf, program = self._loaded.bpf, self._loaded.program(wanted.program)
        descriptor, returns = found.descriptor, wanted.returns
        failed: set[str] = set()
        try:
            links += uprobes.attach(bpf, program, descriptor, wanted.points, returns=returns)
        except OSError:
            for point, function in zip(wanted.points, wanted.functions, strict=True):
                try:
                    links += uprobes.attach(bpf, program, descriptor, [point], returns=returns)
                except OSError as error:
                    where = "where it returns " if returns else ""
                    problems.append(f"{function} {where}is not probed: {error.strerror}")
                    failed.add(function)
        return failed

    def detach(self, key: LibraryKey) -> None:
        """Takes the probes of a library away, if there are any."""
        attached = self._attached.pop(key, None)
        if attached is not None:
            uprobes.detach(self._loaded.bpf, attached[1])

    def detach_all(self) -> None:
        """Takes all probes away."""
        for key in list(self._attached):
            self.detach(key)
