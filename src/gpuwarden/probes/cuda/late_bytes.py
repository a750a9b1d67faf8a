"""What of an image was not copied while its caller waited: read from the process afterwards."""

from __future__ import annotations

from gpuwarden.probes.cuda.call_points import CALLS, LINKED, SIZED_IMAGE
from gpuwarden.probes.cuda.call_records import Copied
from gpuwarden.probes.cuda.captures import Capture
from gpuwarden.probes.cuda.image_memory import Extent, read_running
from gpuwarden.probes.cuda.stopped import REASONS, StoppedMap
from gpuwarden.probes.cuda.stopped_image import WantedImage, read_stopped

OVERLAP_BYTES = 4096
"""Of what is read of a stopped process again, to see that it is the same."""


def read_stopping(capture: Capture, record: Copied, stops: StoppedMap, limit: int) -> bool:
    """Reads what found no room from a process that stands still, and lets it go on.

    Whether it was stopped at all; if not, why is added to the problem.
    """
    if record.stop_outcome:
        known = record.stop_outcome < len(REASONS)
        why = REASONS[record.stop_outcome] if known else "for an unknown reason"
        capture.problem += f"; it was not stopped: {why}"
        return False
    capture.stopped = True
    process, overlap = capture.begun.process, capture.image.last(OVERLAP_BYTES)
    begins = capture.image.bytes - len(overlap)
    wanted = WantedImage(
        record.image + begins,
        (record.image_bytes or limit) - begins,
        until_nul=not record.image_bytes,
        prefix=overlap,
    )
    thread_id = capture.begun.call.pid
    read = read_stopped(stops, process.pid, process.start_time_ns, thread_id, wanted)
    capture.problem = f"{capture.problem}; {read.missed}" if read.missed else ""
    capture.rest, capture.rest_from = read.descriptor, len(overlap)
    return True


def read_racing(capture: Capture, limit: int) -> None:
    """Reads an image from its process, which runs on: as much as a race allows."""
    begun = capture.begun
    is_sized = CALLS[begun.call.function].task in (SIZED_IMAGE, LINKED)
    read = read_running(
        begun.call.tgid,
        begun.call.start_ns,
        Extent(begun.image, begun.image_bytes) if is_sized else begun.image,
        limit,
    )
    capture.rest, capture.problem = read.descriptor, read.missed
    if read.missed:
        capture.problem = f"read after the load, by a race: {read.missed}"
