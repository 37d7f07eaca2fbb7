//! What the kernel says while a job runs: the records of `/dev/kmsg` from a moment on.
//!
//! The moment is a place in the log and no time: the kernel's clock and ours differ, and a box
//! that slept has a third.

use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The kernel's own buffer is rarely larger; more is not read.
const BYTES_MAX: usize = 2 << 20;

/// A record is never longer.
const RECORD_BYTES_MAX: usize = 8 * 1024;

/// Looks, those that found nothing new included.
const READS_MAX: usize = 1 << 16;

/// The log from the moment this was made.
#[derive(Debug)]
pub struct KernelLog(File);

impl KernelLog {
    /// From now on. `root` is `/` but for tests.
    ///
    /// # Errors
    /// When it may not be read, or there is none.
    pub fn from_now(root: &Path) -> io::Result<Self> {
        let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let path = root.join("dev/kmsg");
        let mut file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self(file))
    }

    /// What was added since it was last asked, a line a record. Never waits.
    pub fn added(&self) -> String {
        text(&read(&self.0))
    }
}

fn read(mut log: impl Read) -> Vec<u8> {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; RECORD_BYTES_MAX]);
    for _ in 0..READS_MAX {
        match log.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            // What was to come next has been overwritten: on with the oldest that is left.
            Err(error)
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            // Nothing new, or nothing more to be had.
            Err(_) => break,
        }
        if bytes.len() >= BYTES_MAX {
            break;
        }
    }
    bytes
}

/// `6,1234,5678901,-;text`, and lines of properties that begin with a space. What programs
/// wrote there is left out: they may say anything.
fn text(records: &[u8]) -> String {
    let records = String::from_utf8_lossy(records);
    let own = records.lines().filter_map(|line| {
        let (head, text) = line.split_once(';')?;
        let priority: u32 = head.split(',').next()?.parse().ok()?;
        (priority >> FACILITY_SHIFT == 0).then_some(text)
    });
    own.collect::<Vec<_>>().join("\n")
}

/// Below are the eight levels; facility 0 is the kernel.
const FACILITY_SHIFT: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    #[test]
    fn only_what_the_kernel_adds_from_then_on_is_read_and_only_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("dev/kmsg");
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(&path, "3,1,100,-;GPU reset begin!\n").unwrap();
        let log = KernelLog::from_now(root.path()).unwrap();
        assert_eq!(log.added(), "");
        let mut kernel = OpenOptions::new().append(true).open(&path).unwrap();
        kernel
            .write_all(b"4,2,200,-;ring gfx timeout; again\n SUBSYSTEM=pci\n30,3,201,-;systemd: oom-kill:\n")
            .unwrap();
        assert_eq!(log.added(), "ring gfx timeout; again");
        assert_eq!(log.added(), "");
    }

    #[test]
    fn no_log_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let error = KernelLog::from_now(root.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    /// Records as the device gives them: one a read, an error where one was lost or none is left.
    struct Device(Vec<io::Result<&'static [u8]>>);

    impl Read for Device {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let record = self.0.pop().unwrap_or_else(|| Err(ErrorKind::WouldBlock.into()))?;
            buffer[..record.len()].copy_from_slice(record);
            Ok(record.len())
        }
    }

    #[test]
    fn a_record_that_was_overwritten_is_passed_over() {
        let lost = Err(ErrorKind::BrokenPipe.into());
        let device = Device(vec![Ok(b"6,3,3,-;two\n"), lost, Ok(b"6,1,1,-;one\n")]);
        assert_eq!(text(&read(device)), "one\ntwo");
    }

    #[test]
    fn a_log_without_end_is_read_to_a_bound() {
        assert!(read(io::repeat(b'x')).len() < BYTES_MAX + RECORD_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn no_bytes_upset_it(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            text(&bytes);
        }
    }
}
