"""`gpuwarden harden slurm`: a prolog and an epilog, and what slurm.conf has to say about them.

Printed, or written into a directory; nothing is installed. With ``--check`` it is what they call.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from gpuwarden.code.baseline.file_writer import write_whole
from gpuwarden.errors import GpuwardenError, UsageError
from gpuwarden.expected.slurm import jobs
from gpuwarden.expected.slurm.answers import parse_settings, seconds_of
from gpuwarden.expected.slurm.controller import reach
from gpuwarden.harden.access import changers
from gpuwarden.harden.slurm_left import Phase
from gpuwarden.harden.slurm_script import OVERHEAD_SECONDS, Settings, script, whole_seconds
from gpuwarden.host import Host
from gpuwarden.outputs.told import CLEAR, FINDING, Call, Told
from gpuwarden.outputs.words import escape

PHASES: tuple[Phase, ...] = ("prolog", "epilog")
LONGEST_SECONDS = 25
SHORTEST_SECONDS = 4
"""A look takes about a second, and is of use only with a second one."""
MARGIN_SECONDS = 2
COMMAND_SECONDS = 3.0
LOOK_SECONDS = 8.0
_TIMEOUTS = ("PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout")
"""The first up to 24.05, then one for each."""
_LOOSE = ("proctrack/pgid", "proctrack/linuxproc")
_NEXT_TO_OTHERS = "a directory and a pattern run several: Prolog=/etc/slurm/prolog.d/*"


def run(call: Call) -> Told:
    """Prints or writes the scripts; 1 when others than root could change what they run.

    Errors: UsageError, Denied.
    """
    arguments = call.arguments
    if arguments.check is not None:
        # Imported here: printing two scripts needs no sensor.
        from gpuwarden.harden import slurm_check

        return slurm_check.run(arguments, call.policy, call.policy_path)
    if arguments.job is not None or arguments.gpus is not None:
        raise UsageError("--job and --gpus go with --check")
    host = Host(arguments.root)
    slurm, why = configuration(host)
    chosen = Settings(
        program=_program(arguments.program),
        deadline_seconds=deadline(arguments.deadline, slurm),
        drain=arguments.drain,
        policy=_absolute("--call.policy", arguments.policy),
        nvml_library=_absolute("--nvml-library", arguments.nvml_library),
        log=_absolute("--log", arguments.log),
    )
    ours = () if arguments.program is not None else (sys.executable, os.path.dirname(__file__))
    complaints = list(_complaints(host, chosen, ours))
    notes = list(advice(chosen, slurm, why))
    texts = {f"gpuwarden-{phase}": script(phase, chosen) for phase in PHASES}
    if arguments.output is None:
        parts = [f"# ---- {name}\n{text}" for name, text in texts.items()]
    else:
        parts = [f"{path}\n" for path in _written(arguments.output, texts)]
    parts += ["".join(f"# {escape(note)}\n" for note in notes)]
    return Told(
        "\n".join(parts),
        FINDING if complaints else CLEAR,
        "".join(f"gpuwarden: {escape(one)}\n" for one in complaints),
    )


def configuration(host: Host) -> tuple[Mapping[str, str] | None, str]:
    """Slurm's settings as the controller has them, or None with why not."""
    if not host.is_local:
        return None, "commands are not run on a mounted host"
    found = reach(host, command_seconds=COMMAND_SECONDS, total_seconds=LOOK_SECONDS)
    if found is None:
        return None, "there is no Slurm here"
    if not found.answers:
        return None, found.why
    try:
        output = found.controller.ask("scontrol", "show", "config")
        jobs.refuse_failure(output, "scontrol show config")
        return parse_settings(output.stdout), ""
    except GpuwardenError as error:
        return None, str(error)


def deadline(asked: int | None, slurm: Mapping[str, str] | None) -> int:
    """A script's deadline: below Slurm's own by what the script takes beyond it.

    Errors: UsageError when that leaves no time for a look.
    """
    limits = [seconds_of((slurm or {}).get(name, "")) for name in _TIMEOUTS]
    known = [limit for limit in limits if limit]
    room = min(known) - OVERHEAD_SECONDS - MARGIN_SECONDS if known else None
    if asked is not None and asked < SHORTEST_SECONDS:
        raise UsageError(f"--deadline: at least {SHORTEST_SECONDS} s")
    if room is not None and room < (asked or SHORTEST_SECONDS):
        raise UsageError(
            f"Slurm ends prologs and epilogs after {min(known)} s (PrologEpilogTimeout): "
            f"that leaves {max(room, 0)} s for a check",
            remedy="raise PrologEpilogTimeout to 40 s or more"
            + (", or lower --deadline" if asked is not None else ""),
        )
    if asked is not None:
        return asked
    return min(LONGEST_SECONDS, room if room is not None else LONGEST_SECONDS)


def advice(settings: Settings, slurm: Mapping[str, str] | None, why: str) -> Iterator[str]:
    """What to write into slurm.conf, and what of it stands in the way."""
    where = "/etc/slurm/{0}.d/gpuwarden-{0}"
    yield f"slurm.conf: Prolog={where.format('prolog')}   ({_NEXT_TO_OTHERS})"
    yield f"slurm.conf: Epilog={where.format('epilog')}"
    whole = whole_seconds(settings)
    if slurm is None:
        yield (
            f"Slurm's own settings were not seen ({why}): PrologEpilogTimeout has to be above "
            f"{whole} s, as it is by default"
        )
        return
    for name in ("Prolog", "Epilog"):
        if slurm.get(name):
            yield f"{name} is {slurm[name]} now: keep it beside this one"
    if "alloc" not in slurm.get("PrologFlags", "").lower():
        yield (
            "PrologFlags without Alloc: the prolog runs when the first step starts, not when the "
            "job is given its GPUs"
        )
    if slurm.get("ProctrackType") in _LOOSE:
        yield (
            f"ProctrackType={slurm['ProctrackType']} loses processes that leave their parent: "
            "they outlive their job; proctrack/cgroup ends them"
        )
    batch = seconds_of(slurm.get("BatchStartTimeout", ""))
    if batch is not None and batch < whole:
        yield (
            f"BatchStartTimeout={batch}: a prolog that takes longer can make a batch job look "
            f"lost; {whole} s or more is safe"
        )
    if settings.drain and "nohold_on_prolog_fail" not in slurm.get("SchedulerParameters", ""):
        yield (
            "SchedulerParameters without nohold_on_prolog_fail: a batch job whose prolog fails is "
            "requeued and held until somebody releases it"
        )


def _complaints(host: Host, settings: Settings, ours: Sequence[str]) -> Iterator[str]:
    """Whatever runs as root in these scripts and that others could replace."""
    for what in (settings.program, *ours, settings.policy, settings.nvml_library):
        if what is None:
            continue
        try:
            for one in changers(host, what):
                yield f"{what} would run as root or decide there, and {one} can change it"
        except GpuwardenError as error:
            yield f"{what}: cannot be looked at: {error}"


def _program(named: str | None) -> str:
    """gpuwarden as the scripts call it: with its whole path. Errors: UsageError."""
    if named is not None:
        return _absolute("--program", named) or ""
    own = sys.argv[0]
    found = os.path.abspath(own) if os.sep in own else shutil.which(own)
    if found is None or os.path.basename(found) != "gpuwarden":
        raise UsageError("where gpuwarden is installed is not known: --program PATH")
    return found


def _absolute(flag: str, path: str | None) -> str | None:
    if path is not None and (not path.startswith("/") or "\n" in path):
        raise UsageError(f"{flag} {path}: the scripts run elsewhere, so give the whole path")
    return path


def _written(folder: str, texts: Mapping[str, str]) -> Iterator[str]:
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {folder}: {error.strerror}") from error
    for name, text in texts.items():
        path = os.path.join(folder, name)
        write_whole(path, [text.encode()], mode=0o755)
        yield path
