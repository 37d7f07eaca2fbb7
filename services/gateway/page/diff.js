// Compares two texts line by line. Pure functions.

/** The maximum size of the table; longer texts are only compared at equal line numbers. */
const CELLS_MAX = 250_000;

/** The lines of `text`; `same` is true for lines that `other` has in the same order. */
export function lines(text, other) {
  const [ours, theirs] = [text.split("\n"), other.split("\n")];
  const same = ours.length * theirs.length > CELLS_MAX
    ? ours.map((line, at) => line === theirs[at])
    : common(ours, theirs);
  return ours.map((line, at) => ({ line, same: same[at] }));
}

/** Marks the lines of the longest common subsequence. */
function common(ours, theirs) {
  const width = theirs.length + 1;
  const table = new Uint32Array((ours.length + 1) * width);
  for (let a = ours.length - 1; a >= 0; a--) {
    for (let b = theirs.length - 1; b >= 0; b--) {
      const here = a * width + b;
      table[here] = ours[a] === theirs[b]
        ? table[here + width + 1] + 1
        : Math.max(table[here + width], table[here + 1]);
    }
  }
  const same = ours.map(() => false);
  for (let a = 0, b = 0; a < ours.length && b < theirs.length; ) {
    if (ours[a] === theirs[b]) same[a++] = Boolean(++b);
    else if (table[(a + 1) * width + b] >= table[a * width + b + 1]) a++;
    else b++;
  }
  return same;
}
