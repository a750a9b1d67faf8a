"""Names of users and groups: the host's own files first, a name service only with a deadline."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from gpuwarden.errors import GpuwardenError, Unavailable
from gpuwarden.host import Host
from gpuwarden.sensors.process.fan_out import in_child

# passwd(5): name:password:uid:gid:gecos:home:shell; group(5): name:password:gid:member,member
_PASSWD_LIMIT_BYTES = 8 << 20
_NAME_LIMIT = 256
_LOOKUP_SECONDS = 1.0
_LOOKUPS_LIMIT = 512
_ID_LIMIT = (1 << 32) - 1

Names = tuple[dict[int, str], dict[int, str]]


class UserNames(Struct):
    """uid → name, gid → name, gid → members' uids; grows by ``look_up``."""

    users: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    members: dict[int, set[int]] = field(default_factory=dict)
    from_files_only: bool = False
    """For a caller that must not wait for a name service."""
    failure: str | None = None
    """Why ids in none of the files have no name, if they could not be looked up."""


def _number(text: bytes) -> int | None:
    if not text.isdigit() or len(text) > 10:
        return None
    number = int(text)
    return number if number <= _ID_LIMIT else None


def _name(text: bytes) -> str:
    return text[:_NAME_LIMIT].decode("utf-8", "backslashreplace")


def parse_passwd(data: bytes) -> list[tuple[str, int, int]]:
    """(name, uid, gid) of each well-formed line; others are skipped. Source: passwd(5)."""
    found = []
    for line in data.split(b"\n"):
        fields = line.split(b":")
        if len(fields) < 4 or not fields[0] or fields[0][:1] in b"#+-":
            continue
        uid, gid = _number(fields[2]), _number(fields[3])
        if uid is not None and gid is not None:
            found.append((_name(fields[0]), uid, gid))
    return found


def parse_group(data: bytes) -> list[tuple[str, int, tuple[str, ...]]]:
    """(name, gid, members) of each well-formed line; others are skipped. Source: group(5)."""
    found = []
    for line in data.split(b"\n"):
        fields = line.split(b":")
        if len(fields) < 3 or not fields[0] or fields[0][:1] in b"#+-":
            continue
        gid = _number(fields[2])
        if gid is not None:
            members = fields[3].split(b",") if len(fields) > 3 else []
            found.append((_name(fields[0]), gid, tuple(_name(m) for m in members if m)))
    return found


def read_names(host: Host) -> UserNames:
    """The names in the host's /etc/passwd and /etc/group; the first line of an id wins."""
    names = UserNames()
    uids: dict[str, int] = {}
    for name, uid, gid in parse_passwd(_file(host, "/etc/passwd")):
        names.users.setdefault(uid, name)
        uids.setdefault(name, uid)
        names.members.setdefault(gid, set()).add(uid)
    for name, gid, members in parse_group(_file(host, "/etc/group")):
        names.groups.setdefault(gid, name)
        names.members.setdefault(gid, set()).update(uids[m] for m in members if m in uids)
    return names


def _file(host: Host, path: str) -> bytes:
    try:
        return host.read_bytes(path, _PASSWD_LIMIT_BYTES)
    except GpuwardenError:
        return b""


def look_up(host: Host, names: UserNames, uids: Iterable[int], gids: Iterable[int]) -> None:
    """Asks the name service (LDAP, SSSD) for ids that the files lack: all in one child, for 1 s.

    Done only on the machine we run on. Sets ``names.failure`` when there was no answer.
    """
    users = [uid for uid in dict.fromkeys(uids) if uid not in names.users][:_LOOKUPS_LIMIT]
    groups = [gid for gid in dict.fromkeys(gids) if gid not in names.groups][:_LOOKUPS_LIMIT]
    if not users and not groups:
        return
    if names.from_files_only:
        names.failure = "not in /etc/passwd or /etc/group, and no name service was asked yet"
        return
    if not (host.is_local and host.is_live):
        names.failure = "not in the host's /etc/passwd or /etc/group"
        return
    try:
        answer = in_child(lambda: _ask(users, groups), _LOOKUP_SECONDS)
        found_users, found_groups = msgspec.msgpack.decode(answer, type=Names)
    except Unavailable as error:
        names.failure = f"the name service gave {error}"
        return
    except msgspec.MsgspecError:
        names.failure = "the name service's answer could not be read"
        return
    names.users.update(found_users)
    names.groups.update(found_groups)


def _ask(users: list[int], groups: list[int]) -> bytes:
    import grp
    import pwd

    found: Names = ({}, {})
    for uid in users:
        try:
            found[0][uid] = _name(pwd.getpwuid(uid).pw_name.encode("utf-8", "surrogateescape"))
        except (KeyError, OSError, OverflowError):
            continue
    for gid in groups:
        try:
            found[1][gid] = _name(grp.getgrgid(gid).gr_name.encode("utf-8", "surrogateescape"))
        except (KeyError, OSError, OverflowError):
            continue
    return msgspec.msgpack.encode(found)
