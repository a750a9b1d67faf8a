"""The constant text of the rules over device opens: one id, one text, the steps in order."""

from __future__ import annotations

from gpuwarden.finding import Advisory

_EVIDENCE = (
    "Keep the evidence first: gpuwarden evidence {pid}; what may be done then: gpuwarden respond "
    "{pid}."
)

CONTAINER_OPENS_ACCELERATOR = Advisory(
    "container_opens_accelerator",
    "A container that is no known GPU workload uses {gpu}",
    "critical",
    "A process in a container used an accelerator's device node, and neither a scheduler nor the "
    "policy gave its container that device: computing on somebody else's hardware (MITRE ATT&CK "
    "T1496, resource hijacking). Critical only when the device was opened; an attempt or a refusal "
    "is a warning, and so is what could not be asked.",
    (
        _EVIDENCE,
        "Ask {owner} what it is for; a workload that must see GPUs without an allocation belongs "
        "into the policy's user_known_gpu_workloads, by image digest.",
        "Find how it got the device: a privileged container, a host path, NVIDIA_VISIBLE_DEVICES, "
        "a node made by hand.",
        "If nobody claims it: stop it through its orchestrator, after the evidence is kept.",
        "Close the way: admission rules for privileged pods and host paths; watch --enforce denies "
        "devices to the containers that the policy names.",
    ),
)
GPU_TOOL_IN_CONTAINER = Advisory(
    "gpu_tool_in_container",
    "A GPU management tool runs in a container that is no known GPU workload",
    "warning",
    "Looking which GPUs there are is the first step of whoever means to use them; in a container "
    "that was given none it has no other use. The tool is known by its file's name.",
    (
        "Ask {owner} what it is for; monitoring belongs into the policy's "
        "user_known_gpu_workloads.",
        "Look at what else runs in that container and what it opened since.",
    ),
)
ACCELERATOR_OPENED_OUTSIDE_JOBS = Advisory(
    "accelerator_opened_outside_jobs",
    "A process outside every job and unit opened {gpu}",
    "error",
    "A scheduler hands out the accelerators of this node; this process belongs to no job, pod or "
    "unit of it and is no system program. An attempt alone is a warning.",
    (
        _EVIDENCE,
        "Ask {owner} before anything else: a test outside the scheduler looks like this.",
        "If it may stay, add it to the policy file with its owner and contact.",
        "Check that users cannot reach devices outside jobs (Slurm: ConstrainDevices=yes and "
        "pam_slurm_adopt; device nodes that only root and the job's group may open).",
    ),
)
ACCELERATOR_NODE_MADE = Advisory(
    "accelerator_node_made",
    "Somebody makes a device node of an accelerator",
    "error",
    "A node with an accelerator's number gives the device under any name and in any directory. "
    "udev, the driver's tools and a container's runtime make them as a matter of course and are "
    "not meant. On the host it is a warning.",
    (
        "Find the node (find DIR -xdev -type c, in the container's root too) and who may open it.",
        "Ask {owner} why; an administrator who made it by hand knows.",
        "Drop the MKNOD capability from containers that do not need it, and mount with nodev.",
    ),
)
ACCELERATOR_OPENED_BY_OTHER_NAME = Advisory(
    "accelerator_opened_by_other_name",
    "A process opened {gpu} under a name that is not the device's",
    "error",
    "The node that it used is another one than those under /dev: tools that match /dev/nvidia* by "
    "path do not see it. On the host, and where a container was passed that device, it is a "
    "warning.",
    (
        "Find who made that node and with what right (CAP_MKNOD in a container?).",
        "Ask {owner}; a container's configuration can map a device to another name.",
        "Drop MKNOD from containers that do not need it.",
    ),
)
HOLDER_WITHOUT_OPEN = Advisory(
    "holder_without_open",
    "A process holds {gpu} and never opened it",
    "error",
    "It came to the descriptor by a socket or pidfd_getfd, or by inheritance across a change of "
    "program, account or container: ways around what watches and restricts opens. Children that "
    "run their parent's program are not meant. Inherited, it is a warning.",
    (
        _EVIDENCE,
        "Find who gave it away: processes that hold the same device and share a socket with it.",
        "Ask {owner}; brokers that hand devices to sandboxed programs do this on purpose and "
        "belong into the policy.",
    ),
)
