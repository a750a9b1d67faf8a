"""The constant text of the rules over time: one id, one text, the steps in order."""

from __future__ import annotations

from gpuwarden.finding import Advisory

_SINCE = "gpuwarden history shows since when, how much, with which parents and peers."

GPU_COMPUTE_SUSTAINED_SMALL_MEMORY = Advisory(
    "gpu_compute_sustained_small_memory",
    "A process that nobody expects saturates {gpu} with little of its memory",
    "info",
    "Mining looks like this, and so do simulations and small models; here its memory moves, which "
    "speaks for those. With unchanged memory it would count as a sign against the process itself.",
    (
        _SINCE,
        "Ask {owner} what it computes; if it belongs here, add it to the policy file.",
        "Look at its peers and at what started it: a second, independent sign would accuse it.",
    ),
    needs=("processes",),
)
GPU_BURSTS_ON_IDLE_NODE = Advisory(
    "gpu_bursts_on_idle_node",
    "A process computes in bursts on {gpu}, which should be idle",
    "warning",
    "Programs that hide work in short stretches, or only while nobody is logged in, so that a look "
    "at the node finds it idle. Interactive work that is not in the expected set does it, too.",
    (
        _SINCE,
        "Keep what is there: gpuwarden evidence {pid}.",
        "Ask {owner} what it is for. If it belongs here, add it to the policy file.",
        "If it is busy only while nobody is logged in, look from another machine (gpuwarden "
        "history, metrics): it may notice a login.",
    ),
    needs=("processes",),
)
GPU_MEMORY_KEPT_AFTER_EXIT = Advisory(
    "gpu_memory_kept_after_exit",
    "Memory of {gpu} stays taken after its process has ended",
    "warning",
    "The process is gone from the driver's list, no other process on it has that memory, and no "
    "process outside the list holds the device. A driver fault leaves memory behind like this.",
    (
        "Look for faults of {gpu}: gpuwarden scan (gpu_fault_logged), dmesg | grep Xid.",
        "Compare with another look from root on the host: a process that the driver does not list "
        "could have it (gpuwarden doctor).",
        "The other processes on {gpu} may go on. Drain the node when they have ended, then reset "
        "{gpu}, only when nobody else is on it.",
    ),
    needs=("holders", "processes"),
)
GPU_BUSY_WITHOUT_PROCESS_SUSTAINED = Advisory(
    "gpu_busy_without_process_sustained",
    "{gpu} computes for minutes while no process is listed on it",
    "error",
    "gpu_busy_without_process judges one moment, in which a process may just have ended. This one "
    "needs a minute of load at 50% or more, and nobody listed for nearly all of the time, so it "
    "also finds load that pauses whenever a scan looks. The process list is incomplete: a process "
    "is hidden, or the library that answers leaves it out.",
    (
        "Compare gpuwarden doctor with what root in the host's pid namespace sees.",
        "Check the library that answered (nvml_library_refused) and scan with --deep.",
        "Look at who opened the device: gpuwarden watch --events tells each open.",
        "If processes come and go within a second (a test farm), add an exception for {gpu}.",
    ),
    needs=("holders", "processes"),
)
GPU_PROCESS_RESPAWNS = Advisory(
    "gpu_process_respawns",
    "A program comes to {gpu} again and again, a new process each time",
    "warning",
    "Each process lives about as long as the one before it, and the next one begins at once. "
    "Programs that dodge a look at long-running processes do this; so do series of equal runs.",
    (
        "Find what starts it: its parents (gpuwarden history), cron, units, a container's restart "
        "policy.",
        "Copy the binary that the evidence names before it is gone.",
        "Ask {owner} whether it is a series of runs; if it belongs here, add it to the policy "
        "file, or an exception with the binary's path.",
    ),
    needs=("processes",),
)
