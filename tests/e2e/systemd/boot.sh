#!/bin/bash
# Boots systemd as process 1 of new namespaces on a copy of this machine's files, with the units in
# $1/units, the files in $1/files, the program $2 as /usr/bin/flotilla, and this machine's network.
# Written files are in memory and deleted at the end. For tests; needs root.
set -euo pipefail
at=$1 program=$2

if [ "${3:-}" != inside ]; then
    group=/sys/fs/cgroup
    [ -e $group/cgroup.procs ] || group=/sys/fs/cgroup/unified
    group=$group/flotilla-test-$$
    mkdir "$group"
    echo $$ > "$group/cgroup.procs"
    exec unshare --mount --pid --cgroup --ipc --uts --fork --kill-child "$0" "$at" "$program" inside
fi

mount --make-rprivate /
mkdir -p "$at/memory"
mount -t tmpfs tmpfs "$at/memory"
mkdir "$at"/memory/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$at/memory/upper,workdir=$at/memory/work" "$at/memory/root"
cp -r "$at/files/." "$at/memory/root/"
touch "$at/memory/root/usr/bin/flotilla"
mount --bind "$program" "$at/memory/root/usr/bin/flotilla"
cp -r "$at/units" "$at/memory/units"
cd "$at/memory/root"

# Hide this machine's services, disks and settings.
mount -t tmpfs tmpfs etc/systemd/system
cp -r ../units/. etc/systemd/system/
for unit in sysctl binfmt modules-load udevd remount-fs machine-id-commit; do
    ln -s /dev/null "etc/systemd/system/systemd-$unit.service"
done
: > etc/fstab
# On a real machine udev creates these groups.
for group in render video; do
    grep -q "^$group:" etc/group || echo "$group:x:$((RANDOM % 100 + 800)):" >> etc/group
done
printf '[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n' \
    > etc/systemd/system/test.target
rm -rf var/lib/flotilla var/lib/private/flotilla run/*

mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755 tmpfs run
mount -t tmpfs -o mode=0755 tmpfs dev
mount -t tmpfs tmpfs tmp
for device in null zero full random urandom tty; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx

# A chroot may not create user namespaces, so the root is changed with pivot_root.
mkdir -p old
pivot_root . old
cd /
umount -l old
exec /usr/bin/env -i container=flotilla-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    /lib/systemd/systemd --unit=test.target --log-target=journal --show-status=no
