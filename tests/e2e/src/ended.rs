//! A child process that ends with its test.

use std::process::Child;

/// Kills the process when it is dropped, and waits for its end.
#[derive(Debug)]
pub struct ChildGuard(pub Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
