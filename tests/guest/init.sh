#!/bin/sh
# The first process of the small guest: what the checks need mounted, cgroup version 2 only.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing
mount -t securityfs securityfs /sys/kernel/security
PYTHONPATH=/opt/site:/opt/checks PATH=/bin:/usr/bin python3 -m tests.guest.inside small >/dev/ttyS0 2>&1
poweroff -f
