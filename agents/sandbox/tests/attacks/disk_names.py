"""Fills the room with names rather than bytes."""
count = 0
try:
    while count < 10_000_000:
        open(f"f{count}", "w").close()
        count += 1
except OSError:
    pass
print("made", count)
