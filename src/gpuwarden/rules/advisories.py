"""The constant text of every rule: one id, one text, the steps in order."""

from __future__ import annotations

from gpuwarden.finding import Advisory, Verdict

_EVIDENCE = (
    "Keep the evidence first: gpuwarden evidence {pid}; what may be done then: gpuwarden respond "
    "{pid}."
)

GPU_CRYPTOMINER = Advisory(
    "gpu_cryptominer",
    "A cryptominer runs on {gpu}",
    "critical",
    "Two or more independent kinds of evidence, or a complete miner command line. Being inside an "
    "expected job or pod does not clear it.",
    (
        _EVIDENCE,
        "If it runs inside somebody's job or pod, tell {owner}: the workload is a victim too.",
        "Stop it: kill {pid}, or stop its container. Do not reboot: that loses the evidence.",
        "Verify: memory and utilisation of {gpu} must fall, and no new pid may take its place.",
        "Find what starts it again: cron, units, shell profiles, the container's restart policy, "
        "the pod's controller (the findings below name those seen).",
        "Find the way in: the session, service or image that its ancestry leads to.",
        "Rotate every credential that this node or container could read.",
        "If the way in cannot be explained, rebuild the node from a known-good image.",
    ),
    needs=("processes",),
)
GPU_PROCESS_SUSPICIOUS = Advisory(
    "gpu_process_suspicious",
    "A process on {gpu} is not expected and hides what it is",
    "error",
    "It belongs to no expected workload, and one kind of evidence speaks against it.",
    (
        _EVIDENCE,
        "Ask {owner} whether it is theirs, with the binary's path and start time.",
        "Look at its peers and what started it; a second, independent sign makes it a miner.",
        "If nobody claims it: gpuwarden respond {pid} --do freeze, rather than kill it; and go on "
        "looking.",
    ),
    needs=("processes",),
)
GPU_CONTAINER_WITHOUT_ALLOCATION = Advisory(
    "gpu_container_without_allocation",
    "A container uses {gpu} that nobody allocated to it",
    "critical",
    "The device was reached without an allocation (NVIDIA_VISIBLE_DEVICES, a privileged pod, a "
    "host path), and no exception of the policy covers it.",
    (
        _EVIDENCE,
        "Ask {owner} what it is for; an add-on that must see GPUs belongs into the policy's "
        "exceptions, by image digest and namespace.",
        "Find how it got the device: its specification, not its name, tells.",
        "If nobody claims it: stop it through its orchestrator, after the evidence is kept.",
        "Close the way: admission rules for privileged pods, host paths and "
        "NVIDIA_VISIBLE_DEVICES without a GPU request.",
    ),
    needs=("processes", "containers"),
)
GPU_PROCESS_ON_WRONG_GPU = Advisory(
    "gpu_process_on_wrong_gpu",
    "An expected workload is on a GPU that was not given to it",
    "warning",
    "It belongs here, but uses {gpu}, which was given to another or to nobody.",
    (
        "Tell {owner}: usually CUDA_VISIBLE_DEVICES is set by hand or devices are not constrained.",
        "Check that the scheduler constrains devices (Slurm: ConstrainDevices=yes).",
    ),
    needs=("processes",),
)
GPU_PROCESS_OF_OTHER_TEAM = Advisory(
    "gpu_process_of_other_team",
    "Somebody's process is on {gpu} outside the expected set",
    "warning",
    "Its owner is known and no sign speaks against it, but no scheduler, pod or policy expects it.",
    (
        "Ask {owner} before anything else; it may be legitimate work outside the scheduler.",
        "If it may stay, add it to the policy file with its owner and contact.",
        "Do not stop it yourself.",
    ),
    needs=("processes",),
)
GPU_PROCESS_OF_ENDED_JOB = Advisory(
    "gpu_process_of_ended_job",
    "A process of a job that has ended is still on {gpu}",
    "warning",
    "The controller says that the job is over; the process was left behind.",
    (
        "Confirm with the controller that the job is over (scontrol show job, sacct).",
        "Tell {owner}, then end it: kill {pid}. If it stays, it hangs: look for an Xid of {gpu}.",
        "Verify that the memory of {gpu} is free; fix the epilog or proctrack so that it cannot "
        "recur.",
    ),
    needs=("processes",),
    needs_sources=("slurm",),
)
GPU_ZOMBIE_CONTEXT = Advisory(
    "gpu_zombie_context",
    "A dead or hung process still holds {gpu}",
    "warning",
    "The context's owner is gone, defunct or hung; memory stays taken until its last descriptor "
    "is closed.",
    (
        "End the processes that inherited its descriptors (named in the evidence), after asking "
        "their owner; killing the zombie itself does nothing.",
        "Kill it (gpuwarden respond {pid} --do kill) only for a confirmed hung context (state D, "
        "an Xid of its GPU, no progress).",
        "If nothing holds it: reset {gpu} only when nobody else is on it; reboot only as the last "
        "resort.",
    ),
    needs=("processes",),
)
GPU_MEMORY_LEAKED = Advisory(
    "gpu_memory_leaked",
    "Memory of {gpu} is in use and nobody holds it",
    "warning",
    "No process is listed and none holds the device; what the driver reserves is not counted.",
    (
        "Look at the kernel log for Xid events of this GPU.",
        "Reset the GPU only when nobody else is on it; drain the node first.",
    ),
    needs=("holders",),
)
GPU_PROCESS_UNATTRIBUTED = Advisory(
    "gpu_process_unattributed",
    "Nobody can be named for a process on {gpu}",
    "warning",
    "No workload and no proven owner; nothing speaks against it either.",
    (
        "Find who started it: its unit, container or parents are in the evidence.",
        "If it belongs here, add it to the policy file (gpuwarden expect --learn drafts one).",
    ),
    needs=("processes",),
)
GPU_UNREADABLE = Advisory(
    "gpu_unreadable",
    "Not enough could be seen to judge {gpu}",
    "warning",
    "Something that the verdict needs could not be read; this is not a clean result.",
    (
        "Run gpuwarden doctor: it names what is missing and how to get it (root, hostPID, the "
        "runtime's socket, the scheduler's client).",
    ),
)

VERDICT_ADVISORIES: dict[Verdict, Advisory] = {
    "cryptominer": GPU_CRYPTOMINER,
    "suspicious": GPU_PROCESS_SUSPICIOUS,
    "rogue-container": GPU_CONTAINER_WITHOUT_ALLOCATION,
    "wrong-gpu": GPU_PROCESS_ON_WRONG_GPU,
    "other-team": GPU_PROCESS_OF_OTHER_TEAM,
    "orphaned-job": GPU_PROCESS_OF_ENDED_JOB,
    "zombie-context": GPU_ZOMBIE_CONTEXT,
    "leaked-memory": GPU_MEMORY_LEAKED,
    "unattributed": GPU_PROCESS_UNATTRIBUTED,
    "unreadable": GPU_UNREADABLE,
}

EXPECTED_PROCESS_WITH_SIGNS = Advisory(
    "expected_process_with_signs",
    "An expected workload on {gpu} shows a sign of misuse",
    "warning",
    "It belongs here, so one kind of evidence does not accuse it; look before a second appears.",
    (
        "Show {owner} the evidence and ask whether it is known.",
        "Compare the binary with what the job's script starts.",
    ),
    needs=("processes",),
)
NVML_LIBRARY_REFUSED = Advisory(
    "nvml_library_refused",
    "The NVML library on this node is not safe to open",
    "error",
    "Malware ships a libnvidia-ml.so.1 that lies. A library that others can write is not loaded, "
    "so the driver's process list was not read through it.",
    (
        "Compare the file with the driver package's own (dpkg -V, rpm -V, or its build-id).",
        "Correct its owner and mode (root, 0755, and every directory above it), or name a sound "
        "one with --nvml-library.",
    ),
)
HOLDER_NOT_LISTED = Advisory(
    "holder_not_listed",
    "A process holds {gpu} and the driver does not list it",
    "warning",
    "Inheritors of a listed process and system programs are not meant. A process list that omits "
    "a holder can come from a lying library, another pid namespace, or a process about to start.",
    (
        "Scan again: a process that is starting up shows in the list within seconds.",
        "Compare with nvidia-smi run from a trusted copy; check which libnvidia-ml is loaded.",
    ),
    needs=("nvml", "holders"),
)
CLIENT_WITHOUT_DEVICE = Advisory(
    "client_without_device",
    "The driver lists a process on {gpu} that holds no accelerator",
    "warning",
    "A process cannot use a GPU without its device. A list that names one which holds none can "
    "come from a lying library that blames a bystander, or from a number that was taken again.",
    (
        "Do not act on this process: what the list says of it is in doubt.",
        "Scan again; if it stays, compare with nvidia-smi run from a trusted copy and check which "
        "libnvidia-ml is loaded.",
        "Look for who does hold the device: it is another row of this report, or hidden.",
    ),
    needs=("nvml", "holders", "processes"),
)
PROCESS_HIDDEN = Advisory(
    "process_hidden",
    "A process lives that listing /proc does not show",
    "critical",
    "A rootkit that filters directory listings looks like this.",
    (
        "Do not trust ps, ls or lsof on this node; work from a rescue system or a static binary.",
        "Read /etc/ld.so.preload and the loaded kernel modules.",
        "Rebuild the node from a known-good image.",
    ),
    needs=("hidden",),
)
PRELOAD_LIBRARY_UNKNOWN = Advisory(
    "preload_library_unknown",
    "Every program on this node loads a library that is not a known audit tool",
    "error",
    "/etc/ld.so.preload is how user-space rootkits hide processes and files from every tool.",
    (
        "Find which package owns the library; if none does, treat the node as compromised.",
        "If it is yours (accounting, audit), add an exception with its path.",
    ),
    needs=("persistence",),
)
AUTOSTART_SUSPICIOUS = Advisory(
    "autostart_suspicious",
    "Something starts programs by itself in a way that honest software does not",
    "error",
    "Copies itself and deletes the copy, downloads into a shell, runs hidden files, or is a "
    "miner's command line.",
    (
        "Keep a copy of the file, then find which package or person put it there.",
        "Disable it only after the process it starts was kept as evidence.",
    ),
    needs=("persistence",),
)
GPU_FAULT_LOGGED = Advisory(
    "gpu_fault_logged",
    "The kernel logged faults of {gpu}",
    "warning",
    "A process named in such a line was there when it happened; it is not thereby to blame.",
    (
        "Hardware and driver codes (48, 63, 64, 74, 79, 92, 94, 95, 119, 120): drain the node, "
        "then reset or replace.",
        "Application codes (13, 31, 43, 45): ask the owner of the process.",
    ),
    needs=("kernel_log",),
)
GPU_BUSY_WITHOUT_PROCESS = Advisory(
    "gpu_busy_without_process",
    "{gpu} computes and no process is listed on it",
    "error",
    "Utilisation without any client or holder means that the process list is incomplete.",
    (
        "Compare gpuwarden doctor with what root in the host's pid namespace sees.",
        "Check the library that answered (nvml_library_refused) and scan with --deep.",
    ),
    needs=("holders",),
)
DEVICE_NODE_RENAMED = Advisory(
    "device_node_renamed",
    "A process holds {gpu} through a device node with another name",
    "error",
    "The node was made by hand (mknod): tools that match /dev/nvidia* by path do not see it.",
    (
        "Find who made the node and with what right (CAP_MKNOD in a container?).",
        "Drop MKNOD from containers that do not need it.",
    ),
    needs=("holders",),
)
DRIVER_LIBRARY_UNEXPECTED = Advisory(
    "driver_library_unexpected",
    "A process on {gpu} uses a driver library that is not the host's own",
    "warning",
    "Malware ships a libnvidia-ml.so.1 or libcuda.so.1 that lies about what the GPU does. The file "
    "that is mapped is none of those that the driver installed here, by device and inode.",
    (
        "Keep a copy of the library: it is /proc/{pid}/map_files/… even when its path is gone.",
        "Compare its build-id with the driver package's own (dpkg -V, rpm -V, readelf -n).",
        "Ask {owner} where it comes from: a driver unpacked by hand, a module of the cluster, or "
        "LD_LIBRARY_PATH.",
        "Until that is known, do not believe what tools that load it say of the GPU.",
    ),
    needs=("driver_files", "processes"),
)
GPU_MODULE_HASH_LIKE = Advisory(
    "gpu_module_hash_like",
    "Unknown code that computes like a hash function is in a process on {gpu}",
    "error",
    "No baseline of its workload's profile knows the code, and what its instructions compute is "
    "like hashing: a miner, a password cracker, or a library that hashes or encrypts. It is one "
    "kind of evidence; a second, independent one makes the process a cryptominer. That the code "
    "looks as if a JIT compiler had made it clears nothing.",
    (
        _EVIDENCE,
        "Ask {owner} what the kernels named below are for, and which package brings them.",
        "Compare with a known-good run of the same workload: gpuwarden code verify.",
        "If it is theirs, add that package to the profile's baseline, by its digests; never allow "
        "a whole JIT class for it.",
        "If nobody knows it, look at the peers of pid {pid}, at what started it and at how the "
        "code came there.",
    ),
    needs=("processes",),
)
GPU_MODULE_UNKNOWN = Advisory(
    "gpu_module_unknown",
    "A process on {gpu} holds GPU code that its profile does not know",
    "warning",
    "The workload declares which GPU code it may load, and these modules are in none of its "
    "baselines. Code in no mapped file was compiled, unpacked or received while the process ran; "
    "frameworks do that too.",
    (
        "Ask {owner} whether the workload was updated or compiles kernels of its own.",
        "Find where a module comes from: gpuwarden code scan --pid {pid} lists every place of it.",
        "If it is theirs: gpuwarden baseline build from the package or image that brings it, or "
        "name its JIT class in the profile.",
        "If it is not: treat the process as one with an unknown plug-in, and look at what "
        "started it.",
    ),
    needs=("processes",),
)
EXCEPTION_EXPIRED = Advisory(
    "exception_expired",
    "An exception of the policy has expired",
    "warning",
    "It no longer silences anything; what it covered is reported again.",
    ("Renew it with a new date and reason, or remove it.",),
)
