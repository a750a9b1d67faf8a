"""Running processes as targets: programs and libraries, each once, memory, other mapped files.

No process is stopped, and nothing is made present that was not. What a look at memory cannot see is
said of each process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from gpuwarden.code.module import Place, Problem
from gpuwarden.code.report import CodeReport, FoundModule, ScannedProcess, Sighting
from gpuwarden.codescan.driver_code import DriverCode
from gpuwarden.codescan.memory_parts import Part, parts
from gpuwarden.codescan.process_memory import Inode, MappedFile, ProcessMemory, extents
from gpuwarden.codescan.resident import Presence
from gpuwarden.codescan.targets import SHARED_FROM_BYTES, Target, closing
from gpuwarden.codescan.tasks import FileTask, MemoryTask
from gpuwarden.codescan.worker import Job
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.host import Host
from gpuwarden.sensors.cgroup import containers_in, place
from gpuwarden.sensors.process.formats import parse_cgroup_lines
from gpuwarden.sensors.process.users import UserNames, read_names

MEMORY, FILE, PROCESS = "its memory", "mapped file", "process"
COVERAGE = frozenset({MEMORY, FILE, PROCESS, "contents", "the child that read it"})
"""What a Problem is about when something was not read; others are about what was read."""
FREED = "an image that was freed after it was loaded is not there any more"
ON_THE_GPU = "code that only the driver or the GPU still holds is not seen"


class Processes:
    """Makes targets of pids; a file that several have mapped is read once, for the first.

    ``deadline`` is a time of ``time.monotonic`` after which nothing more is begun.
    """

    def __init__(
        self,
        host: Host,
        numbers: Iterator[int],
        *,
        shares: int = 1,
        deadline: float | None = None,
    ) -> None:
        self._host = host
        self._numbers = numbers
        self._shares = shares
        self._deadline = deadline
        self._names: UserNames | None = None
        self._driver = DriverCode(host)
        self._boot_id = _boot_id(host)
        self._read: set[Inode] = set()
        self._read_as: dict[tuple[str, str], set[Inode]] = {}
        """Target and path → the files that are read under them."""
        self._objects_as: dict[tuple[str, str], set[Inode]] = {}
        """The same of memory that is a file by name only."""
        self._inodes: dict[str, set[Inode]] = {}
        """Target → the files that it has mapped; memory that is a file by name is none."""
        self._objects: dict[str, set[Inode]] = {}
        """Target → that memory."""
        self._own: set[tuple[str, str]] = set()
        """Target and path of files that are the driver's own."""

    def target(self, pid: int) -> Target:
        """The process as a target. Errors: UsageError when there is none of that pid."""
        if pid <= 0 or not os.path.isdir(self._host.path(f"/proc/{pid}")):
            raise UsageError(f"pid {pid}: there is no such process")
        name = target_name(pid)
        seen = ScannedProcess(pid=pid, start_time_ticks=0, boot_id=self._boot_id)
        holder = [seen]
        return Target(
            name, "process", lambda: self._jobs(pid, name, holder), process=lambda: holder[0]
        )

    # ------------------------------------------------------------------ one process

    def _jobs(self, pid: int, name: str, told: list[ScannedProcess]) -> Iterator[Job | Problem]:
        here = Place(target=name)
        if self._is_late():
            yield Problem(place=here, what=PROCESS, reason="no time was left for it")
            return
        try:
            with ProcessMemory(self._host, pid) as process:
                told[0] = self._identity(process)
                # Memory before what may be a model's weights, for which time may run out.
                yield from self._files(process, here, executable=True)
                yield from self._memory(process, here, told)
                yield from self._files(process, here, executable=False)
                told[0] = replace(told[0], files=len(self._inodes.get(name, ())))
        except GpuwardenError as error:
            reason = f"{error}; {error.remedy}" if error.remedy else str(error)
            yield Problem(place=here, what=PROCESS, reason=reason)

    def _files(
        self, process: ProcessMemory, here: Place, *, executable: bool
    ) -> Iterator[Job | Problem]:
        self._inodes.setdefault(here.target, set())
        late = 0
        for found in process.files(executable=executable):
            if not isinstance(found, MappedFile):
                region, reason = found
                yield Problem(place=_of_file(here, region.path), what=FILE, reason=reason)
                continue
            is_first = found.inode not in self._read
            of_kind = self._objects if found.in_memory else self._inodes
            of_kind.setdefault(here.target, set()).add(found.inode)
            if not is_first or not found.size:
                continue
            if self._is_late():
                late += 1
                continue
            self._read.add(found.inode)
            read_as = self._objects_as if found.in_memory else self._read_as
            read_as.setdefault((here.target, found.path), set()).add(found.inode)
            if found.in_memory:
                yield from self._object(found, here)
                continue
            if self._driver.is_own(found):
                self._own.add((here.target, found.path))
            shares = self._shares if found.size >= SHARED_FROM_BYTES else 1
            for share in range(shares):
                task = FileTask(
                    number=next(self._numbers),
                    place=_of_file(here, found.path),
                    size=found.size,
                    share=share,
                    shares=shares,
                )
                yield _job(task, found.descriptor)
        if late:
            yield Problem(place=here, what=FILE, reason=f"no time was left for {late} of them")

    def _object(self, found: MappedFile, here: Place) -> Iterator[Job]:
        """Memory that is a file by name only: by its offsets, since no address is its one."""
        for part in parts(extents(found)):
            yield _job(self._part(here, part), found.descriptor)

    def _part(self, here: Place, part: Part) -> MemoryTask:
        return MemoryTask(number=next(self._numbers), place=here, spans=part.spans, stop=part.stop)

    def _memory(
        self, process: ProcessMemory, here: Place, told: list[ScannedProcess]
    ) -> Iterator[Job | Problem]:
        try:
            present = process.pages.presence(process.memory_regions())
        except OSError as error:
            yield Problem(place=here, what=MEMORY, reason=error.strerror or str(error))
            return
        if present.unseen_bytes:
            reason = f"{_size(present.unseen_bytes)} too sparse to be looked through by this kernel"
            yield Problem(place=here, what=MEMORY, reason=reason)
        told[0] = replace(
            told[0],
            memory_bytes=present.bytes,
            swapped_bytes=present.swapped_bytes,
            device_mappings=process.device_mappings,
            limits=tuple(_limits(present, process.device_mappings)),
        )
        left = present.bytes
        for part in parts(present.spans):
            if self._is_late():
                reason = f"no time was left for {_size(left)} of it"
                yield Problem(place=here, what=MEMORY, reason=reason)
                told[0] = replace(told[0], memory_bytes=present.bytes - left)
                return
            left -= part.bytes
            yield _job(self._part(here, part), process.memory)

    def _identity(self, process: ProcessMemory) -> ScannedProcess:
        if self._names is None:
            self._names = read_names(self._host)
        uid = process.owner_uid
        return ScannedProcess(
            pid=process.pid,
            start_time_ticks=process.start_time_ticks,
            boot_id=self._boot_id,
            comm=process.comm,
            exe=_or_empty(lambda: process.link("exe")),
            user=self._names.users.get(uid, str(uid)),
            container=_or_empty(lambda: _container(process.read("cgroup", 64 << 10))),
        )

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    # ------------------------------------------------------------------ afterwards

    def finished(self, report: CodeReport) -> CodeReport:
        """The report with what only all targets together tell.

        Which modules in memory are in none of that process's mapped files, which are the driver's
        own, and of which process not all was read.
        """
        modules = tuple(self._finished(found) for found in report.modules)
        incomplete: dict[str, list[str]] = {}
        for problem in report.problems:
            if problem.what in COVERAGE:
                incomplete.setdefault(problem.place.target, []).append(told_of(problem))
        targets = tuple(
            replace(
                target,
                process=replace(
                    target.process, incomplete=_summary(incomplete.get(target.name, ()))
                ),
            )
            if target.process is not None
            else target
            for target in report.targets
        )
        return replace(report, modules=modules, targets=targets)

    def _finished(self, found: FoundModule) -> FoundModule:
        places = _file_places(found)
        inodes = self._inodes_of(places)
        sightings = dict.fromkeys(self._sighting(one, inodes) for one in found.sightings)
        if places & self._own and found.standing not in ("known", "rebuilt"):
            found = replace(found, standing="driver", judgement=None)
        return replace(found, sightings=tuple(sightings))

    def _inodes_of(self, places: Iterable[tuple[str, str]]) -> set[Inode]:
        return {inode for place in places for inode in self._read_as.get(place, ())}

    def _sighting(self, sighting: Sighting, inodes: set[Inode]) -> Sighting:
        place = sighting.place
        mapped = self._inodes.get(place.target)
        if mapped is None or place.members:
            return sighting
        return replace(sighting, in_no_mapped_file=not inodes & mapped)

    def holds(self, target: str, found: FoundModule) -> bool:
        """Whether a module is in a process: in its memory, or in what it shares with another."""
        if any(sighting.place.target == target for sighting in found.sightings):
            return True
        if self._inodes_of(_file_places(found)) & self._inodes.get(target, set()):
            return True
        places = ((one.place.target, one.place.mapping) for one in found.sightings)
        objects = {inode for place in places for inode in self._objects_as.get(place, ())}
        return bool(objects & self._objects.get(target, set()))


def _file_places(found: FoundModule) -> set[tuple[str, str]]:
    places = (sighting.place for sighting in found.sightings)
    return {(place.target, place.members[0]) for place in places if place.members}


def target_name(pid: int) -> str:
    """What a process is called in a report."""
    return f"pid {pid}"


def told_of(problem: Problem) -> str:
    """A problem in one line, without the target that it is of."""
    where = "/".join(problem.place.members)
    return f"{where + ': ' if where else ''}{problem.what}: {problem.reason}"


def _job(task: FileTask | MemoryTask, descriptor: int) -> Job:
    own = os.dup(descriptor)
    return Job(task, own, closing(own))


def _of_file(here: Place, path: str) -> Place:
    return Place(target=here.target, members=(path,))


def _limits(present: Presence, device_mappings: int) -> Iterator[str]:
    yield FREED
    yield ON_THE_GPU
    if present.swapped_bytes:
        yield f"{_size(present.swapped_bytes)} in swap or in a device's memory were not read"
    if device_mappings:
        yield f"{device_mappings} mappings of devices were not read"


def _summary(reasons: Iterable[str]) -> str:
    told = list(dict.fromkeys(reasons))
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return "; ".join(told[:3]) + more


def _or_empty(read: Callable[[], str]) -> str:
    try:
        return read()
    except GpuwardenError:
        return ""


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _container(cgroup: bytes) -> str:
    """``docker:4f5c…`` of the innermost container that the lines name; empty for none."""
    named = list(containers_in(place(parse_cgroup_lines(cgroup))))
    if not named:
        return ""
    runtime, identity = named[-1]
    return f"{runtime or 'container'}:{identity}"


def _boot_id(host: Host) -> str:
    try:
        return host.read_text("/proc/sys/kernel/random/boot_id", 64).strip()
    except GpuwardenError:
        return ""
