//! Inputs that hold several parts.

/// The first line, and what follows it.
pub(crate) fn head(input: &[u8]) -> (&[u8], &[u8]) {
    match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (input, &[]),
    }
}

/// A line `subject payload`, taken apart.
pub(crate) fn fact(line: &[u8]) -> Option<(&str, &[u8])> {
    let end = line.iter().position(|byte| *byte == b' ')?;
    Some((std::str::from_utf8(&line[..end]).ok()?, &line[end + 1..]))
}
