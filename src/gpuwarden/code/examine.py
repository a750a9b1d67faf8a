"""Every module of a buffer with its description, by two threads within a bound of memory.

Decompressing and hashing release the interpreter's lock: two threads use two cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from gpuwarden.code.bounds import DEFAULT, Bounds
from gpuwarden.code.describe import Known, describe, describe_broken
from gpuwarden.code.extract import Buffer, modules_in
from gpuwarden.code.located import Located
from gpuwarden.code.module import Module, Place, Problem
from gpuwarden.errors import Malformed

IN_FLIGHT_BYTES = 64 << 20
IN_FLIGHT_MODULES = 256


class Examined(NamedTuple):
    """A module, and its image when it was to be kept."""

    module: Module
    image: bytes | memoryview | None


Keep = Callable[[Module], bool]


def examine(
    buffer: Buffer,
    place: Place,
    *,
    bounds: Bounds = DEFAULT,
    threads: int = 2,
    keep: Keep | None = None,
    known: Known | None = None,
    kernels: bool = True,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
) -> Iterator[Examined | Problem]:
    """Every module of ``buffer``, described, in the order that ``modules_in`` gives them.

    ``keep`` says of which modules the image is wanted, ``known`` which digests need no code digest
    beside them; both are called in the threads. ``kernels`` says whether these are told. Images
    whose sum is over ``in_flight_bytes`` wait, but for one at a time.
    """
    waiting: deque[tuple[Future[Examined] | Problem, int]] = deque()
    in_flight = 0
    with ThreadPoolExecutor(threads, "code") as pool:
        try:
            for found in modules_in(buffer, place, bounds):
                if isinstance(found, Problem):
                    waiting.append((found, 0))
                    continue
                size = found.image_bytes
                while waiting and (
                    in_flight + size > in_flight_bytes or len(waiting) >= IN_FLIGHT_MODULES
                ):
                    done, its_size = waiting.popleft()
                    in_flight -= its_size
                    yield done if isinstance(done, Problem) else done.result()
                in_flight += size
                waiting.append((pool.submit(_examined, found, bounds, keep, known, kernels), size))
            while waiting:
                done, _ = waiting.popleft()
                yield done if isinstance(done, Problem) else done.result()
        finally:
            for one, _ in waiting:
                if isinstance(one, Future):
                    one.cancel()


def _examined(
    found: Located, bounds: Bounds, keep: Keep | None, known: Known | None, kernels: bool
) -> Examined:
    try:
        image = found.image(bounds)
    except Malformed as error:
        return Examined(describe_broken(found, str(error)), None)
    module = describe(found, image, bounds, known=known, kernels=kernels)
    return Examined(module, image if keep is not None and keep(module) else None)
