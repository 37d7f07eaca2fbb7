//! Random mutations of inputs. The same seed gives the same mutations.

/// A SplitMix64 generator (Steele, Lea and Flood, 2014).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, or 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next_u64() % (end.max(1) as u64)).expect("below a usize")
    }

    fn choose<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

/// Replacements for numbers and other JSON values.
const VALUES: [&str; 24] = [
    "0",
    "-0",
    "-1",
    "1",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "1e308",
    "-1e308",
    "1e999",
    "5e-324",
    "0.1",
    "\"18446744073709551615\"",
    "\"4294967295\"",
    "\"NaN\"",
    "\"Infinity\"",
    "\"-Infinity\"",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
];

/// Replacements for strings.
const TEXTS: [&str; 14] = [
    "",
    " ",
    ".",
    "..",
    "../../etc/passwd",
    "/",
    "*",
    ">",
    "a.b",
    "\\u0000",
    "\\ud800",
    "\u{202e}\u{feff}é🦀",
    "b3:0000000000000000000000000000000000000000000000000000000000000000",
    "9999-12-31T23:59:60.999999999Z",
];

const INTEGERS: [u64; 8] =
    [0, 1, 1 << 24, (1 << 31) - 1, 1 << 32, 1 << 40, u64::MAX >> 1, u64::MAX];

/// Longer inputs only need more time.
const INPUT_BYTES_MAX: usize = 64 << 10;

/// Returns `input` with up to four mutations, which may insert parts of `other`.
pub fn mutate_input(input: &[u8], other: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random.below(4) {
        mutate(&mut bytes, other, random);
        bytes.truncate(INPUT_BYTES_MAX);
    }
    bytes
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    match random.below(16) {
        0 => flip(bytes, random),
        1 => bytes.truncate(at),
        2 => {
            let end = at + random.below(bytes.len() - at + 1);
            bytes.drain(at..end);
        }
        3 => {
            let noise: Vec<u8> = (0..random.below(16)).map(|_| random.next_u64() as u8).collect();
            insert(bytes, at, &noise);
        }
        4 => repeat(bytes, at, random),
        5 => splice(bytes, at, other, random),
        6 => move_line(bytes, random),
        7 => nest_value(bytes, random),
        8 => replace_integer(bytes, at, random),
        9 => replace_text(bytes, random),
        10 => {
            let long = random.choose(&["a", "0", "{\"a\":", "\n", "-", "€"]);
            insert(bytes, at, long.repeat(1 << random.below(13)).as_bytes());
        }
        _ => replace_number(bytes, random),
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, what: &[u8]) {
    bytes.splice(at..at, what.iter().copied());
}

fn flip(bytes: &mut [u8], random: &mut Random) {
    let at = random.below(bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn repeat(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let end = at + random.below((bytes.len() - at).min(256) + 1);
    let piece = bytes[at..end].repeat(1 + random.below(64));
    insert(bytes, at, &piece);
}

fn splice(bytes: &mut Vec<u8>, at: usize, other: &[u8], random: &mut Random) {
    let from = random.below(other.len() + 1);
    bytes.truncate(at);
    bytes.extend_from_slice(&other[from..]);
}

/// Moves a line, or copies it.
fn move_line(bytes: &mut Vec<u8>, random: &mut Random) {
    let mut lines: Vec<Vec<u8>> = bytes.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    let (from, to) = (random.below(lines.len()), random.below(lines.len()));
    let line = if random.below(2) == 0 { lines.remove(from) } else { lines[from].clone() };
    lines.insert(to.min(lines.len()), line);
    *bytes = lines.join(&b'\n');
}

/// Wraps a value in so many arrays or objects that a recursive parser overflows its stack.
fn nest_value(bytes: &mut Vec<u8>, random: &mut Random) {
    let (open, close) = if random.below(2) == 0 { ("[", "]") } else { ("{\"a\":", "}") };
    let depth = [2, 127, 129, 4000][random.below(4)];
    if let Some((start, end)) = find_token(bytes, random, b"0123456789.-+eE") {
        let inner = String::from_utf8_lossy(&bytes[start..end]).into_owned();
        let nested = format!("{}{inner}{}", open.repeat(depth), close.repeat(depth));
        bytes.splice(start..end, nested.into_bytes());
    }
}

/// Replaces a length or offset of a binary format, most likely in the first eight bytes.
fn replace_integer(bytes: &mut [u8], at: usize, random: &mut Random) {
    let at = if random.below(2) == 0 { 0 } else { at };
    let near = (bytes.len() as u64).wrapping_add(random.below(17) as u64).wrapping_sub(8);
    let value = if random.below(3) == 0 { near } else { INTEGERS[random.below(INTEGERS.len())] };
    let end = (at + 8).min(bytes.len());
    let start = at.min(end);
    bytes[start..end].copy_from_slice(&value.to_le_bytes()[..end - start]);
}

/// Replaces the text between two quotes.
fn replace_text(bytes: &mut Vec<u8>, random: &mut Random) {
    let quotes: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] == b'"').collect();
    if quotes.len() < 2 {
        return;
    }
    let first = random.below(quotes.len() - 1);
    let (start, end) = (quotes[first] + 1, quotes[first + 1]);
    let text = random.choose(&TEXTS);
    bytes.splice(start..end, text.bytes());
}

/// Replaces a number.
fn replace_number(bytes: &mut Vec<u8>, random: &mut Random) {
    let value = random.choose(&VALUES);
    if let Some((start, end)) = find_token(bytes, random, b"0123456789.-+eE") {
        bytes.splice(start..end, value.bytes());
    }
}

/// Finds a run of these bytes that begins with a digit, from a random position.
fn find_token(bytes: &[u8], random: &mut Random, of: &[u8]) -> Option<(usize, usize)> {
    let from = random.below(bytes.len());
    let digit = |at: &usize| bytes[*at].is_ascii_digit();
    let found = (from..bytes.len()).chain(0..from).find(digit)?;
    let start = (0..found).rev().take_while(|at| of.contains(&bytes[*at])).last().unwrap_or(found);
    let end = (found..bytes.len()).find(|at| !of.contains(&bytes[*at])).unwrap_or(bytes.len());
    Some((start, end))
}
