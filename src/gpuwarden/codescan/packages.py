"""Which package a file is of: by a wheel's own metadata, or by what installed it.

Sources: the binary distribution format (PEP 427), recording installed projects (PEP 376 and 627).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Iterator
from email.parser import BytesHeaderParser

from msgspec import Struct

from gpuwarden.errors import Malformed, Unavailable

METADATA_LIMIT_BYTES = 4 << 20
RECORD_LIMIT_BYTES = 64 << 20
PARENTS_LIMIT = 16
DIST_INFO = ".dist-info"


class Package(Struct, frozen=True):
    """A package and its files: path → the hash that its RECORD tells, ``sha256=…`` or empty."""

    name: str
    version: str
    files: dict[str, str]

    def holds(self, path: str) -> bool:
        """Whether its RECORD names this file."""
        return path in self.files


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_metadata(data: bytes) -> tuple[str, str]:
    """Name and version in the text of a METADATA file. Errors: Malformed."""
    message = BytesHeaderParser().parsebytes(data)
    name, version = message.get("Name"), message.get("Version")
    if not name or not version:
        raise Malformed("METADATA without a name or a version")
    return str(name).strip(), str(version).strip()


def parse_record(data: bytes) -> dict[str, str]:
    """Path → hash of the text of a RECORD file. Errors: Malformed."""
    try:
        rows = csv.reader(io.StringIO(data.decode()), strict=True)
        return {row[0]: row[1] for row in rows if len(row) == 3}
    except (UnicodeDecodeError, csv.Error) as error:
        raise Malformed(f"RECORD: {error}") from error


def _member(wheel: zipfile.ZipFile, name: str, limit: int) -> bytes:
    if wheel.getinfo(name).file_size > limit:
        raise Malformed(f"{name}: more than {limit} bytes")
    with wheel.open(name) as member:
        return member.read(limit)


def read_wheel(path: str) -> Package:
    """The package that a wheel is of; its file name must say the same.

    Errors: Unavailable, Malformed.
    """
    # {name}-{version}(-{build})?-{python}-{abi}-{platform}.whl
    parts = os.path.basename(path).removesuffix(".whl").split("-")
    try:
        with zipfile.ZipFile(path) as wheel:
            folders = {
                name.split("/")[0]
                for name in wheel.namelist()
                if name.count("/") == 1 and name.split("/")[0].endswith(DIST_INFO)
            }
            if len(folders) != 1:
                raise Malformed(f"{path}: {len(folders)} {DIST_INFO} folders; expected one")
            folder = folders.pop()
            name, version = parse_metadata(
                _member(wheel, f"{folder}/METADATA", METADATA_LIMIT_BYTES)
            )
            files = parse_record(_member(wheel, f"{folder}/RECORD", RECORD_LIMIT_BYTES))
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError) as error:
        raise Malformed(f"{path}: not a wheel: {error}") from error
    if len(parts) not in (5, 6) or (_normal(parts[0]), parts[1].replace("_", "-")) != (
        _normal(name),
        version.replace("_", "-"),
    ):
        raise Malformed(f"{path}: its metadata names {name} {version}, its file name does not")
    return Package(name, version, files)


class InstalledPackages:
    """Who installed a file, asked of the ``.dist-info`` folders beside it, each read once."""

    def __init__(self) -> None:
        self._folders: dict[str, list[Package]] = {}

    def owner(self, path: str) -> tuple[Package, str] | None:
        """The package that installed the file at ``path``, and the file's name in it.

        None when no package says so.
        """
        path = os.path.abspath(path)
        folder = path
        for _ in range(PARENTS_LIMIT):
            folder = os.path.dirname(folder)
            relative = os.path.relpath(path, folder)
            for package in self._packages(folder):
                if package.holds(relative):
                    return package, relative
            if folder == "/":
                break
        return None

    def _packages(self, folder: str) -> list[Package]:
        found = self._folders.get(folder)
        if found is None:
            found = self._folders[folder] = list(_installed_in(folder))
        return found


def _installed_in(folder: str) -> Iterator[Package]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(DIST_INFO))
    except OSError:
        return
    for name in names:
        try:
            metadata = _read(f"{folder}/{name}/METADATA", METADATA_LIMIT_BYTES)
            record = _read(f"{folder}/{name}/RECORD", RECORD_LIMIT_BYTES)
            yield Package(*parse_metadata(metadata), parse_record(record))
        except (OSError, Malformed):
            # A package without its lists owns nothing that could be told.
            continue


def _read(path: str, limit: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Malformed(f"{path}: more than {limit} bytes")
    return data


def sha256_of(path: str) -> str:
    """The SHA-256 of a file in hexadecimal. Errors: Unavailable."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error


def is_as_recorded(recorded: str, digest: str) -> bool:
    """Whether a file's SHA-256 is the one in a RECORD; also when that tells none of this kind."""
    algorithm, _, value = recorded.partition("=")
    if algorithm != "sha256":
        return True
    return value == base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
