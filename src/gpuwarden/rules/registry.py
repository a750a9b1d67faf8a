"""Every rule, visibly: its advisory and the pure function of the same name that finds its hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuwarden.finding import Advisory, Row
from gpuwarden.node import Node
from gpuwarden.policy import Policy
from gpuwarden.rules import advisories as text
from gpuwarden.rules import cuda_advisories as cuda_text
from gpuwarden.rules import (
    cuda_code,
    cuda_contexts,
    driver_libraries,
    gpu_code,
    launches,
    node_rules,
    open_rules,
    row_rules,
    time_rules,
)
from gpuwarden.rules import launch_advisories as launch_text
from gpuwarden.rules import open_advisories as open_text
from gpuwarden.rules import time_advisories as time_text
from gpuwarden.rules.row_rules import HitFunction


class Rule(NamedTuple):
    """An advisory with the function that finds its hits."""

    advisory: Advisory
    hits: HitFunction
    unseen: Callable[[Node, Policy, Sequence[Row]], str] | None = None
    """What it could not be evaluated for beyond its advisory's needs, in words; empty for none."""


RULES: tuple[Rule, ...] = (
    Rule(text.GPU_CRYPTOMINER, row_rules.gpu_cryptominer),
    Rule(text.GPU_CONTAINER_WITHOUT_ALLOCATION, row_rules.gpu_container_without_allocation),
    Rule(text.GPU_MODULE_HASH_LIKE, gpu_code.gpu_module_hash_like, gpu_code.unseen),
    Rule(text.PROCESS_HIDDEN, node_rules.process_hidden),
    Rule(text.GPU_PROCESS_SUSPICIOUS, row_rules.gpu_process_suspicious),
    Rule(text.NVML_LIBRARY_REFUSED, node_rules.nvml_library_refused),
    Rule(text.PRELOAD_LIBRARY_UNKNOWN, node_rules.preload_library_unknown),
    Rule(text.AUTOSTART_SUSPICIOUS, node_rules.autostart_suspicious),
    Rule(text.GPU_BUSY_WITHOUT_PROCESS, node_rules.gpu_busy_without_process),
    Rule(text.DEVICE_NODE_RENAMED, node_rules.device_node_renamed),
    Rule(text.DRIVER_LIBRARY_UNEXPECTED, driver_libraries.driver_library_unexpected),
    Rule(text.GPU_MODULE_UNKNOWN, gpu_code.gpu_module_unknown, gpu_code.unseen),
    Rule(text.GPU_PROCESS_OF_ENDED_JOB, row_rules.gpu_process_of_ended_job),
    Rule(text.GPU_ZOMBIE_CONTEXT, row_rules.gpu_zombie_context),
    Rule(text.GPU_MEMORY_LEAKED, row_rules.gpu_memory_leaked),
    Rule(text.GPU_PROCESS_ON_WRONG_GPU, row_rules.gpu_process_on_wrong_gpu),
    Rule(text.GPU_PROCESS_OF_OTHER_TEAM, row_rules.gpu_process_of_other_team),
    Rule(text.GPU_PROCESS_UNATTRIBUTED, row_rules.gpu_process_unattributed),
    Rule(text.GPU_UNREADABLE, row_rules.gpu_unreadable),
    Rule(text.EXPECTED_PROCESS_WITH_SIGNS, row_rules.expected_process_with_signs),
    Rule(text.HOLDER_NOT_LISTED, node_rules.holder_not_listed),
    Rule(text.CLIENT_WITHOUT_DEVICE, node_rules.client_without_device),
    Rule(text.GPU_FAULT_LOGGED, node_rules.gpu_fault_logged),
    Rule(text.EXCEPTION_EXPIRED, node_rules.exception_expired),
)

OPEN_RULES: tuple[Rule, ...] = (
    Rule(open_text.CONTAINER_OPENS_ACCELERATOR, open_rules.container_opens_accelerator),
    Rule(open_text.GPU_TOOL_IN_CONTAINER, open_rules.gpu_tool_in_container),
    Rule(open_text.ACCELERATOR_OPENED_OUTSIDE_JOBS, open_rules.accelerator_opened_outside_jobs),
    Rule(open_text.ACCELERATOR_NODE_MADE, open_rules.accelerator_node_made),
    Rule(open_text.ACCELERATOR_OPENED_BY_OTHER_NAME, open_rules.accelerator_opened_by_other_name),
    Rule(open_text.HOLDER_WITHOUT_OPEN, open_rules.holder_without_open),
)
"""Over device opens as they happen; only `watch` sees them."""

CUDA_RULES: tuple[Rule, ...] = (
    Rule(cuda_text.MODULE_LOADED_HASH_LIKE, cuda_code.module_loaded_hash_like),
    Rule(cuda_text.MODULE_LOADED_UNKNOWN, cuda_code.module_loaded_unknown),
    Rule(cuda_text.CONTEXTS_BEYOND_DECLARED, cuda_contexts.contexts_beyond_declared),
    Rule(cuda_text.SECOND_GPU_PROCESS_IN_CONTAINER, cuda_contexts.second_gpu_process_in_container),
    Rule(
        cuda_text.GPU_PROCESS_WITHOUT_DRIVER_LIBRARY,
        cuda_contexts.gpu_process_without_driver_library,
    ),
    Rule(launch_text.KERNELS_OUTSIDE_PROFILE, launches.kernels_outside_profile),
    Rule(launch_text.SECOND_KERNEL_STREAM, launches.second_kernel_stream),
    Rule(launch_text.LAUNCHES_UNEXPLAINED, launches.launches_unexplained),
)
"""Over calls of the CUDA driver as they happen; only `watch` sees them."""

TIME_RULES: tuple[Rule, ...] = (
    Rule(
        time_text.GPU_BUSY_WITHOUT_PROCESS_SUSTAINED,
        time_rules.gpu_busy_without_process_sustained,
    ),
    Rule(time_text.GPU_BURSTS_ON_IDLE_NODE, time_rules.gpu_bursts_on_idle_node),
    Rule(time_text.GPU_MEMORY_KEPT_AFTER_EXIT, time_rules.gpu_memory_kept_after_exit),
    Rule(time_text.GPU_PROCESS_RESPAWNS, time_rules.gpu_process_respawns),
    Rule(
        time_text.GPU_COMPUTE_SUSTAINED_SMALL_MEMORY,
        time_rules.gpu_compute_sustained_small_memory,
    ),
)
"""Over how GPUs were used for minutes and hours; only `watch` remembers."""

RULE_IDS: frozenset[str] = frozenset(
    rule.advisory.id for rule in (*RULES, *OPEN_RULES, *CUDA_RULES, *TIME_RULES)
)
