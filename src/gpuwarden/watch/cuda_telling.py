"""The tracer's messages as JSON lines, with who it was and where it runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpuwarden.cuda.book import CudaBook
from gpuwarden.cuda.messages import (
    ContextSeen,
    LaunchesSeen,
    LibraryGone,
    LibrarySeen,
    LoadSeen,
    Message,
)
from gpuwarden.model import Container, CudaLibrary, LaunchFit, Process
from gpuwarden.outputs import cuda_lines, cuda_text
from gpuwarden.outputs.cuda_lines import Caller
from gpuwarden.probes.cuda.library import LibraryKey
from gpuwarden.probes.events import ProcessIdentity, boot_offset_ns
from gpuwarden.watch.cuda_side import CudaSide, TellEvent, key_of
from gpuwarden.watch.identity import Identities
from gpuwarden.watch.open_judge import Surroundings, container_of, container_state

if TYPE_CHECKING:
    from gpuwarden.watch.agent import Agent


class CudaTelling:
    """Knows who called, and libraries that are gone by their last state."""

    def __init__(
        self, book: CudaBook, identities: Identities, surroundings: Surroundings, *, node: str
    ) -> None:
        self._book = book
        self._identities = identities
        self._surroundings = surroundings
        self._node = node
        self._libraries: dict[LibraryKey, CudaLibrary] = {}

    def caller(self, identity: ProcessIdentity, profile: str) -> Caller:
        """Whose call it was, as far as that is known now."""
        process = self._identities.process(identity)
        lineage = self._identities.lineage(process)
        return Caller(
            process,
            lineage[0] if lineage else None,
            container_of(process, self._surroundings),
            container_state(process, self._surroundings),
            profile,
        )

    def line(self, message: Message, profile: str, fit: LaunchFit | None = None) -> bytes | None:
        """The message as JSON without a newline; None for one that is no event."""
        node = self._node
        if isinstance(message, ContextSeen):
            call = message.call
            caller = self.caller(call.process, profile)
            return cuda_lines.context_line(call, caller, node=node, at_ns=call.at_ns)
        if isinstance(message, LoadSeen):
            caller = self.caller(message.process, profile)
            return cuda_lines.load_line(message.load, caller, node=node, at_ns=message.load.at_ns)
        if isinstance(message, LaunchesSeen):
            window = message.window
            used = self._book.used((window.pid, window.start_time_ticks))
            if used is None or used.identity is None:
                return None
            return cuda_lines.launches_line(
                window,
                self.caller(used.identity, profile),
                fit,
                node=node,
                at_ns=window.until_ns + boot_offset_ns(),
            )
        if isinstance(message, LibrarySeen):
            self._libraries[message.key] = message.library
            return cuda_lines.library_line(
                message.library, "found", node=node, at_ns=time.time_ns()
            )
        if isinstance(message, LibraryGone):
            library = self._libraries.pop(message.key, None)
            if library is not None:
                return cuda_lines.library_line(library, "gone", node=node, at_ns=time.time_ns())
        return None

    def text(self, message: Message, profile: str, *, width: int, colour: bool) -> str:
        """The message as a line for a person; empty for one that is no event."""
        if isinstance(message, LibrarySeen | LibraryGone):
            return self._library_text(message, width=width, colour=colour)
        if isinstance(message, ContextSeen):
            call = message.call
            caller = self.caller(call.process, profile)
            return cuda_text.context_text(
                call,
                caller,
                at_ns=call.at_ns,
                width=width,
                place=container_name(caller.process, caller.container),
                colour=colour,
            )
        if isinstance(message, LoadSeen):
            caller = self.caller(message.process, profile)
            return cuda_text.load_text(
                message.load,
                caller,
                at_ns=message.load.at_ns,
                width=width,
                place=container_name(caller.process, caller.container),
                colour=colour,
            )
        if isinstance(message, LaunchesSeen):
            window = message.window
            used = self._book.used((window.pid, window.start_time_ticks))
            if used is not None and used.identity is not None:
                caller = self.caller(used.identity, profile)
                return cuda_text.launches_text(
                    window,
                    caller,
                    at_ns=window.until_ns + boot_offset_ns(),
                    width=width,
                    place=container_name(caller.process, caller.container),
                    colour=colour,
                )
        return ""

    def _library_text(self, message: LibrarySeen | LibraryGone, *, width: int, colour: bool) -> str:
        found = isinstance(message, LibrarySeen)
        if isinstance(message, LibrarySeen):
            library: CudaLibrary | None = message.library
            self._libraries[message.key] = message.library
        else:
            library = self._libraries.pop(message.key, None)
        if library is None:
            return ""
        return cuda_text.library_text(
            library, found=found, at_ns=time.time_ns(), width=width, colour=colour
        )


def container_name(process: Process, container: Container | None) -> str:
    """Where a process runs, in a word: its pod, its container; empty for the host."""
    if container is not None and container.pod_name:
        return f"{container.pod_namespace}/{container.pod_name}"
    if container is not None:
        return f"{container.runtime}:{container.name or container.id[:12]}"
    placement = process.cgroup
    identity = None if placement is None else placement.container_id
    return "" if identity is None else f"container {identity[:12]}"


def telling(agent: Agent, side: CudaSide, identities: Identities) -> TellEvent:
    """Tells events as lines on standard output, as those of devices."""
    lines = CudaTelling(side.book, identities, agent.watch.surroundings, node=agent.node.hostname)

    def tell(message: Message, profile: str) -> None:
        fact = side.fact(key_of(message))
        line = lines.line(message, profile, None if fact is None else fact.fit)
        if line is not None:
            agent.telling.event_line(line)

    return tell
