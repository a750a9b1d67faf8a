"""Programs that everybody runs for everything: to have one of them in common says nothing."""

from __future__ import annotations

from gpuwarden.command_lines.interpreters import INTERPRETERS
from gpuwarden.command_lines.program_places import is_packaged
from gpuwarden.command_lines.shell_words import basename
from gpuwarden.model import Executable

TOOLS = frozenset(
    # coreutils and findutils
    "[ arch b2sum base32 base64 basename basenc cat chcon chgrp chmod chown chroot cksum comm cp "
    "csplit cut date dd df dir dircolors dirname du echo env expand expr factor false find fmt "
    "fold groups head hostid id install join link ln locate logname ls md5sum mkdir mkfifo mknod "
    "mktemp mv nice nl nohup nproc numfmt od paste pathchk pinky pr printenv printf ptx pwd "
    "readlink realpath rm rmdir runcon seq sha1sum sha224sum sha256sum sha384sum sha512sum shred "
    "shuf sleep sort split stat stdbuf stty sum sync tac tail tee test timeout touch tr true "
    "truncate tsort tty uname unexpand uniq unlink users vdir wc who whoami xargs yes "
    # util-linux, procps, shadow, text, archives, network, editors, schedulers
    "awk gawk mawk nawk sed grep egrep fgrep diff cmp patch ed less more vi vim vim.basic nano "
    "tar gzip gunzip bzip2 xz zstd unzip zip cpio ar dmesg fallocate flock getopt hexdump ionice "
    "chrt taskset kill killall pkill pgrep pidof lsblk logger mount umount nsenter unshare prlimit "
    "rev script setsid setpriv su runuser sudo doas column mountpoint renice free ps top pmap "
    "pwdx slabtop sysctl uptime vmstat w watch hostname ip ss ping curl wget nc ncat netcat socat "
    "ssh scp sftp rsync screen tmux dialog run-parts start-stop-daemon ionice numactl strace "
    "ltrace gdb make git xxd openssl busybox toybox coreutils systemd-run systemctl systemd-cat "
    "dbus-run-session dbus-launch unbuffer expect bc dc jq at crontab "
    # containers, clusters, environments: what they run is among their arguments
    "docker podman nerdctl crictl ctr kubectl apptainer singularity srun sbatch mpirun mpiexec "
    "orterun prterun uv pipx conda mamba poetry npm npx".split()
)


def is_interpreter(name: str) -> bool:
    """Whether a program of that name runs what it is given."""
    return INTERPRETERS.fullmatch(basename(name)) is not None


def is_general(exe: Executable) -> bool:
    """Whether a binary is a general tool of the distribution, or a true Python of any place.

    By its path, never by what a process says of itself: a file of such a name in a place of its own
    is not one. So is a file called python that is no interpreter.
    """
    name = basename(exe.path)
    if exe.links_python is not None and is_interpreter(name):
        return exe.links_python
    return is_general_path(exe.path)


def is_general_path(path: str) -> bool:
    """As ``is_general``, of a path alone; a bare name counts as one of the distribution's."""
    name = basename(path)
    if name not in TOOLS and not is_interpreter(name):
        return False
    return "/" not in path or is_packaged(path)
