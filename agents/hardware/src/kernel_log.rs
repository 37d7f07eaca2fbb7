//! The kernel's messages while a job runs: the records of `/dev/kmsg` from a position on. The start
//! is a position in the log and not a time, because the clocks of kernel and agent differ, and more
//! so on a host that was suspended.

use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Bytes that are read at once; the kernel's buffer is rarely larger.
const LOG_BYTES_MAX: usize = 2 << 20;

const RECORD_BYTES_MAX: usize = 8 * 1024;

/// Includes reads without a new record.
const READS_MAX: usize = 1 << 16;

/// The kernel log from the position at which this value was created.
#[derive(Debug)]
pub struct KernelLog(File);

impl KernelLog {
    /// Opens the log at its end. `root` is `/` except in tests. Fails if the log is missing or may
    /// not be read.
    pub fn from_now(root: &Path) -> io::Result<Self> {
        let nonblocking = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let path = root.join("dev/kmsg");
        let mut file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self(file))
    }

    /// Returns the text added since the last call, one line for each record. Never waits.
    pub fn read_new_lines(&self) -> String {
        kernel_text(&read_records(&self.0))
    }
}

fn read_records(mut log: impl Read) -> Vec<u8> {
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; RECORD_BYTES_MAX]);
    for _ in 0..READS_MAX {
        match log.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            // The next record was overwritten: continue with the oldest available one.
            Err(error)
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            // No new record is available.
            Err(_) => break,
        }
        if bytes.len() >= LOG_BYTES_MAX {
            break;
        }
    }
    bytes
}

/// Returns the texts of records such as `6,1234,5678901,-;text`, which may be followed by property
/// lines that begin with a space. Records that programs wrote are omitted, because their content is
/// arbitrary.
fn kernel_text(records: &[u8]) -> String {
    let records = String::from_utf8_lossy(records);
    let own = records.lines().filter_map(|line| {
        let (head, text) = line.split_once(';')?;
        let priority: u32 = head.split(',').next()?.parse().ok()?;
        (priority >> FACILITY_SHIFT == 0).then_some(text)
    });
    own.collect::<Vec<_>>().join("\n")
}

/// The rest of a priority is the facility, and 0 is the kernel.
const FACILITY_SHIFT: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    #[test]
    fn only_later_kernel_records_are_read_and_each_only_once() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("dev/kmsg");
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(&path, "3,1,100,-;GPU reset begin!\n").unwrap();
        let log = KernelLog::from_now(root.path()).unwrap();
        assert_eq!(log.read_new_lines(), "");
        let mut kernel = OpenOptions::new().append(true).open(&path).unwrap();
        kernel
            .write_all(b"4,2,200,-;ring gfx timeout; again\n SUBSYSTEM=pci\n30,3,201,-;systemd: oom-kill:\n")
            .unwrap();
        assert_eq!(log.read_new_lines(), "ring gfx timeout; again");
        assert_eq!(log.read_new_lines(), "");
    }

    #[test]
    fn no_log_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        let error = KernelLog::from_now(root.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
    }

    /// Records as the device returns them: one for each read, an error if one was lost or none is
    /// left.
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
        assert_eq!(kernel_text(&read_records(device)), "one\ntwo");
    }

    #[test]
    fn a_log_without_end_is_read_to_a_bound() {
        assert!(read_records(io::repeat(b'x')).len() < LOG_BYTES_MAX + RECORD_BYTES_MAX);
    }

    proptest! {
        #[test]
        fn no_bytes_upset_it(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            kernel_text(&bytes);
        }
    }
}
