"""How `gpuwarden watch` was asked to run."""

from __future__ import annotations

from msgspec import Struct

STATE_DIRECTORY = "/var/lib/gpuwarden"


class WatchOptions(Struct, frozen=True, kw_only=True):
    """Everything that the command line and the policy's ``sinks`` say."""

    root: str = "/"
    nvml_library: str | None = None
    deep: bool = False
    """Each judgement sweeps every pid for processes hidden from /proc."""
    policy_path: str | None = None
    state_directory: str = STATE_DIRECTORY
    sinks: tuple[str, ...] = ()
    events: bool = False
    """Every device event as a JSON line on standard output."""
    interval_seconds: float = 1.0
    scan_interval_seconds: float = 300.0
    """The longest time between two judgements of the whole node; changes bring one at once."""
    limit_events: int = 16
    """Of one process and device in a second; 0: no limit. All are counted."""
    return_values: bool = False
    ways: tuple[str, ...] | None = None
    """Ways of seeing device opens that may be used; None: the best that loads."""
    metrics: str | None = None
    falco_listen: str | None = None
    falco_token_file: str | None = None
    """What holds the bearer token that a sender must know."""
    falco_allow_remote: bool = False
    """``falco_listen`` may be an address that other machines reach."""
    cuda: bool = True
    """Contexts, module loads and launches are seen as well, by uprobes on driver libraries."""
    enforce: bool = False
    dry_run: bool = False
    pin: bool = False
    for_seconds: float | None = None
    """Ends by itself after this long."""
