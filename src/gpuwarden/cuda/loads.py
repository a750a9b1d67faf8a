"""From a captured load to a fact: bytes examined, files of loads by name read, both apart."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from typing import NamedTuple

from gpuwarden.cuda import paths
from gpuwarden.cuda.modules import ModuleExaminer
from gpuwarden.host import Host
from gpuwarden.model import LoadedModule, ModuleLoad
from gpuwarden.policy import Policy
from gpuwarden.probes.cuda.records import CapturedLoad
from gpuwarden.probes.events import ProcessIdentity

Seen = tuple[ProcessIdentity, ModuleLoad]


class _Waiting(NamedTuple):
    load: CapturedLoad
    problems: tuple[str, ...]


class Loads:
    """Takes loads, gives facts of them in the order in which they were examined."""

    def __init__(self, host: Host, policy: Policy) -> None:
        self._host = host
        self._limit = policy.capture.module_mib << 20
        self._examiner = ModuleExaminer(policy)
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._submitted = 0
        self._done: deque[Seen] = deque()

    def fileno(self) -> int:
        return self._examiner.fileno()

    @property
    def problems(self) -> tuple[str, ...]:
        """Which profiles cannot be asked, and what children lack."""
        loose = (f"not confined: {one}" for one in self._examiner.unconfined)
        return (*self._examiner.problems, *loose)

    def close(self) -> None:
        # Descriptors are the examiner's since they were submitted.
        self._waiting.clear()
        self._examiner.close()

    def submit(self, load: CapturedLoad) -> None:
        """Takes a load and its descriptor."""
        problems: tuple[str, ...] = ()
        if load.path is not None and load.descriptor is None:
            named = paths.read_named(
                load.process.pid,
                load.process.start_time_ns,
                load.path,
                self._limit,
                called_ns=load.at_ns,
                mount_namespace=load.process.mount_namespace,
            )
            problems = tuple(filter(None, (named.problem,)))
            load = load._replace(
                descriptor=named.descriptor,
                image_bytes=named.size,
                captured_bytes=named.size or 0,
                missed=named.problem if named.descriptor is None else "",
            )
        if load.descriptor is None:
            self._done.append((load.process, _fact(load, (), problems)))
            return
        # A load by name, and what the driver reads for it, have one number.
        self._submitted += 1
        self._waiting[self._submitted] = _Waiting(load, problems)
        self._examiner.submit(load._replace(number=self._submitted))

    def take(self) -> list[Seen]:
        """What has been examined by now."""
        for number, modules, problems in self._examiner.take():
            one = self._waiting.pop(number, None)
            if one is not None:
                fact = _fact(one.load, modules, (*one.problems, *problems))
                self._done.append((one.load.process, fact))
        found = list(self._done)
        self._done.clear()
        return found


def _fact(
    load: CapturedLoad, modules: tuple[LoadedModule, ...], problems: tuple[str, ...]
) -> ModuleLoad:
    return ModuleLoad(
        pid=load.process.pid,
        start_time_ticks=load.process.start_time_ticks,
        number=load.number,
        at_ns=load.at_ns,
        thread_id=load.thread_id,
        function=load.function,
        path=_text(load.path),
        image_bytes=load.image_bytes,
        captured_bytes=load.captured_bytes,
        missed=load.missed,
        stopped=load.stopped,
        modules=modules,
        problems=problems,
    )


def _text(path: str | None) -> str | None:
    """A path that no message can hold is escaped."""
    return None if path is None else os.fsencode(path).decode("utf-8", "backslashreplace")
