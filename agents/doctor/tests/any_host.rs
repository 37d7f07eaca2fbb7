//! The snapshot and the checks of a host whose files contain anything.

use doctor::TrainingPlan;
use hardware::{
    HardwareProfile,
    host_files::{CapturedEntry, HostFiles, NameFilter, RecordingFiles},
    host_snapshot::HostSnapshot,
};
use proptest::prelude::*;

/// Possible and impossible contents of a kernel file.
fn content() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        "(simd_count|gfx_target_version|vendor_id|location_id|size_in_bytes) [0-9]{1,25}\n"
            .prop_map(String::into_bytes),
        "[0-9]{1,25}\n".prop_map(String::into_bytes),
        "[a-zA-Z=:. -]{0,80}".prop_map(String::into_bytes),
        any::<u32>().prop_map(|version| {
            format!("simd_count 8\ngfx_target_version {version}\nvendor_id 4098\n").into_bytes()
        }),
    ]
}

fn captured_entry() -> impl Strategy<Value = CapturedEntry> {
    prop_oneof![
        4 => content().prop_map(CapturedEntry::File),
        2 => proptest::collection::vec("[a-z0-9.-]{1,12}", 0..4).prop_map(CapturedEntry::Names),
        1 => ".{0,20}".prop_map(CapturedEntry::Link),
        1 => any::<u64>().prop_map(CapturedEntry::Free),
        1 => Just(CapturedEntry::Usable),
        1 => any::<i32>().prop_map(CapturedEntry::Failed),
    ]
}

/// Answers every read with one of these entries, chosen by the path alone.
struct Anything(Vec<CapturedEntry>);

impl Anything {
    fn of(&self, path: &str) -> Option<&CapturedEntry> {
        let sum = path.bytes().fold(7_usize, |sum, byte| sum.wrapping_mul(31) + byte as usize);
        self.0.get(sum % (self.0.len() + 1))
    }
}

impl HostFiles for Anything {
    fn read(&self, path: &str) -> std::io::Result<Vec<u8>> {
        match self.of(path) {
            Some(CapturedEntry::File(bytes)) => Ok(bytes.clone()),
            _ => Err(std::io::Error::from_raw_os_error(2)),
        }
    }

    fn list_filtered(&self, path: &str, keep: NameFilter) -> Vec<String> {
        let few = ["0", "1", "rocm-7.2", "lib", "python3.12", "torch", "7", "vram_9"];
        let named = match self.of(path) {
            Some(CapturedEntry::Names(names)) => names.clone(),
            _ => few.map(str::to_owned).to_vec(),
        };
        named.into_iter().filter(|name| keep(name)).collect()
    }

    fn open_device(&self, path: &str) -> std::io::Result<()> {
        match self.of(path) {
            Some(CapturedEntry::Usable) => Ok(()),
            Some(CapturedEntry::Failed(number)) => Err(std::io::Error::from_raw_os_error(*number)),
            _ => Err(std::io::Error::from_raw_os_error(2)),
        }
    }

    fn check_permission(&self, path: &str) -> std::io::Result<()> {
        self.open_device(path)
    }

    fn read_link(&self, path: &str) -> Option<String> {
        match self.of(path) {
            Some(CapturedEntry::Link(link)) => Some(link.clone()),
            _ => None,
        }
    }

    fn free_bytes(&self, path: &str) -> Option<u64> {
        match self.of(path) {
            Some(CapturedEntry::Free(bytes)) => Some(*bytes),
            _ => None,
        }
    }
}

proptest! {
    /// Covers the checks too; a capture gives the same snapshot.
    #[test]
    fn no_input_makes_the_probe_panic(answers in proptest::collection::vec(captured_entry(), 1..12)) {
        let files = Anything(answers);
        let recording = RecordingFiles::new(&files);
        let seen = HostSnapshot::take_snapshot(&recording);
        prop_assert_eq!(&HostSnapshot::take_snapshot(&recording.into_capture()), &seen);
        let profile = HardwareProfile::for_host(&seen).unwrap();
        doctor::check_host(&seen, &profile);
        for role in ["trainer", "verifier"] {
            doctor::findings_for_role(&seen, role);
        }
        doctor::check_plan(&seen, &profile, &TrainingPlan::default());
    }
}
