"""What `gpuwarden harden` does: hands over to the site that was named."""

from __future__ import annotations

from gpuwarden.errors import UsageError
from gpuwarden.outputs.told import Call, Told

SITES = ("kubernetes", "slurm", "host")


def run(call: Call) -> Told:
    """The command of one site.

    Errors: GpuwardenError.
    """
    arguments = call.arguments
    # Imported by name: each site is another job, with imports of its own.
    from importlib import import_module

    if arguments.site not in SITES:
        raise UsageError(f"harden: no site is called '{arguments.site}'")
    told = import_module(f"gpuwarden.harden.{arguments.site}").run(call)
    assert isinstance(told, Told)  # noqa: S101 - what a name gives has no type
    return told
