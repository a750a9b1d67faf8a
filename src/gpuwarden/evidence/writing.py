"""One archive from beginning to end: named, collected, sealed, journaled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from gpuwarden import tar_format
from gpuwarden.errors import GpuwardenError
from gpuwarden.evidence import manifest as words
from gpuwarden.evidence.archive import SMALLEST_BYTES, ArchiveWriter, Sealed
from gpuwarden.evidence.directory import refuse
from gpuwarden.evidence.manifest import Subject
from gpuwarden.evidence.reading import open_archive
from gpuwarden.evidence.wanted import Wanted
from gpuwarden.journal.asker import asker
from gpuwarden.journal.book import JOURNAL, Journal
from gpuwarden.journal.signing import signing_key
from gpuwarden.policy import Policy

ACTION = "evidence"
EXTENSION = ".tar"
CANDIDATES_LIMIT = 64


def write(
    wanted: Wanted,
    policy: Policy,
    policy_path: str | None,
    *,
    tell: Callable[[str], None],
    why: str,
    directory: str | None = None,
    limit_bytes: int | None = None,
    deadline_seconds: float | None = None,
    by_watch: bool = False,
) -> Sealed:
    """Collects and seals one archive, and says so in the journal, before and after.

    ``directory`` and ``limit_bytes`` are the policy's unless named; the journal is watch's, and
    when it cannot be written, ``tell`` hears of it and evidence is taken all the same.
    Errors: UsageError (the key, the directory), Unavailable (no such process any more), Denied.
    """
    from gpuwarden.evidence.collect import collect

    key = signing_key(policy.signing_key)
    bounds = policy.evidence
    path = os.path.join(os.path.abspath(directory or bounds.directory), _file_name(wanted))
    limit = max(limit_bytes or bounds.archive_mib << 20, SMALLEST_BYTES)
    journal = os.path.join(wanted.state or os.path.dirname(JOURNAL), os.path.basename(JOURNAL))
    noted = _Noted(Journal(journal, key=key, who=asker("watch" if by_watch else "command")), tell)
    noted.intend(wanted, path)
    try:
        with ArchiveWriter(path, limit_bytes=limit, deadline_seconds=deadline_seconds) as writer:
            account = collect(wanted, writer, policy=policy, policy_path=policy_path, tell=tell)
            sealed = writer.close(replace(account, why=why, finding=wanted.finding), key)
    except GpuwardenError as error:
        noted.conclude(str(error), done=False)
        raise
    noted.conclude(f"{sealed.path}, manifest sha256 {sealed.manifest_sha256}", done=True)
    return sealed


class _Noted:
    """The two entries about one archive; a journal that fails is told of once."""

    def __init__(self, journal: Journal, tell: Callable[[str], None]) -> None:
        self._journal = journal
        self._tell = tell
        self._conclude: Callable[[str, bool], object] | None = None

    def intend(self, wanted: Wanted, path: str) -> None:
        """Before anything is read."""
        subject = {
            name: value
            for name in ("pid", "start_time_ticks", "container", "gpu", "finding")
            if (value := getattr(wanted, name)) is not None
        }
        try:
            entry = self._journal.intend(ACTION, subject | {"archive": path})
        except GpuwardenError as error:
            self._tell(f"not in the journal: {error}")
            return
        self._conclude = lambda text, done: self._journal.conclude(entry, text, done=done)

    def conclude(self, text: str, *, done: bool) -> None:
        """What came of it."""
        if self._conclude is None:
            return
        try:
            self._conclude(text, done)
        except GpuwardenError as error:
            self._tell(f"not in the journal: {error}")


def _file_name(wanted: Wanted) -> str:
    """Sorted by time, unlike any other: two archives of one moment differ in their last part."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"evidence-{moment}-{wanted.name}-{os.urandom(3).hex()}{EXTENSION}"


def written_before(
    directory: str, *, pid: int, start_time_ticks: int, boot_id: str | None
) -> str | None:
    """The newest sealed archive in a directory that is about this very process; None if none is.

    It is not verified here; its manifest alone is read. Errors: Denied, Unavailable.
    """
    part = f"-{Wanted(pid=pid).name}-"
    try:
        names = [one for one in os.listdir(directory) if part in one and one.endswith(EXTENSION)]
    except FileNotFoundError:
        return None
    except OSError as error:
        refuse(error, directory)
    for name in sorted(names, reverse=True)[:CANDIDATES_LIMIT]:
        path = os.path.join(directory, name)
        subject = subject_of(path)
        if subject is None or subject.pid != pid:
            continue
        if (subject.start_time_ticks, subject.boot_id) == (start_time_ticks, boot_id):
            return path
    return None


def subject_of(path: str) -> Subject | None:
    """What an archive's manifest says that it is about; None where it cannot be read."""
    with suppress(GpuwardenError, OSError):
        handle = open_archive(path)
        try:
            data = tar_format.find(handle, words.MANIFEST, words.MANIFEST_LIMIT_BYTES)
        finally:
            os.close(handle)
        if data is not None:
            return words.decode(data, words.Manifest).account.subject
    return None
