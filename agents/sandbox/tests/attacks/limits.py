"""Raises its own limits, and its parent's."""
import resource

for name in ("NPROC", "FSIZE", "DATA", "NOFILE", "CORE", "CPU"):
    limit = getattr(resource, "RLIMIT_" + name)
    for pid in (0, 1):
        try:
            if pid:
                resource.prlimit(pid, limit, (1, 1))
            else:
                resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            print("ESCAPED: limit", name, "of", pid)
        except (OSError, ValueError):
            pass
