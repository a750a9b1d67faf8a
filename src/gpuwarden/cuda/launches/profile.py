"""The launch profile of a workload: its file, and what each of its numbers means.

JSON with ``schema`` and ``version``; kernels are numbered by their place in ``kernels``. Names of
kernels are what the learned processes called them.
"""

from __future__ import annotations

import os
import stat
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpuwarden.code.baseline.file_writer import write_whole
from gpuwarden.errors import Denied, Malformed, Unavailable

SCHEMA = "gpuwarden.launches"
VERSION = 1
FILE_LIMIT_BYTES = 16 << 20
KERNELS_LIMIT = 4096
NAME_LIMIT = 256
DIGESTS_LIMIT = 64
SHAPES_LIMIT = 32
TRANSITIONS_LIMIT = 65536
PHASES_LIMIT = 16
PERIODS_LIMIT = 4
ORIGINS_LIMIT = 64

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Number = Annotated[int, Meta(ge=0, lt=KERNELS_LIMIT)]
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)]
Text = Annotated[str, Meta(max_length=1024)]
Digest = Annotated[str, Meta(max_length=128, pattern="^[0-9a-f]*$")]
Extent = Annotated[int, Meta(ge=0, lt=1 << 32)]
Shape = tuple[tuple[Extent, Extent, Extent], tuple[Extent, Extent, Extent]]
"""Grid and block."""
WITHOUT_END = 1 << 31
"""A run of launches that fills its thread and stream."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a profile is made of."""


class ProfiledKernel(Part, frozen=True, kw_only=True):
    """One kernel of the learned runs; shares are of the launches in spans of seconds."""

    name: Name
    """For one that was made while the workload ran, without the numbers that differ by run."""
    jit: bool = False
    digests: Annotated[tuple[Digest, ...], Meta(max_length=DIGESTS_LIMIT)] = ()
    """Of the modules that it was launched from."""
    launches: Count = 0
    least: Share = 0.0
    """The 5 % quantile."""
    usual: Share = 0.0
    """The median."""
    most: Share = 0.0
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=SHAPES_LIMIT)] = ()
    """Grids and blocks it was launched with; empty where there were more, or none was seen."""
    longest_run: Annotated[int, Meta(ge=0, le=WITHOUT_END)] = 0
    """Most launches of it in a row in one thread and stream; ``WITHOUT_END`` where it had one for
    itself, 0 where none was sampled."""
    own_rhythm_hz: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Launches a second where they come out of step with all others; 0: in step, or not known."""


class Phase(Part, frozen=True, kw_only=True):
    """A mix of kernels that the workload has for a while: start, step, evaluation."""

    shares: Annotated[tuple[tuple[Number, Share], ...], Meta(max_length=KERNELS_LIMIT)]


class Period(Part, frozen=True, kw_only=True):
    """A time after which the launches repeat."""

    seconds: Seconds
    strength: Share
    """How alike they are after it."""


class Origin(Part, frozen=True, kw_only=True):
    """Where and from what a profile, or a part of a merged one, was learned."""

    node: Text = ""
    by: Text = ""
    workload: Text = ""
    policy_profile: Text = ""
    baselines: Annotated[tuple[Digest, ...], Meta(max_length=64)] = ()
    """Of the baselines that its modules were known by."""
    learned: Count = 0
    """Seconds since 1970."""
    windows: Count = 0
    launches: Count = 0
    seconds: Seconds = 0.0


class LaunchProfile(Part, frozen=True, kw_only=True):
    """What a workload launches when it does what it should."""

    schema: str = SCHEMA
    version: int = VERSION
    name: Text = ""
    workload: Text = ""
    created: Count = 0
    """Seconds since 1970."""
    tool: Text = ""
    origins: Annotated[tuple[Origin, ...], Meta(max_length=ORIGINS_LIMIT)] = ()
    runs: Count = 1
    windows: Count = 0
    launches: Count = 0
    graph_launches: Count = 0
    seconds: Seconds = 0.0
    kernels: Annotated[tuple[ProfiledKernel, ...], Meta(max_length=KERNELS_LIMIT)] = ()
    transitions: Annotated[
        tuple[tuple[Number, Number, Count], ...], Meta(max_length=TRANSITIONS_LIMIT)
    ] = ()
    """(kernel, the next one of its thread and stream, how often), sorted."""
    periods: Annotated[tuple[Period, ...], Meta(max_length=PERIODS_LIMIT)] = ()
    """The step first, then others; empty where none was found."""
    phases: Annotated[tuple[Phase, ...], Meta(max_length=PHASES_LIMIT)] = ()
    span_seconds: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Over how long shares are taken."""
    phase_distance: Share = 0.0
    """How far a span of the learned runs is from the nearest phase of the others."""
    unexplained: Share = 0.0
    """Which share of a span the other spans do not explain."""

    def probability(self, first: int, second: int) -> float:
        """How often ``second`` follows ``first``, of all that follows it; 0 to 1."""
        following = [(to, count) for from_, to, count in self.transitions if from_ == first]
        total = sum(count for _, count in following)
        return sum(count for to, count in following if to == second) / total if total else 0.0


_DECODER = msgspec.json.Decoder(LaunchProfile)


def encode_profile(profile: LaunchProfile) -> bytes:
    """The file of a profile; the same profile gives the same bytes."""
    return msgspec.json.encode(profile) + b"\n"


def parse_profile(data: bytes) -> LaunchProfile:
    """A profile of any bytes. Errors: Malformed, with the place."""
    if len(data) > FILE_LIMIT_BYTES:
        raise Malformed(f"a launch profile of {len(data)} bytes; at most {FILE_LIMIT_BYTES}")
    try:
        profile = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError) as error:
        raise Malformed(f"no launch profile: {str(error)[:200]}") from error
    if profile.schema != SCHEMA or profile.version != VERSION:
        raise Malformed(
            f"no launch profile of version {VERSION}: $.schema {profile.schema[:40]!r}, "
            f"$.version {profile.version}"
        )
    _check(profile)
    return profile


def _check(profile: LaunchProfile) -> None:
    seen: set[tuple[str, bool]] = set()
    for place, kernel in enumerate(profile.kernels):
        if (kernel.name, kernel.jit) in seen:
            raise Malformed(f"launch profile: $.kernels[{place}] is there twice")
        seen.add((kernel.name, kernel.jit))
        if not kernel.least <= kernel.usual <= kernel.most:
            raise Malformed(f"launch profile: $.kernels[{place}]: its shares are not in order")
    count = len(profile.kernels)
    before = (-1, -1)
    for place, (first, second, _) in enumerate(profile.transitions):
        if max(first, second) >= count or (first, second) <= before:
            raise Malformed(
                f"launch profile: $.transitions[{place}] names no kernel or is out of order"
            )
        before = (first, second)
    for place, phase in enumerate(profile.phases):
        numbers = [number for number, _ in phase.shares]
        if any(number >= count for number in numbers) or len(set(numbers)) != len(numbers):
            raise Malformed(f"launch profile: $.phases[{place}] names no kernel, or one twice")


def read_profile(path: str) -> LaunchProfile:
    """Reads a profile's file. Errors: Unavailable, Denied, Malformed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Malformed(f"{path}: is not a regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(FILE_LIMIT_BYTES + 1)
        finally:
            os.close(descriptor)
    except PermissionError as error:
        raise Denied(f"{path}: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        return parse_profile(data)
    except Malformed as error:
        raise Malformed(f"{path}: {error}") from error


def write_profile(path: str, profile: LaunchProfile) -> None:
    """Writes a profile, all or nothing, for everybody to read. Errors: Denied."""
    write_whole(path, [encode_profile(profile)], mode=0o644)


def rounded(value: Any) -> float:
    """A number as the file keeps it: six digits after the point."""
    return round(float(value), 6)
