"""What each collected public case must give, where that is a value: dumps, cgroups, kernel logs."""

from __future__ import annotations

ARGUED = {
    "a18": "Its list is empty while the GPU is 65 % busy with 9 GiB in use: that is not idle but a "
    "list that was not seen (nvidia-smi inside a container), so the GPU is unreadable.",
    "b07": "That the two owners are defunct is in /proc, not in the table: of the table alone they "
    "are unreadable, with the reason; with /proc beside it they are zombie contexts.",
    "b09": "The job's id stands in a scratch path only and its batch system is not one that is "
    "asked: no source can say that it has ended. Its owner is known and asked; nothing is accused.",
    "b26": "Plotting and farming are named for what they are: suspicious until the policy allows "
    "them, and not cryptominer, as the design says.",
    "f12": "Three of four. /usr/lib/mysql/mysql every minute is what a watchdog looks like: the "
    "line alone tells nothing. It becomes evidence when it is tied to a process that is running.",
    "f23": "The second line holds a script's name and three words. The miner is its child and is "
    "judged by its own arguments; the line alone is not a sign.",
    "g23": "A dmon table shows no processes: nothing is said of any, the GPU is unreadable.",
}

DUMPS: dict[str, dict[str, str]] = {
    "a01": {
        "0 3093": "cryptominer",
        "1 3093": "cryptominer",
        "0 1357": "system",
        "0 2384": "system",
    },
    "a02": {"1 58813": "unattributed", "2 58642": "unattributed"},
    "a03": {"0 None": "unreadable"},
    "a04": {},
    "a06": {"0 28543": "system"},
    "a07": {},
    "a09": {},
    "a10": {},
    "a11": {"01:00.0 None": "unreadable"},
    "a15": {
        "0 4937": "unattributed",
        "0 1842": "system",
        "0 3190": "system",
        "0 34626": "system",
    },
    "a18": {"0 None": "unreadable"},
    "a22": {"01:00.0 29907": "unattributed"},
    "a23": {"00:10.0 None": "unreadable"},
    "a24": {"unknown 11844": "system"},
    "b17": {"0 1234": "unattributed", "1 1234": "unattributed", "0 5678": "system"},
    "b18": {
        "unknown 2248": "unreadable",
        "unknown 4284": "unattributed",
        "unknown 5678": "unreadable",
        "unknown 15840": "system",
        "unknown 17048": "unattributed",
        "unknown 31794": "unreadable",
        "unknown 31795": "unreadable",
    },
    "b26": {"0 338900": "suspicious"},
    "b28": {"4 2151955": "unreadable"},
    "g04": {
        "0 3699287": "unattributed",
        "0 1117159": "unattributed",
        "0 1499941": "unattributed",
        "0 167924": "unattributed",
    },
    "g12": {"0 7372": "unattributed"},
    "g23": {"0 None": "unreadable"},
}
# What else must be said of some of them: words of a gap, of a row's path or of its unknowns.
SAID = {
    "a01": "says that 6 are attached and carries 2",
    "a03": "cannot see processes on this GPU",
    "a11": "the driver version: not in the dump",
    "a18": "inside a container nvidia-smi lists no foreign processes",
    "a22": "damaged, not well-formed",
    "a23": "cut off",
    "b17": "its pid is -1: ignored",
    "b18": "nvidia-smi may not see this process",
    "b26": "plotting that the policy does not allow",
    "b28": "another pid namespace",
}

CGROUPS: dict[str, dict[str, object]] = {
    "c01": {"unit": "docker.service", "container_id": None},
    "c02": {"unit": "getty@tty1.service"},
    "c03": {"runtime": "docker", "container_id": "b43d92bf1e5c", "pod_uid": None},
    "c04": {
        "pod_uid": "8833712d-6e69-4f5c-95f3-aebd020ce2e7",
        "container_id": "95cbe853416f",
        "unit": None,
    },
    "c05": {"pod_uid": "6a4ce4a0-ba47-11ea-b2a7-0cc47ac5979e"},
    "c07": {"pod_uid": "8712f785-1a3e-41ec-a00b-e2dcc77431cb", "container_id": "73051af27110"},
    "c08": {"runtime": "docker", "container_id": "ba7b10d15d16"},
    "c09": {"unit": "ssh.service"},
    "c10": {"unit": "springboot.service"},
    "c17": {"runtime": "podman", "container_id": "89e89703fbd1", "machine": None},
    "c21": {"pod_uid": "09a70ae9ccc491e651e5c773579b3490"},
    "c22": {"pod_uid": "55db13a1-c151-4cdd-a48b-e002a2b1fb58"},
    "c24": {"pod_uid": "29349498-197c-4919-b13f-9a928e7d001b", "container_id": "0ca2b3cd20e5"},
    "c26": {"container_id": "5aaf9eb7648e", "runtime": None},
    "c27": {"runtime": "docker", "container_id": "1b3319ed9c1d", "unit": None},
    "c31": {"pod_uid": "0d08203e-255a-11e9-8cd9-0007cb0b2cc8", "container_id": "671a50f5d605"},
    "c32": {"container_helper": True, "machine": "lxc:first", "container_id": None},
    "c33": {"unit": "run-ra2ddf9594bbf4a1986439b594f89eb0f.scope", "unit_transient": True},
    "c36": {"unit": "postgresql@9.4-main.service"},
    "c37": {"unit": "serial-getty@ttyS0.service"},
    "c38": {
        "pod_uid": "0125ec2f-b64a-4868-8f5b-94b56cbab864",
        "container_id": "ee4b20e90ac7",
        "unit": None,
    },
    "c39": {"slurm_job": "748468", "slurm_step": "0", "slurm_uid": 7319, "unit": None},
    "c41": {"slurm_job": "1392969", "slurm_step": "0"},
    "c42": {"slurm_job": "280678", "slurm_step": "interactive", "slurm_uid": 2101171},
    "c43": {"slurm_job": "4749", "slurm_step": "0", "container_id": None},
    "c45": {"slurm_job": "42", "slurm_step": "extern"},
    "c48": {"machine": "qemu:instance-00000002", "container_id": None},
    "c49": {"ecs_task": "5a0d5ceddf6c44c1928d367a815d890f", "container_id": "38fac3e99302"},
    "c51": {"pod_uid": "3d274242-8ee0-11e9-a8a6-1e68d864ef1a"},
    "c52": {"session": "14", "user_slice_uid": 0, "unit": None},
    "c54": {"batch_job": "torque:1234567[3].server.example.org"},
    "c55": {"runtime": "singularity", "container_id": "12734"},
    "c58": {"machine": "lxc:100", "unit": None},
    "c59": {"pod_uid": "11111111-2222-3333-4444-555555555555", "runtime": "containerd"},
}

XIDS: dict[str, list[tuple[int, str]]] = {
    "d01": [(119, "9b:00.0")] * 5,
    "d02": [
        (149, "18:01:00.0"), (145, "18:01:00.0"), (149, "19:01:00.0"), (145, "08:01:00.0"),
        (145, "18:01:00.0"), (144, "00:04:00.0"), (146, "00:04:00.0"), (147, "00:04:00.0"),
        (148, "00:04:00.0"), (150, "00:04:00.0"), (149, "18:01:00.0"),
    ],
    "d04": [(79, "18:00.0"), (79, "29:00.0"), (79, "18:00.0"), (79, "05:00.0"), (79, "01:00.0")],
    "d05": [(14, "03:00.0"), (46, "3f:00.0"), (999, "66:00.0"), (32, "01:00.0"), (31, "01:00.0")],
    "d08": [(13, "cb:00.0")] * 3 + [(13, "02:00:00.0"), (31, "01:00:00.0"), (13, "08:00.0")],
    "d09": [(62, "19:00.0"), (62, "03:00.0"), (74, "03:00:00.0"), (13, "b5:00.0")],
    "d10": [(48, "00:1e.0"), (48, "00:1e.0"), (48, "00:1e.0"), (43, "00:1e.0"), (48, "00:1e.0"),
            (31, "00:1e.0")],
    "d13": [(109, "0b:00.0")] * 2,
}  # fmt: skip

# How many lines are complete miner command lines, and how many say nothing at all.
MINER_LINES = {"f01": (4, 0), "f06": (4, 1), "f07": (6, 0), "f10": (2, 0), "f22": (5, 0)}
