"""The order of the examples, the same as in the embedded engine, so that losses are comparable.

The random numbers are SplitMix64 streams, seeded with the seed XOR the BLAKE3 hash of "epoch N".
"""

import struct

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1

# BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020) for texts of at most one block.
_IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
    0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_COLUMNS_AND_DIAGONALS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
_ONE_BLOCK = 0b1011  # chunk start, chunk end, root
_BLOCK_BYTES = 64


def blake3_u64(text):
    """Returns the first eight bytes of the BLAKE3 hash, little-endian. Takes at most 64 bytes."""
    data = text.encode()
    if len(data) > _BLOCK_BYTES:
        raise ValueError(f"{text!r} is longer than one block")
    words = list(struct.unpack("<16I", data.ljust(_BLOCK_BYTES, b"\0")))
    state = [*_IV, *_IV[:4], 0, 0, len(data), _ONE_BLOCK]
    for _ in range(7):
        for pair, places in enumerate(_COLUMNS_AND_DIAGONALS):
            _mix(state, *places, words[2 * pair], words[2 * pair + 1])
        words = [words[place] for place in _PERMUTATION]
    low, high = (state[place] ^ state[place + 8] for place in (0, 1))
    return low | high << 32


def _mix(v, a, b, c, d, x, y):
    def rotate(value, bits):
        return (value >> bits | value << (32 - bits)) & _MASK32

    v[a] = (v[a] + v[b] + x) & _MASK32
    v[d] = rotate(v[d] ^ v[a], 16)
    v[c] = (v[c] + v[d]) & _MASK32
    v[b] = rotate(v[b] ^ v[c], 12)
    v[a] = (v[a] + v[b] + y) & _MASK32
    v[d] = rotate(v[d] ^ v[a], 8)
    v[c] = (v[c] + v[d]) & _MASK32
    v[b] = rotate(v[b] ^ v[c], 7)


def _splitmix(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def epoch_order(seed, epoch, count):
    """Returns a random permutation of range(count), by the Fisher-Yates shuffle."""
    state = _splitmix(seed ^ blake3_u64(f"epoch {epoch}"))
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        other = (_splitmix(state) * (last + 1)) >> 64
        order[last], order[other] = order[other], order[last]
    return order


class StepSampler:
    """A batch sampler with one batch per optimizer step, for the steps from `first` to `end`. Each
    epoch visits every example once; its last batch may be smaller. With a `unit` of 2, count and
    batch size are in pairs."""

    def __init__(self, count, batch_size, end, seed, unit=1, first=0):
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.unit, self.steps = unit, range(first, end)

    def __len__(self):
        return len(self.steps)

    def __iter__(self):
        per_epoch = steps_per_epoch(self.count, self.batch_size)
        order = []
        for step in self.steps:
            epoch, place = divmod(step, per_epoch)
            if place == 0 or not order:
                order = epoch_order(self.seed, epoch, self.count)
            chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
            yield [one * self.unit + side for one in chosen for side in range(self.unit)]


def steps_per_epoch(count, batch_size):
    return -(-count // batch_size)
