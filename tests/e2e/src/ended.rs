//! A program that ends with its test.

use std::process::Child;

/// Killed when dropped, and waited for.
#[derive(Debug)]
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
