//! Hosts as their sysfs and procfs show them, and the doctor's findings. Each is a file in
//! `fixtures/` that names the sources of its values: most are composed.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use doctor::Severity;
use hardware::{
    HardwareProfile,
    host_files::{CapturedEntry, HostCapture, LiveFiles},
    host_snapshot::{DeviceAccess, HostSnapshot},
};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fixture {
    about: String,
    origin: String,
    /// Another fixture that it is based on.
    from: Option<String>,
    #[serde(default)]
    files: BTreeMap<String, String>,
    #[serde(default)]
    links: BTreeMap<String, String>,
    #[serde(default)]
    devices: BTreeMap<String, Device>,
    expect: Expected,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Device {
    Usable,
    Denied,
    Absent,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    profile: String,
    /// The HIP ordinal of the main GPU.
    hip: Option<u32>,
    pci: Option<String>,
    /// In the printed form: `C-22 warn`.
    findings: Vec<String>,
    withheld: Vec<String>,
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn load(name: &str) -> Fixture {
    let text = std::fs::read_to_string(directory().join(name)).unwrap();
    let own: Fixture =
        serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
    let Some(base) = own.from.as_deref().map(load) else { return own };
    let (mut files, mut links, mut devices) = (base.files, base.links, base.devices);
    files.extend(own.files);
    links.extend(own.links);
    devices.extend(own.devices);
    Fixture { files, links, devices, ..own }
}

fn all() -> Vec<(String, Fixture)> {
    let entries = std::fs::read_dir(directory()).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert!(names.len() > 12, "{names:?}");
    names.into_iter().map(|name| (name.clone(), load(&name))).collect()
}

fn capture(fixture: &Fixture) -> HostCapture {
    let mut capture = HostCapture::default();
    let mut names: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for mut path in fixture.files.keys().chain(fixture.links.keys()).map(String::as_str) {
        while let Some((parent, name)) = path.rsplit_once('/') {
            names.entry(parent).or_default().insert(name);
            path = parent;
        }
    }
    for (path, names) in names {
        let names = names.into_iter().map(str::to_owned).collect();
        capture.entries.insert(path.to_owned(), CapturedEntry::Names(names));
    }
    for (path, text) in &fixture.files {
        capture.entries.insert(path.clone(), CapturedEntry::File(text.clone().into_bytes()));
    }
    for (path, target) in &fixture.links {
        capture.entries.insert(path.clone(), CapturedEntry::Link(target.clone()));
    }
    for (path, device) in &fixture.devices {
        let seen = match device {
            Device::Usable => CapturedEntry::Usable,
            Device::Denied => CapturedEntry::Failed(13),
            Device::Absent => continue,
        };
        capture.entries.insert(path.clone(), seen);
    }
    capture
}

fn findings(box_: &HostSnapshot) -> Vec<String> {
    let found = doctor::check_host(box_, &HardwareProfile::for_host(box_).unwrap());
    let word = |severity| match severity {
        Severity::Fail => "fail",
        Severity::Warn => "warn",
        Severity::Info => "info",
    };
    found.iter().map(|finding| format!("{} {}", finding.id, word(finding.severity))).collect()
}

fn withheld(box_: &HostSnapshot) -> Vec<&'static str> {
    let cannot = |role: &&str| {
        doctor::worst_severity(&doctor::findings_for_role(box_, role)) == Some(Severity::Fail)
    };
    ["trainer", "generator", "verifier", "evaluator"].into_iter().filter(cannot).collect()
}

#[test]
fn each_host_fixture_gets_its_expected_findings() {
    for (name, fixture) in all() {
        let box_ = HostSnapshot::take_snapshot(&capture(&fixture));
        let expected = &fixture.expect;
        let told = format!("{name} ({}, {})", fixture.about, fixture.origin.trim());
        assert_eq!(HardwareProfile::for_host(&box_).unwrap().name, expected.profile, "{told}");
        assert_eq!(box_.main_gpu().map(|gpu| gpu.ordinal), expected.hip, "{told}");
        if let Some(pci) = &expected.pci {
            assert_eq!(box_.main_gpu().map(|gpu| &gpu.pci), Some(pci), "{told}");
        }
        assert_eq!(findings(&box_), expected.findings, "{told}");
        assert_eq!(withheld(&box_), expected.withheld, "{told}");
    }
}

#[test]
fn every_fixture_names_the_source_of_its_values() {
    for (name, fixture) in all() {
        let origin = fixture.origin.trim();
        let is_told = origin.starts_with("composed") || origin.starts_with("captured");
        assert!(is_told, "{name}: {origin}");
    }
}

/// The same files below a root on the disk. A device cannot be denied to the tests' own user.
#[test]
fn a_tree_on_the_disk_is_seen_as_its_capture_is() {
    for (name, fixture) in all() {
        let root = tempfile::tempdir().unwrap();
        let place = |path: &str| root.path().join(path.trim_start_matches('/'));
        for (path, target) in &fixture.links {
            let link = place(path);
            let directory = link.parent().unwrap();
            std::fs::create_dir_all(directory).unwrap();
            std::fs::create_dir_all(directory.join(target)).unwrap();
            std::os::unix::fs::symlink(target, &link).unwrap();
        }
        for (path, text) in &fixture.files {
            std::fs::create_dir_all(place(path).parent().unwrap()).unwrap();
            std::fs::write(place(path), text).unwrap();
        }
        let live = LiveFiles::new(root.path())
            .with_python(&place("/@python/bin/python"))
            .with_home(&place("/@home"));
        let without_devices = |mut box_: HostSnapshot| {
            box_.kfd = DeviceAccess::Absent;
            box_.gpus.iter_mut().for_each(|gpu| gpu.render = DeviceAccess::Absent);
            box_
        };
        let seen = without_devices(HostSnapshot::take_snapshot(&live));
        assert_eq!(
            seen,
            without_devices(HostSnapshot::take_snapshot(&capture(&fixture))),
            "{name}"
        );
    }
}

#[test]
fn the_page_of_checks_is_the_catalogue() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/DOCTOR.md");
    let page = std::fs::read_to_string(path).unwrap();
    for line in doctor::render_page().lines() {
        assert!(page.lines().any(|found| found == line), "docs/DOCTOR.md lacks: {line}");
    }
    let rows = page.lines().filter(|line| line.starts_with("| C-")).count();
    assert_eq!(rows, doctor::CHECKS.len(), "docs/DOCTOR.md has rows of its own");
}

/// Ids are searched in the sources: a check without a row, or a row without its check, fails.
#[test]
fn the_catalogue_has_every_check_and_no_other() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut used = BTreeSet::new();
    let mut waiting = vec![sources];
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                waiting.push(path);
            } else if !["catalogue.rs", "tests.rs"].contains(&name.as_str()) {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
                let ids = code.split('"').filter(|word| word.starts_with("C-") && word.len() == 4);
                used.extend(ids.map(str::to_owned));
            }
        }
    }
    let is_finding = |check: &&doctor::DoctorCheck| {
        ["fail", "warn", "info"].iter().any(|severity| check.how.starts_with(severity))
    };
    let catalogued: BTreeSet<String> =
        doctor::CHECKS.iter().filter(is_finding).map(|check| check.id.to_owned()).collect();
    assert_eq!(used, catalogued);
}
