"""GPU code in the processes of a scan: those whose workload names a code profile, and only those.

Handed to ``take_snapshot`` as ``ScanOptions.code``: which processes, which baselines and which JIT
classes is the policy's to say, which no sensor knows.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.module import Problem
from gpuwarden.code.report import CodeReport, FoundModule, ScannedProcess, Sighting
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.judged_sets import KERNELS_KEPT, MODULES_LIMIT, answer_of
from gpuwarden.codescan.known_code import Trust, jit_rules, open_profile, trust
from gpuwarden.codescan.processes import COVERAGE, Processes, target_name, told_of
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.errors import GpuwardenError
from gpuwarden.host import Host
from gpuwarden.model import CodeScan, Gap, GpuModule, Process, SeenCode, Snapshot
from gpuwarden.node import Node
from gpuwarden.policy import Policy, PolicyProfile
from gpuwarden.rules.gpu_code import HASH_LIKE, profile_of
from gpuwarden.rules.subjects import subjects

SENSOR = "code"
SECONDS = 60.0
"""After which nothing more is begun; what is left is told as not seen."""
NAME_LIMIT = 512
_TOLD = ("unknown", "jit")

Fact = CodeScan | GpuModule | Gap
_Key = tuple[int, int | None, str]


class LiveCode:
    """Looks at the code of declared processes, and remembers what it saw for a while."""

    def __init__(
        self,
        policy: Policy,
        *,
        seconds: float = SECONDS,
        again_after_seconds: float = 0.0,
        trusted: Trust | None = None,
    ) -> None:
        """A process that was wholly seen is looked at again after ``again_after_seconds``.

        ``trusted`` is whose signatures on baselines hold, by default those of the keys installed.
        """
        self._policy = policy
        self._trusted = trusted
        self._seconds = seconds
        self._again_after_seconds = again_after_seconds
        self._seen: dict[_Key, SeenCode] = {}
        self.spent_seconds = 0.0
        """All looks together."""

    def recall(self, seen: Iterable[SeenCode]) -> None:
        """Takes back what ``remembered`` gave, perhaps to another that had the same policy."""
        self._seen.update((_key(one.scan, one.scan.profile), one) for one in seen)

    def remembered(self) -> tuple[SeenCode, ...]:
        """What need not be looked at again yet."""
        return tuple(self._seen.values())

    def __call__(self, host: Host, snapshot: Snapshot) -> Iterator[Fact]:
        """The facts about each declared process; errors are CodeScan's ``failed``."""
        began = time.monotonic()
        deadline = began + self._seconds
        asked = self._declared(snapshot)
        still = {_key(process, name) for name, some in asked.items() for process in some}
        self._seen = {key: value for key, value in self._seen.items() if key in still}
        for name, processes in asked.items():
            profile = self._policy.profile(name)
            if profile is None:
                continue
            fresh = []
            for process in processes:
                known = self._known(process, profile)
                if known is None:
                    fresh.append(process)
                else:
                    yield known.scan
                    yield from known.modules
                    yield from known.gaps
            if fresh:
                yield from self._look(host, profile, fresh, deadline)
        self.spent_seconds += time.monotonic() - began

    def _declared(self, snapshot: Snapshot) -> dict[str, list[Process]]:
        """Profile → the processes on a GPU whose policy entry names it."""
        node = Node(snapshot)
        found = {one.pid: one.process for one in subjects(node) if one.process is not None}
        asked: dict[str, list[Process]] = {}
        for process in found.values():
            name = profile_of(node, self._policy, process)
            if name is not None:
                asked.setdefault(name, []).append(process)
        return asked

    def _known(self, process: Process, profile: PolicyProfile) -> SeenCode | None:
        seen = self._seen.get(_key(process, profile.name))
        if seen is None or seen.compared_with != _content(profile):
            return None
        age = time.monotonic() - seen.seen_at_seconds
        return seen if 0 <= age < self._again_after_seconds else None

    def _look(
        self, host: Host, profile: PolicyProfile, asked: Sequence[Process], deadline: float
    ) -> Iterator[Fact]:
        numbers = itertools.count()
        options = Options(judged=True)
        processes = Processes(host, numbers, shares=options.workers, deadline=deadline)
        try:
            baselines = open_profile(profile, self._trusted or trust())
            assess = Assessor(Baselines(baselines), jit_rules(profile))
            targets = [
                processes.target(process.pid) for process in asked if _is_there(host, process)
            ]
            report = processes.finished(scan_code(targets, numbers, assess, options))
        except GpuwardenError as error:
            for process in asked:
                yield from _failed(process, profile.name, str(error), error.remedy)
            return
        if report.unconfined:
            yield Gap(
                sensor=SENSOR,
                what="part of the confinement of the child that parses GPU code",
                reason="; ".join(report.unconfined),
            )
        for process in asked:
            facts = tuple(_facts(process, profile.name, processes, report))
            yield from facts
            (scan,) = (fact for fact in facts if isinstance(fact, CodeScan))
            if scan.state == "ok":
                self._seen[_key(process, profile.name)] = SeenCode(
                    seen_at_seconds=time.monotonic(),
                    compared_with=_content(profile),
                    scan=scan,
                    modules=tuple(fact for fact in facts if isinstance(fact, GpuModule)),
                    gaps=tuple(fact for fact in facts if isinstance(fact, Gap)),
                )


def _key(process: Process | CodeScan, profile: str) -> _Key:
    return process.pid, process.start_time_ticks, profile


def _content(profile: PolicyProfile) -> str:
    """What tells two profiles of one name apart, without the content of their baselines."""
    return msgspec.json.encode(profile).decode()


def _is_there(host: Host, process: Process) -> bool:
    try:
        host.names(f"/proc/{process.pid}/task")
    except GpuwardenError:
        return False
    return True


def _failed(process: Process, profile: str, reason: str, remedy: str = "") -> Iterator[Fact]:
    yield CodeScan(
        pid=process.pid,
        start_time_ticks=process.start_time_ticks,
        profile=profile,
        state="failed",
        reason=reason,
        remedy=remedy,
    )
    yield Gap(
        sensor=SENSOR, what=f"the GPU code of pid {process.pid}", reason=reason, remedy=remedy
    )


def _facts(
    process: Process, profile: str, processes: Processes, report: CodeReport
) -> Iterator[Fact]:
    name = target_name(process.pid)
    target = next((one for one in report.targets if one.name == name), None)
    seen = target.process if target is not None else None
    if target is None or seen is None or not seen.start_time_ticks:
        why = seen.incomplete if seen is not None else "it has ended"
        yield from _failed(process, profile, why or "it has ended")
        return
    if seen.start_time_ticks != process.start_time_ticks:
        yield from _failed(process, profile, "it has ended, and another process has its number")
        return
    modules = [found for found in report.modules if processes.holds(name, found)]
    told = [_module(process, found, name) for found in modules if found.standing in _TOLD]
    told.sort(
        key=lambda one: (one.answer != HASH_LIKE, not one.in_no_mapped_file, -(one.score or 0))
    )
    yield _scan(process, profile, seen, modules)
    yield from told[:MODULES_LIMIT]
    yield from _gaps(process, seen, told, [p for p in report.problems if p.place.target == name])


def _scan(
    process: Process, profile: str, seen: ScannedProcess, modules: Sequence[FoundModule]
) -> CodeScan:
    counts = Counter(found.standing or "unknown" for found in modules)
    return CodeScan(
        pid=process.pid,
        start_time_ticks=process.start_time_ticks,
        profile=profile,
        state="partial" if seen.incomplete else "ok",
        reason=seen.incomplete,
        modules=len(modules),
        known=counts["known"],
        rebuilt=counts["rebuilt"],
        driver=counts["driver"],
        jit=counts["jit"],
        unknown=counts["unknown"],
        file_count=seen.files,
        memory_bytes=seen.memory_bytes,
        swapped_bytes=seen.swapped_bytes,
        device_mappings=seen.device_mappings,
        limits=seen.limits,
    )


def _module(process: Process, found: FoundModule, target: str) -> GpuModule:
    module, judged = found.module, found.judgement
    sighting = _sighting(found, target)
    kernels = [kernel.name for kernel in module.kernels]
    if judged is not None and judged.kernels:
        # The one that decided it comes first.
        kernels = list(dict.fromkeys([*(one.name for one in judged.kernels), *kernels]))
    place = sighting.place
    return GpuModule(
        pid=process.pid,
        start_time_ticks=process.start_time_ticks,
        digest=module.digest,
        code_digest=module.code_digest,
        kind=module.kind,
        arch=module.arch,
        image_bytes=module.image_bytes,
        mapping=(place.mapping or "/".join(place.members))[:NAME_LIMIT],
        offset=place.offset,
        in_no_mapped_file=sighting.in_no_mapped_file,
        standing="jit" if found.standing == "jit" else "unknown",
        known_as=found.known_as,
        kernels=tuple(name[:NAME_LIMIT] for name in kernels[:KERNELS_KEPT]),
        kernel_count=module.kernel_count,
        answer=answer_of(found),
        score=judged.score if judged is not None else None,
        reasons=judged.reasons if judged is not None else (),
        consistent_with=judged.consistent_with if judged is not None else (),
        broken=module.broken,
    )


def _sighting(found: FoundModule, target: str) -> Sighting:
    """The place to tell of: in this process, and rather where no file explains it."""
    mine = [one for one in found.sightings if one.place.target == target]
    return next((one for one in mine if one.in_no_mapped_file), (mine or found.sightings)[0])


def _gaps(
    process: Process,
    seen: ScannedProcess,
    told: Sequence[GpuModule],
    problems: Iterable[Problem],
) -> Iterator[Gap]:
    of = f"of pid {process.pid}"
    if seen.incomplete:
        yield Gap(sensor=SENSOR, what=f"part of the GPU code {of}", reason=seen.incomplete)
    if seen.swapped_bytes:
        yield Gap(
            sensor=SENSOR,
            what=f"{seen.swapped_bytes >> 10} KiB of the memory {of}",
            reason="they are in swap or in a device's memory, and reading would bring them back",
        )
    if len(told) > MODULES_LIMIT:
        yield Gap(
            sensor=SENSOR,
            what=f"GPU modules {of} beyond the gravest",
            reason=f"a snapshot keeps {MODULES_LIMIT} of one process",
            count=len(told) - MODULES_LIMIT,
        )
    pieces = [problem for problem in problems if problem.what not in COVERAGE]
    if pieces:
        yield Gap(
            sensor=SENSOR,
            what=f"pieces {of} that look like GPU code and could not be read",
            reason=told_of(pieces[0]),
            count=len(pieces),
        )
