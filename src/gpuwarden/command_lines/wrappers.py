"""Commands freed of what starts them: sudo, nohup, screen, graftcp, ``sh -c``, ``docker run``…

Which options take a value comes from each program's manual page.
"""

from __future__ import annotations

from typing import NamedTuple

from gpuwarden.command_lines.shell_words import ASSIGNMENT, MAX_VALUE, basename

MAX_WRAPPERS = 16

SHELLS = frozenset("sh bash dash ash zsh ksh mksh busybox-sh rbash fish".split())

# wrapper → options that take a value of their own, and how many words stand before the program.
WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    name: (frozenset(options.split()), words)
    for name, options, words in (
        ("sudo", "-u -g -h -p -C -T -r -t -D -R --user --group --host --prompt --chdir", 0),
        ("doas", "-u -C", 0),
        ("env", "-u -C --unset --chdir", 0),
        ("nohup", "", 0),
        ("setsid", "", 0),
        ("exec", "-a", 0),
        ("command", "", 0),
        ("builtin", "", 0),
        ("time", "-f -o", 0),
        ("unbuffer", "", 0),
        ("graftcp", "-a -p -f -b -w", 0),
        ("mgraftcp", "--socks5 --http_proxy --select_proxy_mode", 0),
        ("proxychains", "-f", 0),
        ("proxychains4", "-f", 0),
        ("torsocks", "-a -P -u -p", 0),
        ("torify", "", 0),
        ("tsocks", "", 0),
        ("nice", "-n --adjustment", 0),
        ("ionice", "-c -n --class --classdata", 0),
        ("chrt", "-T -P -D", 1),
        ("taskset", "", 1),
        ("stdbuf", "-i -o -e", 0),
        ("timeout", "-k -s --kill-after --signal", 1),
        ("watch", "-n --interval", 0),
        ("flock", "-w -E --timeout", 1),
        ("chroot", "", 1),
        ("unshare", "-S -G -R -w", 0),
        ("nsenter", "-t -S -G --target", 0),
        ("numactl", "-N -m -C -i -p --cpunodebind --membind --physcpubind --interleave", 0),
        ("cpulimit", "-l -P --limit", 0),
        ("systemd-run", "-u -p -E -M -H --unit --property --setenv --slice --uid --gid", 0),
        ("runuser", "-u -g -G -s", 0),
        ("strace", "-o -e -s -E -u -a -P", 0),
        ("ltrace", "-o -e -s -n -u", 0),
        ("dumb-init", "", 0),
        ("tini", "-p -e", 0),
        ("catatonit", "", 0),
        ("gosu", "", 1),
        ("su-exec", "", 1),
        ("xargs", "-n -P -I -d -a -L -s -E", 0),
        ("firejail", "", 0),
        # Functions of init scripts (LSB's, Red Hat's), and a program of the second's name.
        ("start_daemon", "-n -p", 0),
        ("daemon", "-n -p -u --name --user --pidfile --check", 0),
        ("wine", "", 0),
        ("wine64", "", 0),
        ("busybox", "", 0),
        ("box64", "", 0),
        ("srun", "-p -A -t -n -c -N -J -w -G -o -e -D -x -C -q -d -L --gres --partition", 0),
        ("mpirun", "-np -n -c -H -host -hostfile -x --host --hostfile", 0),
        ("mpiexec", "-np -n -f -H -host -hosts -hostfile", 0),
        ("screen", "-c -h -p -T -e -s -S -t", 0),
    )
}
_CONTAINER_TOOLS = frozenset({"docker", "podman", "nerdctl"})
_CONTAINER_SWITCHES = frozenset(
    "-d -i -t -it -ti -dit -itd -td -P -q --rm --detach --interactive --tty --privileged --init "
    "--read-only --no-healthcheck --oom-kill-disable --publish-all --quiet --replace".split()
)


class Unwrapped(NamedTuple):
    """A command behind its wrappers: either ``words``, or ``line`` for a shell to split."""

    words: tuple[str, ...]
    wrapped_by: tuple[str, ...] = ()
    line: str | None = None
    assignments: tuple[tuple[str, str], ...] = ()


def unwrap(words: tuple[str, ...]) -> Unwrapped:
    """The command that sudo, nohup, screen, graftcp, ``sh -c``, ``docker run``… would start."""
    wrapped_by: list[str] = []
    assignments: list[tuple[str, str]] = []
    for _ in range(MAX_WRAPPERS):
        if not words:
            break
        name = basename(words[0]).lower()
        line: str | None = None
        rest: tuple[str, ...] = ()
        if name in SHELLS or (name == "su" or (name == "runuser" and "-c" in words)):
            line = _shell_line(words, login=name in {"su", "runuser"})
        elif name == "eval":
            line = " ".join(words[1:])
        elif name == "tmux":
            rest = _after_tmux(words)
        elif name == "start-stop-daemon":
            rest = _after_start_stop_daemon(words)
        elif name in _CONTAINER_TOOLS:
            rest = _after_container_tool(words, assignments)
        elif name in {"kubectl", "oc", "apptainer", "singularity", "crictl"}:
            rest = words[words.index("--") + 1 :] if "--" in words else ()
        elif name.startswith(("ld-linux", "ld-musl")):
            rest = _after_options(words, frozenset({"--library-path", "--argv0", "--preload"}), 0)
        elif name in WRAPPERS:
            rest = _after_options(words, *WRAPPERS[name])
        if line is not None:
            return Unwrapped((), (*wrapped_by, name), line, tuple(assignments))
        while rest and ASSIGNMENT.match(rest[0]) and name in {"sudo", "env", "doas"}:
            variable, _, value = rest[0].partition("=")
            assignments.append((variable, value[:MAX_VALUE]))
            rest = rest[1:]
        if not rest:
            break
        wrapped_by.append(name)
        if len(rest) == 1 and " " in rest[0].strip() and name in {"tmux", "watch", "screen"}:
            return Unwrapped((), tuple(wrapped_by), rest[0], tuple(assignments))
        words = rest
    return Unwrapped(words, tuple(wrapped_by), None, tuple(assignments))


def _shell_line(words: tuple[str, ...], *, login: bool) -> str | None:
    for index, word in enumerate(words[1:], start=1):
        if word.startswith("-") and not word.startswith("--") and "c" in word and len(word) <= 6:
            return words[index + 1] if index + 1 < len(words) else None
        if not word.startswith("-") and not login:
            return None
    return None


def _after_options(
    words: tuple[str, ...], valued: frozenset[str], positionals: int
) -> tuple[str, ...]:
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        # Combined short options (screen -dmLS NAME) take a value if their last one does.
        last = "-" + word[-1]
        takes = word in valued or (
            not word.startswith("--") and word[1:].isalpha() and len(word) <= 5 and last in valued
        )
        index += 2 if takes else 1
    return words[index + positionals :]


def _after_tmux(words: tuple[str, ...]) -> tuple[str, ...]:
    for index, word in enumerate(words[1:], start=1):
        if word in {"new-session", "new", "new-window", "neww", "split-window", "respawn-pane"}:
            return _after_options(words[index:], frozenset("-s -n -t -c -x -y -F -e".split()), 0)
        if word in {"send-keys", "send"}:
            after = _after_options(words[index:], frozenset({"-t", "-N"}), 0)
            return tuple(key for key in after if key not in {"Enter", "C-m", "ENTER"})
    return ()


def _after_start_stop_daemon(words: tuple[str, ...]) -> tuple[str, ...]:
    tail = words[words.index("--") + 1 :] if "--" in words else ()
    for index, word in enumerate(words):
        if word in {"--startas", "-a", "--exec", "-x"} and index + 1 < len(words):
            return (words[index + 1], *tail)
    return ()


def _after_container_tool(
    words: tuple[str, ...], assignments: list[tuple[str, str]]
) -> tuple[str, ...]:
    """``run IMAGE ARGS`` as if the image were the program; ``exec NAME CMD`` as CMD."""
    verb = next((i for i, word in enumerate(words) if word in {"run", "exec", "create"}), 0)
    if not verb:
        return ()
    index = verb + 1
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        if word in {"-e", "--env"} and index + 1 < len(words) and "=" in words[index + 1]:
            variable, _, value = words[index + 1].partition("=")
            assignments.append((variable, value[:MAX_VALUE]))
        index += 1 if "=" in word or word in _CONTAINER_SWITCHES else 2
    if words[verb] == "exec":
        return words[index + 1 :]
    if index >= len(words):
        return ()
    image = words[index].partition("@")[0]
    slash = image.rfind("/")
    return (image[: slash + 1] + image[slash + 1 :].partition(":")[0], *words[index + 1 :])
