//! The lines that a process has not read yet.

/// Bytes that wait to be written to a process.
#[derive(Debug, Default)]
pub(crate) struct UnsentLines {
    bytes: Vec<u8>,
    /// The number of `bytes` that are written already.
    written: usize,
}

impl UnsentLines {
    /// Adds a line, and drops the written bytes if they are more than the others.
    pub(crate) fn push_line(&mut self, line: &[u8]) {
        // Each byte is moved only after as many bytes were written.
        if self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
        self.bytes.extend_from_slice(line);
    }

    /// Returns the bytes to write next.
    pub(crate) fn remaining_bytes(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Records that the first `bytes` of the remaining ones were written.
    pub(crate) fn record_written(&mut self, bytes: usize) {
        self.written = self.written.saturating_add(bytes).min(self.bytes.len());
        if self.written == self.bytes.len() {
            self.bytes.clear();
            self.written = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backlog_that_never_empties_keeps_few_written_bytes() {
        let mut unsent = UnsentLines::default();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for number in 0..1000_u32 {
            let line = format!("request {number}\n");
            sent.extend_from_slice(line.as_bytes());
            unsent.push_line(line.as_bytes());
            // One byte always remains.
            let bytes = unsent.remaining_bytes().len() - 1;
            received.extend_from_slice(&unsent.remaining_bytes()[..bytes]);
            unsent.record_written(bytes);
            assert!(unsent.bytes.len() < 100, "{} bytes are kept", unsent.bytes.len());
        }
        received.extend_from_slice(unsent.remaining_bytes());
        unsent.record_written(1);
        assert!(received == sent && unsent.remaining_bytes().is_empty());
    }
}
