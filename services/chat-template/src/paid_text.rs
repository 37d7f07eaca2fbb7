//! Text that a template pays for before it grows. minijinja charges for a result once it is there,
//! and lists that repeat have any length.

use std::{fmt, io};

use minijinja::Error;

/// As minijinja charges.
pub(crate) const BYTES_PER_FUEL: usize = 64;

/// A piece costs as much as so many bytes more, because some texts are written letter by letter.
const PIECE_BYTES: usize = 16;

/// A text, and what pays for it.
pub(crate) struct PaidText<'a> {
    pay: &'a dyn Fn(u64) -> Result<(), Error>,
    text: Vec<u8>,
    unpaid: usize,
    refused: Option<Error>,
}

impl<'a> PaidText<'a> {
    /// Starts a text. `pay` takes fuel, and fails if there is none.
    pub(crate) fn new(pay: &'a dyn Fn(u64) -> Result<(), Error>) -> Self {
        Self { pay, text: Vec::new(), unpaid: 0, refused: None }
    }

    /// Returns the text; the error of `pay` if it could not be paid.
    pub(crate) fn into_text(self) -> Result<String, Error> {
        match self.refused {
            Some(error) => Err(error),
            None => Ok(String::from_utf8_lossy(&self.text).into_owned()),
        }
    }

    /// Returns false if the bytes cannot be paid, and are not added.
    fn push_bytes(&mut self, bytes: &[u8]) -> bool {
        self.unpaid += bytes.len() + PIECE_BYTES;
        if let Err(error) = (self.pay)((self.unpaid / BYTES_PER_FUEL) as u64) {
            self.refused.get_or_insert(error);
            return false;
        }
        self.unpaid %= BYTES_PER_FUEL;
        self.text.extend_from_slice(bytes);
        true
    }
}

impl fmt::Write for PaidText<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.push_bytes(text.as_bytes()) { Ok(()) } else { Err(fmt::Error) }
    }
}

impl io::Write for PaidText<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.push_bytes(bytes) {
            true => Ok(bytes.len()),
            false => Err(io::Error::other("the template is out of fuel")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
