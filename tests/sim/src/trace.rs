//! A log of all events as a hash, and optionally as text.

/// The FNV-1a hash of all events, so that two simulations of a seed can be compared.
#[derive(Debug, Clone)]
pub(crate) struct Trace {
    hash: u64,
    print: bool,
}

impl Trace {
    pub(crate) fn new(print: bool) -> Self {
        Self { hash: 0xcbf2_9ce4_8422_2325, print }
    }

    pub(crate) fn record_event(&mut self, at_ms: u64, what: &dyn std::fmt::Display) {
        let line = format!("{at_ms} {what}");
        for byte in line.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.print {
            println!("{:>10.3} s  {what}", std::time::Duration::from_millis(at_ms).as_secs_f64());
        }
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }
}
