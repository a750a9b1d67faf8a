"""Every metric of the Prometheus endpoint: its name, type, labels and one sentence."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """``name`` as Prometheus shows it: counters end in ``_total``, constant texts in ``_info``."""

    name: str
    type: Literal["gauge", "counter", "info"]
    labels: tuple[str, ...]
    text: str


GPU = ("gpu", "uuid")
PROCESS = (*GPU, "pid", "binary", "user", "workload", "verdict")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(f"gpuwarden_{name}", "gauge", labels, text)


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(f"gpuwarden_{name}", "counter", labels, text)


def _info(name: str, text: str, labels: tuple[str, ...]) -> Metric:
    return Metric(f"gpuwarden_{name}", "info", labels, text)


METRICS: tuple[Metric, ...] = (
    # The agent in a word.
    _info("build_info", "The running version.", ("version",)),
    _gauge("blind", "1 where the agent does not see what it should; 0 where it does.", ("cause",)),
    _gauge("state_timestamp_seconds", "When what is shown here was put together."),
    # GPUs and who is on them.
    _info("gpu_info", "What a GPU is.", (*GPU, "vendor", "name", "pci_address")),
    _gauge("gpu_readable", "Whether the driver answers for this GPU.", GPU),
    _gauge("gpu_utilisation_ratio", "Share of time in which a kernel ran.", GPU),
    _gauge("gpu_memory_used_bytes", "Memory in use, without the driver's own reserve.", GPU),
    _gauge("gpu_memory_total_bytes", "Memory that the GPU has.", GPU),
    _gauge("gpu_temperature_celsius", "Temperature of the GPU.", GPU),
    _gauge("gpu_clients", "Processes that the driver lists.", GPU),
    _gauge(
        "gpu_memory_without_process_bytes",
        "Memory in use on a GPU that no process is listed on and none holds.",
        GPU,
    ),
    _gauge("process_sm_ratio", "Share of the GPU's compute that a process takes.", PROCESS),
    _gauge("process_memory_bytes", "GPU memory of a process.", PROCESS),
    _gauge("more_processes", "Processes on a GPU beyond those listed one by one.", GPU),
    _gauge("more_processes_sm_ratio", "What those take of its compute, where known.", GPU),
    _gauge("more_processes_memory_bytes", "What those have of its memory, where known.", GPU),
    # What was judged.
    _gauge("judged", "Judgements of a process on a GPU, or a GPU, by verdict.", ("verdict",)),
    _gauge("holders_not_listed", "Processes that hold a GPU and that the driver does not list."),
    _gauge("clients_without_device", "Listed processes that hold no accelerator."),
    _gauge("unexpected_egress_processes", "GPU processes with peers that speak against them."),
    _gauge("findings", "Open findings.", ("rule", "severity", "verdict", "silenced")),
    _gauge("rule_evaluated", "Whether a rule could be evaluated at the last judgement.", ("rule",)),
    # Device opens.
    _info("probe_info", "How device opens are seen; kind is ebpf or poll.", ("way", "kind")),
    _info("probe_refused_info", "A way that does not work here, and why.", ("way", "reason")),
    _counter("events_total", "Events seen, by kind and how far an open came.", ("kind", "state")),
    _counter("events_dropped_total", "Events that were lost, by cause.", ("cause",)),
    _counter("device_uses_total", "Opens, mknods and accesses that the kernel's probe counted."),
    _counter("events_limited_total", "Events counted in the kernel and not told one by one."),
    _counter("limiter_full_total", "Events told without a limit, as its table was full."),
    _counter("events_merged_total", "Second events of one open, taken as one."),
    _counter("opens_denied_total", "Opens denied, or that would be in earnest.", ("mode",)),
    _counter("tool_runs_total", "GPU management tools that were run."),
    _gauge("ring_fill_ratio", "Share of the kernel's ring that waits to be read."),
    _gauge("ring_bytes", "Size of the kernel's ring."),
    _gauge("metadata_pending", "Events that wait for their container's name."),
    _counter("metadata_unknown_total", "Events told without their container's name."),
    _counter("metadata_failures_total", "Questions about containers that failed."),
    # Calls of the CUDA driver.
    _gauge("cuda_watching", "Whether calls of the CUDA driver are watched."),
    _info("cuda_unseen_info", "What of them cannot be seen, and why.", ("reason",)),
    _gauge("cuda_libraries", "CUDA driver libraries that some process maps."),
    _gauge("cuda_entry_points", "Entry points that are attached to.", ("place",)),
    _gauge("cuda_processes", "Processes that map one, by how much was seen.", ("seen",)),
    _gauge("cuda_contexts", "Contexts that were made while they were watched."),
    _counter("cuda_context_calls_total", "Contexts made, retained, released and destroyed."),
    _counter("cuda_loads_total", "Calls that gave the driver code."),
    _counter("cuda_modules_total", "Modules loaded, each once a process.", ("standing",)),
    _counter("cuda_loads_missed_total", "Loads of which bytes are missing.", ("reason",)),
    _counter("cuda_captured_bytes_total", "Bytes of modules that were copied."),
    _counter("cuda_calls_dropped_total", "Calls that were lost, not only their bytes."),
    _counter("cuda_stops_total", "Processes stopped for a moment to read a module."),
    _counter("cuda_launches_total", "Launches of kernels and of graphs.", ("what",)),
    _gauge("cuda_launch_profiles", "Processes compared with a launch profile.", ("fit",)),
    _counter("cuda_tracer_restarts_total", "Times the tracer was started anew."),
    _gauge("cuda_tracer_cpu_seconds", "Processor time of the tracer that runs now."),
    _gauge("cuda_tracer_resident_memory_bytes", "Memory of the tracer."),
    # The agent's parts.
    _gauge("sensor_state", "1 for the state that a sensor is in.", ("sensor", "state")),
    _gauge("sensor_seconds", "Time that a sensor's last run took.", ("sensor",)),
    _counter("sensor_errors_total", "Runs of a sensor that failed.", ("sensor",)),
    _gauge("source_state", "1 for the state of a source of the expected set.", ("source", "state")),
    _gauge("source_seconds", "Time that a source's last answer took.", ("source",)),
    _counter("source_errors_total", "Questions to a source that failed.", ("source",)),
    _counter("judgements_total", "Judgements made."),
    _counter("judgement_failures_total", "Judgements that failed."),
    _gauge("judgement_seconds", "Time that the last judgement took."),
    _gauge("judgement_age_seconds", "Time since the last judgement."),
    _gauge("judgement_interval_seconds", "How often the node is to be judged."),
    _gauge("sink_up", "Whether the last delivery to a sink succeeded.", ("sink",)),
    _counter("sink_delivered_total", "Findings that a sink took.", ("sink",)),
    _counter("sink_repeated_total", "Open findings told to a sink again.", ("sink",)),
    _counter("sink_dropped_total", "Findings that a sink will not get any more.", ("sink",)),
    _gauge("sink_waiting", "Findings that a sink has yet to get.", ("sink",)),
    _gauge("sink_failing_seconds", "How long a sink has failed; 0 when it works.", ("sink",)),
    _gauge("store_troubles", "What keeps the agent's memory from being written now."),
    _gauge("store_set_aside", "Damaged databases set aside when the store was opened."),
    _gauge("store_database_bytes", "Size of a database.", ("database",)),
    _counter("samples_lost_total", "Samples that could not be stored."),
    _counter("agent_cpu_seconds_total", "Processor time of the agent."),
    _gauge("agent_resident_memory_bytes", "Memory of the agent."),
    _gauge("agent_open_files", "Open descriptors of the agent."),
    _gauge("agent_start_time_seconds", "When the agent started."),
)
