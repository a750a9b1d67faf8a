"""What would start the subjects again, with the files that say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from gpuwarden.evidence.node_files import mask_autostart
from gpuwarden.evidence.shelf import Shelf
from gpuwarden.evidence.subjects import Whom
from gpuwarden.host import Host
from gpuwarden.model import PersistenceEntry
from gpuwarden.node import Node
from gpuwarden.rules.autostart_ties import Tie
from gpuwarden.rules.respawn import PRELOAD_KINDS, oddities, tied

FILES_LIMIT = 64
FILE_LIMIT_BYTES = 256 << 10


def collect(shelf: Shelf, host: Host, node: Node, processes: Sequence[Whom]) -> None:
    """``entries.json``: those that tie to a subject, and odd ones; the files, secrets masked."""
    subjects = [
        process
        for whom in processes
        if (process := node.processes.get(whom.pid)) is not None
        and process.start_time_ticks == whom.start_time_ticks
    ]
    ties: dict[int, list[tuple[int, Tie]]] = defaultdict(list)
    for process in subjects:
        for entry, tie, _ in tied(node, process):
            ties[id(entry)].append((process.pid, tie))
    found = [(entry, why) for entry in node.persistence if (why := _why(entry, ties[id(entry)]))]
    if not found:
        return
    document = [{**msgspec.to_builtins(mask_autostart(entry)), "why": why} for entry, why in found]
    shelf.put_json("entries.json", document, "what would start it again")
    paths = dict.fromkeys(entry.path for entry, _ in found if entry.path.startswith("/"))
    for number, path in enumerate(list(paths)[:FILES_LIMIT]):
        plain = "".join(c for c in path.rpartition("/")[2] if c.isascii() and c.isalnum())
        shelf.copy_text(host, path, FILE_LIMIT_BYTES, f"{number}-{plain[:40] or 'file'}")
    if len(paths) > FILES_LIMIT:
        shelf.left_out(f"{len(paths) - FILES_LIMIT} files", f"more than {FILES_LIMIT}")


def _why(entry: PersistenceEntry, ties: Sequence[tuple[int, Tie]]) -> list[str]:
    why: list[str] = []
    for pid, tie in ties:
        perhaps = "" if tie.sure else "perhaps "
        why.append(f"{perhaps}starts pid {pid} or what started it: by its {tie.noun}")
    if entry.kind in PRELOAD_KINDS:
        why.append("loaded into every program")
    return [*why, *oddities(entry)]
