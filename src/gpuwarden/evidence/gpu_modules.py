"""Every GPU module of processes: in their memory and in the files they have mapped.

Confined children look, as for `gpuwarden code scan --pid`; what no baseline knows comes back whole,
the very bytes that its digest is of, once each. Known code is told of by its digests alone.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gpuwarden.code.baseline.known import Baselines
from gpuwarden.code.baseline.reader import Baseline
from gpuwarden.code.baseline.starter import open_starter
from gpuwarden.code.judgement import ModuleJudgement
from gpuwarden.code.module import Kind
from gpuwarden.code.report import CodeReport, FoundModule, ScannedProcess
from gpuwarden.code.standing import Assessor
from gpuwarden.codescan.known_code import described, open_profile, trust
from gpuwarden.codescan.processes import Processes, target_name, told_of
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.codescan.targets import Target
from gpuwarden.codescan.tasks import Buffer, Image, Keep
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.host import Host
from gpuwarden.model import Process
from gpuwarden.node import Node
from gpuwarden.outputs.words import escape
from gpuwarden.policy import Policy
from gpuwarden.rules.gpu_code import profile_of

IMAGE_LIMIT_BYTES: Final = 64 << 20
TOTAL_LIMIT_BYTES: Final = 1 << 30
FILES_LIMIT: Final = 8192
SECONDS: Final = 60.0
"""After which nothing more is begun; what is left is told as not seen."""
TIME_SHARE: Final = 0.8
"""Of what is left until the archive's deadline: what was found is still to be written."""
JUDGING_SECONDS: Final = 0.5
"""Of one child, for what unknown code computes: digests come first."""
TOLD_LIMIT: Final = 100_000
SIGHTINGS_TOLD: Final = 16


class Look:
    """One look at several processes; ``begun`` holds (pid, start time) of each."""

    def __init__(
        self, shelf: Shelf, host: Host, begun: Sequence[tuple[int, int]], policy: Policy
    ) -> None:
        self._shelf = shelf
        self._host = host
        self._begun = dict(begun)
        self._policy = policy
        self._numbers = itertools.count()
        seconds = min(SECONDS, shelf.writer.left_seconds * TIME_SHARE)
        self._processes = Processes(
            host, self._numbers, shares=Options().workers, deadline=time.monotonic() + seconds
        )
        self._targets: dict[int, Target] = {}
        self._files: dict[str, str] = {}
        """Digest → why it is not there, or empty when it is."""
        # What is told of them, and the rest of the archive, needs room as well.
        self._left_bytes = min(TOTAL_LIMIT_BYTES, shelf.writer.room_bytes * 3 // 4)
        self.digests: list[str] = []
        """Of all modules that were found."""

    def run(self, node: Node) -> None:
        """Leaves the images and ``modules.json``. Errors: Unavailable when no child can be made."""
        for pid in self._begun:
            try:
                self._targets[pid] = self._processes.target(pid)
            except GpuwardenError as error:
                self._shelf.unread(f"GPU modules of pid {pid}", str(error))
        if not self._targets:
            return
        baselines = [open_starter(), *self._declared(node)]
        keep = Keep(image_bytes=IMAGE_LIMIT_BYTES, total_bytes=self._left_bytes)
        options = Options(judged=True, keep=keep, baselines=tuple(map(described, baselines)))
        assess = Assess(Baselines(baselines))
        report = scan_code(self._targets.values(), self._numbers, assess, options, kept=self._kept)
        self._tell(self._processes.finished(report))

    def _declared(self, node: Node) -> list[Baseline]:
        """The baselines of the profiles that the policy gives these processes."""
        names = {
            profile_of(node, self._policy, process)
            for pid in self._begun
            if (process := self._process(node, pid)) is not None
        }
        found: list[Baseline] = []
        for profile in filter(None, (self._policy.profile(name) for name in names if name)):
            try:
                found += open_profile(profile, trust())
            except GpuwardenError as error:
                self._shelf.unread(f"baselines of profile {profile.name}", str(error))
        return found

    def _process(self, node: Node, pid: int) -> Process | None:
        process = node.processes.get(pid)
        is_it = process is not None and process.start_time_ticks == self._begun[pid]
        return process if is_it else None

    # ------------------------------------------------------------------------------- images

    def _kept(self, image: Image) -> None:
        """Takes one image; a child is believed nothing, so that its digest is made here again."""
        digest = hashlib.sha256(image.data).hexdigest()
        if digest != image.digest or digest in self._files:
            return
        if not self._is_one_of_them():
            # Whose it is will be known at the end; what is not theirs is not kept.
            self._files[digest] = "the process was another one by then"
            return
        size = len(image.data)
        if size > self._left_bytes or len(self._files) >= FILES_LIMIT:
            self._files[digest] = "no room for it"
            return
        self._left_bytes -= size
        # What it is comes with the report: a name says no more than its digest.
        is_there = self._shelf.put(f"images/{digest}", image.data, f"GPU module {digest[:16]}")
        self._files[digest] = "" if is_there else "no room in the archive"

    def _is_one_of_them(self) -> bool:
        """Whether none of the processes opened so far is another one than was asked for."""
        return not any(self._is_another(pid) for pid in self._targets)

    def _is_another(self, pid: int) -> bool:
        seen = self._seen(pid)
        started = seen.start_time_ticks if seen is not None else 0
        return bool(started) and started != self._begun[pid]

    def _seen(self, pid: int) -> ScannedProcess | None:
        target = self._targets.get(pid)
        return target.process() if target is not None and target.process is not None else None

    # ------------------------------------------------------------------------------- telling

    def _tell(self, report: CodeReport) -> None:
        others = {target_name(pid) for pid in self._targets if self._is_another(pid)}
        for name in others:
            self._shelf.unread(f"GPU modules of {name}", "another process has its number by now")
        modules = []
        for found in report.modules[:TOLD_LIMIT]:
            mine = [one for one in found.sightings if one.place.target not in others]
            if mine:
                self.digests.append(found.module.digest)
                modules.append(self._told(found, [msgspec.to_builtins(one) for one in mine]))
        if len(report.modules) > TOLD_LIMIT:
            more = len(report.modules) - TOLD_LIMIT
            self._shelf.left_out(f"{more} GPU modules", f"more than {TOLD_LIMIT}")
        for problem in report.problems:
            self._shelf.unread(f"{problem.place.target}: GPU code", told_of(problem))
        document = {
            "processes": [
                msgspec.to_builtins(one.process)
                for one in report.targets
                if one.process is not None and one.name not in others
            ],
            "baselines": report.baselines,
            "unconfined": report.unconfined,
            "seconds": report.seconds,
            "count": len(modules),
            "modules": modules,
        }
        self._shelf.put_json("modules.json", document, "GPU modules with their digests")

    def _told(self, found: FoundModule, sightings: list[Any]) -> dict[str, Any]:
        digest = found.module.digest
        why = self._files.get(digest)
        told = {
            **msgspec.to_builtins(found.module),
            "standing": found.standing,
            "known_as": found.known_as,
            "judgement": msgspec.to_builtins(found.judgement),
            "together": found.together,
            "sightings": sightings[:SIGHTINGS_TOLD],
            "sightings_count": len(sightings),
            "file": f"{self._shelf.folder}/images/{digest}" if why == "" else None,
        }
        if why != "":
            told["no_file"] = why or _why_none(found)
            if found.standing not in ("known", "driver"):
                what = f"GPU module {digest[:16]}"
                self._shelf.left_out(what, told["no_file"], found.module.image_bytes)
        return told


def _why_none(found: FoundModule) -> str:
    if found.standing in ("known", "driver"):
        return f"it is {found.standing}: {escape(found.known_as)}"
    if found.module.image_bytes > IMAGE_LIMIT_BYTES:
        return f"larger than {IMAGE_LIMIT_BYTES >> 20} MiB"
    return "it did not come back from the child that saw it"


class Assess(Assessor):
    """Judges what is not known as long as there is time; looks all up."""

    def __init__(self, baselines: Baselines, seconds: float = JUDGING_SECONDS) -> None:
        super().__init__(baselines)
        self._judging = self._judge
        self._judge = self._within
        self._left_seconds = seconds

    def _within(self, kind: Kind, image: Buffer) -> ModuleJudgement:
        if self._left_seconds <= 0:
            return ModuleJudgement(answer="form not judged", reasons=("no time was left for it",))
        began = time.monotonic()
        judgement = self._judging(kind, image)
        self._left_seconds -= time.monotonic() - began
        return judgement


def collect(
    shelf: Shelf, host: Host, begun: Sequence[tuple[int, int]], policy: Policy, node: Node
) -> list[str]:
    """The modules of processes into ``modules.json`` and ``images/``; the digests of all."""
    look = Look(shelf, host, begun, policy)
    with shelf.trying("GPU modules"):
        look.run(node)
    return look.digests
