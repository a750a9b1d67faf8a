"""What looks like a secret is replaced by its length; everything else stays as it is.

Found by the name beside it (a variable, an option, a key of JSON) and by shapes that tokens and
keys are written in. A wallet, a pool and its user are evidence and stay. Time grows with the
length of the text alone, whatever is in it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from gpuwarden.pattern import pattern
from gpuwarden.rules.miner_tables import WALLET

MASK = "MASKED-{}"
"""The number of characters that stood there; plain characters, so that what reads it still can."""
DEPTH_LIMIT = 64

# A name is taken apart at these, and where lower case turns to upper.
_WORDS = pattern(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])|[a-z]+|[0-9]+")
_LAST_WORDS = frozenset(
    "token secret secrets password passwd pass passphrase pwd key apikey credential credentials "
    "creds auth authorization jwt cookie dsn pat sas bearer pin otp pw passcode".split()
)
_ANYWHERE = (
    "password passwd passphrase secret apikey accesskey privatekey secretkey credential "
    "authtoken accesstoken refreshtoken sessiontoken bearertoken signingkey encryptionkey "
    "connectionstring clientkey masterkey"
).split()
_NAMES_OF_NO_SECRET = frozenset({"PWD", "OLDPWD", "pwd", "HF_HUB_DISABLE_IMPLICIT_TOKEN"})
# Variables whose values are known to be settings: only what surely is a secret is masked there.
_SETTINGS = pattern(
    r"(?:CUDA|NVIDIA|SLURM|NCCL|LD|HIP|ROCR|ROCM|HSA|GPU|OMP|MKL|KUBERNETES|PYTHON|LC|XDG|PBS|LSB"
    r"|OMPI|PMI|PMIX|UCX|TF|XLA|VLLM|TRITON|DCGM|NVML|MIG|XMRIG|MINER|POOL|WALLET|ETH|CONDA)_.*"
    r"|(?:WALLET|PATH|HOME|PWD|OLDPWD|USER|LOGNAME|SHELL|TERM|LANG|HOSTNAME|container"
    r"|INVOCATION_ID|JOURNAL_STREAM|SSH_CONNECTION|SSH_CLIENT|SSH_TTY|SUDO_\w+|TMPDIR|MAIL|SHLVL"
    r"|_|JOB_ID|WORLD_SIZE|RANK|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV|DISPLAY)",
    re.DOTALL,
)

# user:password@ behind a scheme: up to the last @ before a blank or the path.
_USERINFO = pattern(r"(?<=://)([^\s/@:?#]{0,512}):([^\s/?#]{1,1024})@")
_TOKENS = pattern(
    r"(?<![A-Za-z0-9])(?:"
    r"A(?:KIA|SIA)[0-9A-Z]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{20,255}|github_pat_[A-Za-z0-9_]{20,255}|glpat-[\w-]{16,255}"
    r"|hf_[A-Za-z0-9]{20,255}|sk-[\w-]{20,255}|nvapi-[\w-]{20,255}|xox[abeoprs]-[\w-]{10,255}"
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,1024}|npm_[A-Za-z0-9]{20,255}|pypi-[\w-]{20,1024}"
    r"|dop_v1_[0-9a-f]{20,255}|SG\.[\w-]{10,255}\.[\w-]{10,255}"
    r"|eyJ[\w-]{8,4096}\.[\w-]{2,8192}(?:\.[\w-]{0,4096})?"
    r")"
)
_PEM = pattern(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?!MASKED-)([^-]{1,65536})")
_BEARER = pattern(r"(?i)(?<![a-z])(?:bearer|basic)[ \t]{1,4}([\w.~+/=-]{6,4096})")
# name=value and "name": "value" in any text; a name is only looked for where one begins.
_NAMED = pattern(r"(?<![\w.-])([\w.-]{1,128}+)([\"']?[ \t]{0,4}+[=:][ \t]{0,4}+)")
_QUOTED = {'"': pattern(r'"((?:[^"\\\n]|\\.){0,8192})'), "'": pattern(r"'([^'\n]{0,8192})")}
_BARE = pattern(r"[^\s\"'&,;|)}\]]{1,8192}")
_OPTION = pattern(r"--?([A-Za-z][\w.-]{0,127})")
_RANDOM = pattern(r"[A-Za-z0-9+/=_.~-]{20,512}")
_HARMLESS_NAME = pattern(
    r"(?i).*(?:sha|sha256|digest|hash|commit|rev|revision|version|uuid|id|dir)"
)
_RANDOM_BITS = 3.2
_NUMBER = pattern(r"[+-]?[0-9.]{1,9}|true|false|yes|no|on|off|none|null", re.IGNORECASE)
_HOOK = pattern(
    r"((?:webhook|alertmanager|falco):\s{0,4}https?://)([^\s/\"']{1,512})(/[^\s\"']{1,4096})"
)


def masked(text: str) -> str:
    """What stands in the place of ``text``; what is masked already stays."""
    return text if _is_mask(text) else MASK.format(len(text))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what is called so is a secret: ``HF_TOKEN``, ``--api-key``, ``dbPassword``."""
    if name in _NAMES_OF_NO_SECRET:
        return False
    words = [word.lower() for word in _WORDS.findall(name[:256])]
    joined = "".join(words)
    last = next((word for word in reversed(words) if not word.isdigit()), "")
    ends_so = joined.endswith(("pass", "token", "apikey"))
    return last in _LAST_WORDS or ends_so or any(part in joined for part in _ANYWHERE)


def mask_text(text: str) -> str:
    """A text with the secrets in it masked: in URLs, by their shape, and behind their names."""
    if "://" in text:
        text = _USERINFO.sub(lambda found: f"{found[1]}:{masked(found[2])}@", text)
    if "PRIVATE KEY" in text:
        text = _PEM.sub(lambda found: found[0].replace(found[1], masked(found[1])), text)
    text = _BEARER.sub(lambda found: found[0].replace(found[1], masked(found[1])), text)
    text = _TOKENS.sub(lambda found: masked(found[0]), text)
    return _mask_named(text)


def _mask_named(text: str) -> str:
    pieces: list[str] = []
    done = at = 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end()
        if not is_secret_name(found[1]):
            continue
        quoted = _QUOTED.get(text[at : at + 1])
        value = quoted.match(text, at) if quoted is not None else _BARE.match(text, at)
        if value is None:
            continue
        start = value.start(1) if quoted is not None else value.start()
        secret = text[start : value.end()]
        if not secret or _NUMBER.fullmatch(secret) or _is_mask(secret):
            continue
        pieces += [text[done:start], masked(secret)]
        done = at = value.end()
    return "".join([*pieces, text[done:]]) if pieces else text


def _is_mask(text: str) -> bool:
    return text.startswith("MASKED-") and text[7:].isdigit()


def mask_variable(name: str, value: str) -> str:
    """The value of a variable as it may be kept."""
    if is_secret_name(name) and value:
        return masked(value)
    kept = mask_text(value)
    if kept is value and not _SETTINGS.fullmatch(name) and _is_random(name, value):
        return masked(value)
    return kept


def _is_random(name: str, value: str) -> bool:
    """Whether a value is one word without sense, as keys are; wallets are none."""
    if not _RANDOM.fullmatch(value) or value.startswith(("/", "./", "../", "0x")):
        return False
    if _HARMLESS_NAME.fullmatch(name) or WALLET.fullmatch(value):
        return False
    if not (any(map(str.isdigit, value)) and any(map(str.isalpha, value))):
        return False
    # Paths, versions and host names have parts that are words.
    if max(map(len, re.split(r"[/._~-]", value))) < 16:
        return False
    counts = Counter(value).values()
    bits = -sum(count / len(value) * math.log2(count / len(value)) for count in counts)
    return bits >= _RANDOM_BITS


def mask_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    """Arguments with secrets masked: ``--token X``, ``--token=X``, ``TOKEN=X``, URLs, headers."""
    kept: list[str] = []
    is_secret = False
    for number, word in enumerate(argv):
        option = _OPTION.fullmatch(word) if number else None
        if is_secret and word and not (option and len(word) < 40) and not _NUMBER.fullmatch(word):
            kept.append(masked(word))
            is_secret = False
            continue
        is_secret = option is not None and is_secret_name(option[1])
        kept.append(mask_text(word))
    return tuple(kept)


def mask_entry(entry: str) -> str:
    """``NAME=value`` as ``mask_variable`` has it; any other text as ``mask_text``."""
    name, equals, value = entry.partition("=")
    if equals and name.isidentifier():
        return f"{name}={mask_variable(name, value)}"
    return mask_text(entry)


def mask_json(document: Any, text: Callable[[str], str] = mask_entry, depth: int = 0) -> Any:
    """A decoded JSON document with secrets masked, by the names of its keys and in its texts."""
    if isinstance(document, str):
        return text(document)
    if depth > DEPTH_LIMIT:
        return masked("") if document else document
    if isinstance(document, dict):
        return {
            name: masked(value)
            if isinstance(value, str) and value and is_secret_name(str(name))
            else mask_json(value, text, depth + 1)
            for name, value in document.items()
        }
    if isinstance(document, list | tuple):
        items = list(document)
        if items and all(isinstance(one, str) for one in items):
            if not any("=" in one.partition(" ")[0] and one[:1] != "-" for one in items):
                return list(mask_arguments(items))
            return [text(one) for one in items]
        return [mask_json(one, text, depth + 1) for one in items]
    return document


def mask_sink(spec: str) -> str:
    """A sink without what lets others post there: all of a URL behind its host."""
    if "://" not in spec:
        return spec
    begin, _, rest = mask_text(spec).partition("://")
    host, slash, path = rest.partition("/")
    return f"{begin}://{host}{slash}{masked(path) if path else ''}"


def mask_policy(text: str) -> str:
    """The text of a policy file, its sinks as ``mask_sink`` has them."""
    kept = _HOOK.sub(lambda found: f"{found[1]}{found[2]}/{masked(found[3][1:])}", text)
    return mask_text(kept)
