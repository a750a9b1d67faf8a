"""Shell-like text split into the commands that it would run.

A reading of cron lines, ExecStart values, supervisord commands and ``sh -c`` strings that is good
enough to find programs and arguments; it runs nothing. Bounds: 128 KiB of text, 512 commands, 4
levels of substitution, linear time. Grammar: POSIX shell, systemd.service(5), crontab(5).
"""

from __future__ import annotations

import binascii
from typing import NamedTuple

from gpuwarden.pattern import pattern

MAX_TEXT = 131_072
MAX_COMMANDS = 512
MAX_DEPTH = 4
MAX_VALUE = 4_096

_ORDINARY = pattern(r"""[^\s'"\\;&|<>()$`#]+""")
_NAME = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
ASSIGNMENT = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}=")
_ESCAPED_BYTE = pattern(r"\\x([0-9a-fA-F]{2})")
_SCHEDULE = pattern(
    r"\s{0,16}(?:@(?:reboot|yearly|annually|monthly|weekly|daily|midnight|hourly)"
    r"|(?:[0-9*][0-9*,/-]{0,40}\s{1,16}){3}[0-9*a-zA-Z][0-9a-zA-Z*,/-]{0,40}\s{1,16}"
    r"[0-9*a-zA-Z][0-9a-zA-Z*,/-]{0,40})\s{1,16}(?=\S)"
)
_SETTING = pattern(r"\s{0,16}(?:Exec[A-Z][A-Za-z]{2,12}|command|CMD|ENTRYPOINT)\s{0,4}[= ]\s{0,4}")
_EXEC_MARKS = "-@:+!|"

CRON_USERS = frozenset(
    "root daemon nobody www-data apache nginx postgres mysql redis oracle ubuntu debian admin "
    "hadoop git jenkins tomcat centos ec2-user".split()
)
KEYWORDS = frozenset("then do else elif if while until ! { } fi done time".split())


class Command(NamedTuple):
    """One simple command: words, the assignments before it, its input, where its output goes."""

    words: tuple[str, ...]
    assignments: tuple[tuple[str, str], ...] = ()
    stdin: str | None = None
    """Text given by a here-string."""
    feeds_next: bool = False
    """Its output is piped into the command after it."""


def basename(path: str) -> str:
    """The last part of a POSIX or Windows path, without a login shell's leading dash."""
    name = path.rstrip("/\\")
    name = name[max(name.rfind("/"), name.rfind("\\")) + 1 :]
    return name[1:] if name.startswith("-") and len(name) > 1 else name


def decoded_bytes(text: str) -> str | None:
    """Printable text behind base64 (also URL-safe, unpadded) or hexadecimal digits, or None."""
    packed = text.strip().rstrip("=")
    if not 12 <= len(packed) <= MAX_TEXT:
        return None
    raw: bytes | None = None
    if len(packed) % 2 == 0:
        try:
            raw = bytes.fromhex(packed[2:] if packed[:2].lower() in {"0x", "\\x"} else packed)
        except ValueError:
            raw = None
    if raw is None:
        packed = packed.replace("-", "+").replace("_", "/")
        try:
            raw = binascii.a2b_base64(packed + "=" * (-len(packed) % 4), strict_mode=True)
        except (binascii.Error, ValueError):
            return None
    if raw[1:2] == b"\0" and raw.count(0) * 2 == len(raw):  # UTF-16, as PowerShell encodes
        raw = raw[::2]
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return decoded if all(c.isprintable() or c in "\n\r\t" for c in decoded) else None


def unescaped(text: str) -> str:
    r"""Text with ``\xNN`` replaced by the characters meant."""
    if "\\x" not in text:
        return text
    return _ESCAPED_BYTE.sub(lambda match: chr(int(match[1], 16)), text)


def without_schedule(text: str) -> str:
    """A crontab, unit-file or supervisord line reduced to the command it runs."""
    text = text[:MAX_TEXT]
    schedule = _SCHEDULE.match(text)
    if schedule:
        text = text[schedule.end() :]
        user, _, rest = text.partition(" ")
        return rest if user in CRON_USERS and rest.strip() else text
    setting = _SETTING.match(text)
    if setting and (text[setting.end() - 1 : setting.end()] == "=" or "=" in setting[0]):
        return text[setting.end() :].lstrip(_EXEC_MARKS)
    return text


def split_commands(text: str) -> tuple[Command, ...]:
    """The simple commands of a line in the order written, those in substitutions included."""
    return tuple(_Splitter(text[:MAX_TEXT], {}, 0, [MAX_TEXT]).run())


class _Splitter:
    def __init__(self, text: str, variables: dict[str, str], depth: int, budget: list[int]) -> None:
        self.text = text
        self.budget = budget
        """Characters that substitutions may still add, shared by all levels: no text bombs."""
        self.unclosed: set[str] = set()
        self.variables = variables
        self.depth = depth
        self.commands: list[Command] = []
        self.words: list[str] = []
        self.assignments: list[tuple[str, str]] = []
        self.stdin: str | None = None
        self.parts: list[str] = []
        self.started = False
        self.quoted = False
        self.next_word = "word"
        self.substitutes = depth < MAX_DEPTH

    def run(self) -> list[Command]:
        text, end, at = self.text, len(self.text), 0
        while at < end and len(self.commands) < MAX_COMMANDS:
            ordinary = _ORDINARY.match(text, at)
            if ordinary:
                self.add(ordinary[0])
                at = ordinary.end()
                continue
            char = text[at]
            if char in " \t\r\v\f":
                self.end_word()
                at += 1
            elif char in "'\"":
                at = self.quote(char, at)
            elif char == "\\":
                if text[at + 1 : at + 2] == "x":
                    self.add("\\")
                    at += 1
                else:
                    self.add(text[at + 1 : at + 2].replace("\n", ""))
                    at += 2
            elif char in "$`":
                at = self.dollar(at)
            elif char == "#":
                if self.started:
                    self.add(char)
                    at += 1
                else:
                    newline = text.find("\n", at)
                    at = end if newline < 0 else newline
            elif char in "<>" or text.startswith("&>", at):
                at = self.redirect(at)
            elif char in ";&|\n()":
                pair = text[at : at + 2]
                self.end_command(feeds_next=char == "|" and pair != "||")
                at += 2 if pair in {"&&", "||", "|&", ";;"} else 1
            else:
                self.end_word()
                at += 1
        self.end_command(feeds_next=False)
        return self.commands

    def add(self, part: str) -> None:
        self.parts.append(part)
        self.started = True

    def quote(self, mark: str, at: int) -> int:
        close = -1 if mark in self.unclosed else self.text.find(mark, at + 1)
        if mark == '"':
            while close > 0 and self.text[close - 1] == "\\":
                close = self.text.find(mark, close + 1)
        if close < 0:
            self.unclosed.add(mark)
            return at + 1
        inner = self.text[at + 1 : close]
        if mark == '"':
            inner = inner.replace('\\"', '"').replace("\\\\", "\\")
            if "$" in inner or "`" in inner:
                inner = self.expanded(inner)
        self.quoted = True
        self.add(inner)
        return close + 1

    def expanded(self, inner: str) -> str:
        parts: list[str] = []
        at = 0
        while at < len(inner):
            mark = min(
                (i for i in (inner.find("$", at), inner.find("`", at)) if i >= 0), default=-1
            )
            if mark < 0:
                break
            parts.append(inner[at:mark])
            value, at = self.value_at(inner, mark)
            parts.append(value)
            if len(parts) > 256:
                break
        return "".join(parts) + inner[at:]

    def dollar(self, at: int) -> int:
        if self.text.startswith("$'", at):
            return self.quote("'", at + 1)
        value, after = self.value_at(self.text, at)
        pieces = value.split()
        if len(pieces) > 1:  # an unquoted substitution falls apart into words
            for piece in pieces[:-1]:
                self.add(piece)
                self.end_word()
            value = pieces[-1]
        self.add(value)
        return after

    def value_at(self, text: str, at: int) -> tuple[str, int]:
        """What a ``$…`` or backtick at ``at`` stands for, and where it ends."""
        if text[at] == "`" or text.startswith("$(", at):
            start = at + (1 if text[at] == "`" else 2)
            close = -1
            if self.substitutes:
                close = text.find("`", start) if text[at] == "`" else _closing(text, start)
                self.substitutes = close >= 0
            if close < 0:
                return text[at], at + 1
            inner = _Splitter(text[start:close], self.variables, self.depth + 1, self.budget).run()
            self.commands += inner[: MAX_COMMANDS - len(self.commands)]
            return self.afforded(output_of(tuple(inner)) or "", ""), close + 1
        braced = text.startswith("${", at)
        name = _NAME.match(text, at + (2 if braced else 1))
        if name is None:
            return text[at], at + 1
        after = name.end()
        fallback = text[at:after]
        if braced:
            close = text.find("}", after, after + MAX_VALUE)
            if close < 0:
                return text[at], at + 1
            if text.startswith((":-", ":="), after):
                fallback = text[after + 2 : close]
            after = close + 1
        return self.afforded(self.variables.get(name[0], fallback), fallback), after

    def afforded(self, value: str, otherwise: str) -> str:
        if len(value) > self.budget[0]:
            return otherwise
        self.budget[0] -= len(value)
        return value

    def redirect(self, at: int) -> int:
        if "".join(self.parts).isdigit() and not self.quoted:
            self.parts, self.started = [], False
        self.end_word()
        text = self.text
        if text.startswith("<<<", at):
            self.next_word = "stdin"
            return at + 3
        if text.startswith(("<(", ">("), at):
            self.end_command(feeds_next=False)
            return at + 2
        at += 1
        while at < len(text) and text[at] in "<>&|":
            at += 1
        self.next_word = "drop"
        return at

    def end_word(self) -> None:
        if not self.started:
            return
        word, role = "".join(self.parts), self.next_word
        quoted = self.quoted
        self.parts, self.started, self.quoted, self.next_word = [], False, False, "word"
        if role == "drop":
            return
        if role == "stdin":
            self.stdin = word
        elif not self.words and ASSIGNMENT.match(word):
            name, _, value = word.partition("=")
            self.assignments.append((name, value[:MAX_VALUE]))
            if len(self.variables) < 64:
                self.variables[name] = value[:MAX_VALUE]
        elif self.words or quoted or word not in KEYWORDS:
            self.words.append(word)

    def end_command(self, *, feeds_next: bool) -> None:
        self.end_word()
        if self.words or self.assignments or self.stdin is not None:
            self.commands.append(
                Command(tuple(self.words), tuple(self.assignments), self.stdin, feeds_next)
            )
        self.words, self.assignments, self.stdin, self.next_word = [], [], None, "word"


def _closing(text: str, start: int) -> int:
    depth = 1
    for match in pattern(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return -1


def output_of(commands: tuple[Command, ...]) -> str | None:
    """What a pipeline of echo, printf and decoders prints, or None if it is any other."""
    text: str | None = None
    for command in commands:
        text = output_of_one(command, text)
    return text


def output_of_one(command: Command, stdin: str | None) -> str | None:
    """What one echo, printf, cat, ``base64 -d``, ``xxd -r`` or ``rev`` prints, given its input."""
    if not command.words:
        return None
    program, arguments = basename(command.words[0]).lower(), command.words[1:]
    source = command.stdin if command.stdin is not None else stdin
    if program in {"echo", "printf"}:
        kept = [
            word for word in arguments if word not in {"-n", "-e", "-ne", "-en", "%s", "%b", "--"}
        ]
        return unescaped(" ".join(kept).replace("\\n", "\n"))
    if source is None:
        return None
    if program in {"cat", "tee"} and not arguments:
        return source
    if program == "rev":
        return source[::-1]
    decodes = {"base64", "openssl", "xxd", "base32"}
    flags = {"-d", "--decode", "-D", "-r", "-di", "-rp", "-r-p"}
    if program in decodes and any(word in flags for word in arguments):
        return decoded_bytes("".join(source.split()))
    return None
