"""Fills every place that can be written to."""
total = 0
for number, place in enumerate(("/room/work", "/tmp", "/dev/shm", "/var/tmp")):
    try:
        with open(f"{place}/fill{number}", "wb", buffering=0) as file:
            while True:
                total += file.write(b"x" * (1 << 20))
    except OSError:
        pass
print("wrote", total)
