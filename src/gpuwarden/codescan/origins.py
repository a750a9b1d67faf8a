"""Where a module that was found comes from: the package, image or file, as a baseline tells it."""

from __future__ import annotations

import os

import msgspec

from gpuwarden.code.baseline.provenance import Provenance, Source
from gpuwarden.code.module import Place, Record
from gpuwarden.code.report import ScannedTarget
from gpuwarden.codescan.packages import (
    InstalledPackages,
    Package,
    is_as_recorded,
    read_wheel,
    sha256_of,
)

NOT_IN_RECORD = "not in the RECORD of its package"
NOT_AS_RECORDED = "not as in the RECORD of its package"


class Label(Record, frozen=True, kw_only=True):
    """What is the same for all modules of one run of a command."""

    source: Source = "library"
    when: int = 0
    tool: str = ""
    note: str = ""


class Origins:
    """The origin of each place of a report; files are read once each."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._installed = InstalledPackages()
        self._wheels: dict[str, tuple[Package, str]] = {}
        self._files: dict[str, Provenance] = {}

    def of(self, target: ScannedTarget, place: Place) -> Provenance:
        """The origin of a module at ``place`` in ``target``. Errors: Unavailable, Malformed."""
        if target.what == "wheel":
            return self._of_wheel(target.name, place)
        if target.what == "image":
            # The first member is the layer, whose name says nothing to a person.
            return self._labelled(
                package=target.image or target.name,
                file="!".join(place.members[1:]),
                container=target.image or target.name,
                container_digest=target.digest,
            )
        if target.what == "process":
            process = target.process
            return self._labelled(
                package=(process.exe or process.comm if process else "") or target.name,
                file=place.mapping or "!".join(place.members) or "memory",
                container=process.container if process else "",
            )
        path = target.name
        members = place.members
        if target.what == "folder" and members:
            path, members = os.path.join(path, members[0]), members[1:]
        if path.endswith(".whl") and members:
            return self._of_wheel(path, Place(target=path, members=members))
        return self._of_file(path, members)

    def _of_wheel(self, path: str, place: Place) -> Provenance:
        known = self._wheels.get(path)
        if known is None:
            known = self._wheels[path] = read_wheel(path), sha256_of(path)
        package, digest = known
        file = "!".join(place.members)
        recorded = bool(place.members) and package.holds(place.members[0])
        return self._labelled(
            package=package.name,
            version=package.version,
            file=file,
            container=os.path.basename(path),
            container_digest=f"sha256:{digest}",
            note="" if recorded else NOT_IN_RECORD,
        )

    def _of_file(self, path: str, members: tuple[str, ...]) -> Provenance:
        known = self._files.get(path)
        if known is None:
            digest = sha256_of(path)
            owner = self._installed.owner(path)
            if owner is None:
                known = self._labelled(package=path, version=f"sha256:{digest}")
            else:
                package, relative = owner
                as_recorded = is_as_recorded(package.files[relative], digest)
                known = self._labelled(
                    package=package.name,
                    version=package.version,
                    file=relative,
                    container_digest=f"sha256:{digest}",
                    note="" if as_recorded else NOT_AS_RECORDED,
                )
            self._files[path] = known
        if not members:
            return known
        file = "!".join(part for part in (known.file, *members) if part)
        return msgspec.structs.replace(known, file=file)

    def _labelled(
        self,
        *,
        package: str,
        version: str = "",
        file: str = "",
        container: str = "",
        container_digest: str = "",
        note: str = "",
    ) -> Provenance:
        label = self._label
        return Provenance(
            package=package,
            version=version,
            file=file,
            container=container,
            container_digest=container_digest,
            source=label.source,
            when=label.when,
            tool=label.tool,
            note=note or label.note,
        )
