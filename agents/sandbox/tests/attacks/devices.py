"""Devices, settings of the kernel, and the system's own files."""
import os
import stat

for path in ("/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/vda", "/dev/sda", "/dev/kvm", "/dev/fuse", "/dev/kfd", "/dev/dri/renderD128"):
    if os.path.exists(path):
        print("ESCAPED: there is", path)
for path in (
    "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
    "/proc/self/oom_score_adj", "/proc/self/uid_map", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs",
    "/etc/passwd", "/etc/ld.so.preload", "/usr/bin/written", "/bin/written", "/written", "/dev/written", os.environ["OUTSIDE"],
):
    try:
        open(path, "w").write("0")
        print("ESCAPED: wrote", path)
    except OSError:
        pass
for kind, number in ((stat.S_IFBLK, os.makedev(254, 0)), (stat.S_IFCHR, os.makedev(1, 1))):
    try:
        os.mknod("device", kind | 0o666, number)
        print("ESCAPED: made a device")
    except OSError:
        pass
