"""What the command line hands to several commands: the policy, and the node to look at."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gpuwarden.errors import GpuwardenError, Unavailable, UsageError

if TYPE_CHECKING:
    from gpuwarden.model import Snapshot
    from gpuwarden.policy import Policy

DEFAULT_POLICY = "/etc/gpuwarden/policy.yaml"


def load_policy(path: str | None) -> tuple[Policy, str | None]:
    """The policy and the path it came from: ``path``, else the default one if it is there.

    Errors: UsageError.
    """
    from gpuwarden.policy import Policy

    if path is None and not os.path.lexists(DEFAULT_POLICY):
        return Policy(), None
    from gpuwarden.host import Host
    from gpuwarden.policy_file import POLICY_LIMIT_BYTES, parse_policy
    from gpuwarden.rules.registry import RULE_IDS

    wanted = path or DEFAULT_POLICY
    try:
        data = Host().read_bytes(os.path.abspath(wanted), POLICY_LIMIT_BYTES + 1)
    except Unavailable as error:
        raise UsageError(f"{wanted}: cannot be read: no such file") from error
    except GpuwardenError as error:
        raise UsageError(f"{wanted}: cannot be read: {error}") from error
    return parse_policy(data, wanted, RULE_IDS), wanted


def node_of(arguments: argparse.Namespace, policy: Policy | None = None) -> Snapshot:
    """A recorded node if one was named, else this one with the GPU code that a policy asks for.

    Errors: UsageError.
    """
    recording = getattr(arguments, "recording", None)
    if recording is not None:
        from gpuwarden.snapshot import open_recording

        try:
            return open_recording(recording)
        except GpuwardenError as error:
            raise UsageError(str(error), remedy=error.remedy) from error
    from gpuwarden.host import Host
    from gpuwarden.scan import ScanOptions, take_snapshot
    from gpuwarden.sensors.registry import SENSOR_NAMES

    if not os.path.isdir(arguments.root):
        raise UsageError(f"--root {arguments.root}: not a directory")
    library = arguments.nvml_library
    if library is not None and not os.path.lexists(library):
        raise UsageError(f"--nvml-library {library}: no such file")
    chosen: frozenset[str] | None = None
    if getattr(arguments, "sensors", None):
        chosen = frozenset(arguments.sensors.split(","))
        unknown = sorted(chosen - set(SENSOR_NAMES))
        if unknown:
            raise UsageError(
                f"--sensors: no sensor is called '{unknown[0]}'; "
                f"there are: {', '.join(SENSOR_NAMES)}"
            )
    options = ScanOptions(sensors=chosen, nvml_library=arguments.nvml_library, deep=arguments.deep)
    if policy is not None and policy.profiles and chosen is None:
        from gpuwarden.codescan.live import LiveCode

        options = options._replace(code=LiveCode(policy))
    return take_snapshot(Host(arguments.root), options, meanwhile=_load_judgement)


def _load_judgement() -> None:
    """Imports what comes after looking, in the time in which the driver's child is at work."""
    import gpuwarden.judge
    import gpuwarden.outputs.table  # noqa: F401
