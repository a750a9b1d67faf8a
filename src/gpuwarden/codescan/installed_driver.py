"""The modules inside the driver that is installed here: what every GPU process may load.

Only files that root alone can change, in directories that root alone can change, in a place where
the host's loader looks, are the driver's. What such a file holds is known by its digest wherever it
is met, as in a container that the driver is mounted into; no file is believed for its name.
"""

from __future__ import annotations

from gpuwarden.code.baseline.known import KnownSet
from gpuwarden.code.baseline.provenance import Provenance
from gpuwarden.codescan.scan import Options, scan_code
from gpuwarden.codescan.targets import Targets
from gpuwarden.errors import Unavailable
from gpuwarden.host import Host
from gpuwarden.model import DriverFile
from gpuwarden.pattern import pattern
from gpuwarden.sensors import driver_files
from gpuwarden.sensors.nvml.library import check_library
from gpuwarden.sensors.seen import Seen

NAME = "the driver installed here"
_VERSION = pattern(r"\.so\.(\d+(?:\.\d+)+)$")


def driver_paths(host: Host) -> list[str]:
    """The files of the installed driver that can be believed, none where no driver is."""
    try:
        found = list(driver_files.read(host, Seen()))
    except Unavailable:
        return []
    return [
        file.path
        for file in found
        if isinstance(file, DriverFile)
        and not file.writable_by
        and check_library(file.path).accepted
    ]


def installed_driver(host: Host) -> KnownSet:
    """The modules in those files, read in confined children as every other target.

    Errors: Unavailable when no child can be made.
    """
    paths = driver_paths(host) if host.is_local else []
    if not paths:
        return KnownSet(NAME)
    options = Options(kernels=False)
    targets = Targets(options.workers)
    report = scan_code([targets.target(path) for path in paths], targets.numbers, options=options)
    return KnownSet(
        NAME,
        (
            (found.module, _origin(found.sightings[0].place.target))
            for found in report.modules
            if not found.module.broken
        ),
    )


def _origin(path: str) -> Provenance:
    version = _VERSION.search(path)
    return Provenance(
        package="GPU driver", version=version[1] if version else "", file=path, source="driver"
    )
