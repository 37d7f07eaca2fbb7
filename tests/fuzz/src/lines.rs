//! Parts of an input.

/// Splits an input into its first line and the rest.
pub(crate) fn split_first_line(input: &[u8]) -> (&[u8], &[u8]) {
    match input.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (input, &[]),
    }
}

/// Splits a line `subject payload`.
pub(crate) fn split_fact(line: &[u8]) -> Option<(&str, &[u8])> {
    let end = line.iter().position(|byte| *byte == b' ')?;
    Some((std::str::from_utf8(&line[..end]).ok()?, &line[end + 1..]))
}
