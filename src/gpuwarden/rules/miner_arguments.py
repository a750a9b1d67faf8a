"""Pools, accounts, algorithms and options as they stand among a command's arguments.

``read`` collects; ``miner_signs`` judges. Shapes: ``-o host:port``, ``--url=…``, ``-o=…``, glued
``-ostratum+tcp://…``, ``[1]`` prefixes and ``,`` or ``|`` lists, ``user@host:port``,
``host:ssl33333``, a host and ``--port`` apart, and JSON in one argument.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpuwarden.pattern import pattern
from gpuwarden.rules import miner_tables as tables

MAX_ARGUMENTS = 4096
MAX_FOUND = 16

PoolGrade = Literal["scheme", "domain", "pool", "soft"]
AccountGrade = Literal["shape", "wallet", "user", "worker"]

_ADDRESS = pattern(
    r"(?P<host>\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}))"
    r"(?::(?P<tls>ssl|tls|SSL|TLS)?\+?(?P<port>\d{1,5}))?(?:[/?#].{0,300})?",
    re.DOTALL,
)
_SCHEME_BEFORE = pattern(r"[A-Za-z0-9+]{1,24}$")
_INDEX = pattern(r"^\[\d{1,2}\]")
_LIST = pattern(r"[,;|]")
_IPV4 = pattern(r"\d{1,3}(?:\.\d{1,3}){3}")
_DOMAIN = pattern(r"(?:[A-Za-z0-9_-]{1,63}\.){1,10}[A-Za-z][A-Za-z0-9-]{1,62}")
_JSON_PAIR = pattern(r'"([A-Za-z_-]{1,32})"\s{0,8}:\s{0,8}(?:"([^"]{0,512})"|([0-9.]{1,12}|true))')
_IDS = pattern(r"[0-9]{1,6}(?::[0-9]{1,6})?")
_JSON_FLAGS = {
    "url": "--url", "pool": "--url", "pool_address": "--pool", "user": "--user",
    "wallet": "--wallet", "wallet_address": "--wallet", "login": "--user", "algo": "--algo",
    "coin": "--coin", "donate-level": "--donate-level", "rig-id": "--rig-id",
    "nicehash": "--nicehash",
}  # fmt: skip


class Pool(NamedTuple):
    """A pool's address: why it counts as one, and the option before it ("" if none)."""

    host: str
    port: int | None
    grade: PoolGrade
    flag: str
    scheme: str = ""


class Account(NamedTuple):
    """A wallet, user or worker as written: never shown unmasked."""

    value: str
    grade: AccountGrade
    flag: str


class Arguments(NamedTuple):
    """Everything mining-like that stands among a command's arguments."""

    pools: tuple[Pool, ...]
    accounts: tuple[Account, ...]
    algorithm: str | None
    algorithm_grade: Literal["sure", "ambiguous"] | None
    algorithm_flag: str
    miner_flags: tuple[str, ...]
    password: bool
    """A password option with a value is there."""


def is_pool_domain(host: str) -> bool:
    """Whether a host name lies in a public pool's registered domain; nothing is resolved."""
    labels = host.lower().rstrip(".").split(".")
    return any(".".join(labels[-n:]) in tables.POOL_DOMAINS for n in (2, 3) if len(labels) >= n)


def read(words: Sequence[str]) -> Arguments:
    """Collect from words as the kernel or a shell split them; later repeats add, never replace."""
    collector = _Collector()
    collector.take([word.strip().strip("\"'`") for word in words[:MAX_ARGUMENTS]])
    return collector.result()


class _Collector:
    def __init__(self) -> None:
        self.pools: dict[tuple[str, int | None], Pool] = {}
        self.accounts: list[Account] = []
        self.algorithm: tuple[str, Literal["sure", "ambiguous"], str] | None = None
        self.miner_flags: dict[str, None] = {}
        self.server: tuple[str, str] | None = None
        self.port: int | None = None
        self.password = False

    def result(self) -> Arguments:
        if self.server is not None and self.port is not None:
            host, flag = self.server
            self.add_pool(Pool(host, self.port, self.grade_of(host, "soft", ""), flag))
        value, grade, flag = self.algorithm or (None, None, "")
        return Arguments(
            tuple(self.pools.values()),
            tuple(self.accounts),
            value,
            grade,
            flag,
            tuple(self.miner_flags),
            self.password,
        )

    def take(self, words: list[str]) -> None:
        for index, word in enumerate(words):
            following = words[index + 1] if index + 1 < len(words) else ""
            if word.startswith("-") and len(word) > 1:
                self.option(word, following)
            elif "://" in word:
                self.addresses(word, "", "")
            elif word.startswith("{") and '"' in word:
                self.json(word)

    def option(self, word: str, following: str) -> None:
        flag, equals, value = word.partition("=")
        if "://" in flag:  # glued: -ostratum+tcp://host:port?a=b
            flag, equals, value = word, "", ""
        if flag.startswith("--"):
            flag = flag.lower()
        if not equals:
            value = "" if following.startswith("-") else following
        value = value.strip("\"'")
        folded = flag.lower()
        if folded in tables.MINER_FLAGS and len(self.miner_flags) < MAX_FOUND:
            self.miner_flags[folded] = None
        if value.startswith("{") and '"' in value and equals:
            self.json(value)
            return
        self.password |= flag in tables.PASSWORD_FLAGS and bool(value)
        known = self.valued(flag, value)
        if known or not flag.startswith("-") or flag.startswith("--") or len(flag) <= 2:
            if equals and not known and "://" in value:
                self.addresses(value, flag, "")
            return
        short, glued = flag[:2], word[2:]
        if "://" in glued:
            self.addresses(glued, short, tables.POOL_FLAGS.get(short, ""))
        elif short in {"-o", "-a"} or (short in {"-u", "-w"} and len(glued) >= 10):
            self.valued(short, glued, glued=True)

    def valued(self, flag: str, value: str, *, glued: bool = False) -> bool:
        """Whether the option is one that we know; its value is taken."""
        if flag in tables.POOL_FLAGS:
            self.addresses(value, flag, tables.POOL_FLAGS[flag])
        elif flag in tables.ACCOUNT_FLAGS:
            self.account(value, flag)
        elif flag in tables.ALGORITHM_FLAGS:
            self.take_algorithm(value, flag)
        elif flag in tables.COIN_FLAGS:
            coin = _INDEX.sub("", value).lower()
            if coin in tables.COINS:
                self.algorithm = self.algorithm or (coin, "ambiguous", flag)
            else:
                self.take_algorithm(value, flag)
        elif flag not in tables.PORT_FLAGS:
            return False
        elif value.isascii() and value.isdigit() and len(value) <= 5:
            self.port = int(value)
        return True

    def json(self, text: str) -> None:
        words: list[str] = []
        for match in _JSON_PAIR.finditer(text[:65_536]):
            flag = _JSON_FLAGS.get(match[1].lower())
            if flag is not None and len(words) < 64:
                # A list called "pools" is what miners' own configuration has.
                flag = "--pool" if flag == "--url" and '"pools"' in text else flag
                words += [flag, match[2] or match[3] or ""]
        self.take(words)

    def addresses(self, text: str, flag: str, kind: str) -> None:
        for part in _LIST.split(text[:4096])[:MAX_FOUND]:
            self.address(_INDEX.sub("", part.strip("\"' ")), flag, kind)

    def address(self, text: str, flag: str, kind: str) -> None:
        at = text.find("://")
        scheme = ""
        if at >= 0:
            before = _SCHEME_BEFORE.search(text[max(0, at - 24) : at])
            scheme = before[0].lower() if before else ""
            text = text[at + 3 :]
        mining = scheme in tables.POOL_SCHEMES or bool(tables.STRATUM_SCHEME.fullmatch(scheme))
        if not mining and at >= 0 and scheme not in tables.PLAIN_SCHEMES | tables.WEB_SCHEMES:
            return
        user, _, rest = text[:1024].rpartition("@")
        match = _ADDRESS.fullmatch(rest)
        if match is None:
            return
        host = match["host"]
        port = int(match["port"]) if match["port"] else None
        if port is not None and not 0 < port < 65536:
            return
        public = is_pool_domain(host)
        if mining:
            pool = Pool(host, port, "scheme", flag, f"{scheme}://")
        elif not kind or not _is_host(host):
            return
        elif port is None:
            if flag in {"-s", "--server", "-server", "--pool", "--url"}:
                self.server = (host, flag)
            return
        elif match["tls"]:
            pool = Pool(host, port, "domain" if public else "pool", flag)
        else:
            short = flag in {"-p", "-s", "-P"}
            weak = (
                scheme in tables.WEB_SCHEMES
                or kind == "soft"
                or not ("." in host or host[0] == "[")
            )
            grade: PoolGrade = "soft" if weak else "pool"
            if public and scheme not in tables.WEB_SCHEMES:
                grade = "domain"
            elif short and not public and _is_local(host):
                return
            pool = Pool(host, port, grade, flag, f"{scheme}://" if scheme else "")
        self.add_pool(pool)
        if user and (mining or kind):
            self.account(user.partition(":")[0] if user.count(":") == 1 else user, "")

    def grade_of(self, host: str, kind: PoolGrade, scheme: str) -> PoolGrade:
        return "domain" if is_pool_domain(host) and scheme not in tables.WEB_SCHEMES else kind

    def add_pool(self, pool: Pool) -> None:
        if len(self.pools) < MAX_FOUND:
            self.pools.setdefault((pool.host, pool.port), pool)

    def account(self, value: str, flag: str) -> None:
        value = _INDEX.sub("", value)
        if not value or len(self.accounts) >= MAX_FOUND or len(value) > 1024:
            return
        if _is_wallet(value):
            self.accounts.insert(0, Account(value, "shape", flag))
        elif not _is_data(value) and not _IDS.fullmatch(value):
            grade: AccountGrade = tables.ACCOUNT_FLAGS.get(flag, "user")
            if tables.CHAIN_ADDRESS.fullmatch(value):
                grade = "wallet"
            self.accounts.append(Account(value, grade, flag))

    def take_algorithm(self, value: str, flag: str) -> None:
        folded = _INDEX.sub("", value[:64]).lower()
        for piece in re.split(r"[+,&]", folded):
            name = re.sub(r"[_ -]", "", piece)
            if name in tables.ALGORITHMS or name.startswith(tables.ALGORITHM_PREFIXES):
                self.algorithm = (folded, "sure", flag)
                return
            if name in tables.AMBIGUOUS_ALGORITHMS and self.algorithm is None:
                self.algorithm = (folded, "ambiguous", flag)


def _is_host(host: str) -> bool:
    return bool(host.startswith("[") or _IPV4.fullmatch(host) or _DOMAIN.fullmatch(host)) or bool(
        re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{1,62}", host)
    )


def _is_local(host: str) -> bool:
    return host.startswith(("127.", "0.0.0.0")) or host == "localhost"  # noqa: S104


def _is_wallet(value: str) -> bool:
    if tables.WALLET.fullmatch(value):
        return True
    bare = re.split(r"[./+@]", value, maxsplit=1)[0]
    if tables.WALLET.fullmatch(bare):
        return True
    return ":" in bare and bool(tables.WALLET.fullmatch(bare.partition(":")[2]))


def _is_data(value: str) -> bool:
    """Whether a value is a file, script or URL rather than an account."""
    lower = value.lower()
    return (
        lower.startswith(("/", "./", "../", "~", "-"))
        or lower.endswith(tables.SCRIPT_ENDINGS)
        or "://" in lower
    )
