"""One process that wants all memory."""
kept = []
while True:
    kept.append(bytearray(b"x" * (8 << 20)))
    print("reached", 8 * len(kept), "MiB", flush=True)
