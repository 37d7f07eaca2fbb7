//! Stacks in a directory: installed, switched and rolled back.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::Path,
};

use stacks::{StackDirectory, StackPrograms};

/// Writes a directory with a program, a library and links to it.
fn write_llama_cpp(directory: &Path, version: &str) -> StackPrograms {
    let bin = directory.join(format!("build-{version}"));
    fs::create_dir_all(bin.join("backends")).unwrap();
    fs::write(bin.join("llama-server"), version).unwrap();
    fs::write(bin.join("backends/libvulkan.so"), "library").unwrap();
    fs::write(bin.join("libllama.so.1"), "library").unwrap();
    symlink("libllama.so.1", bin.join("libllama.so")).unwrap();
    symlink(bin.join("libllama.so.1"), bin.join("absolute.so")).unwrap();
    StackPrograms { llama_cpp: Some(bin), python: None }
}

#[test]
fn a_stack_is_switched_by_its_link_and_rolled_back() {
    let directory = tempfile::tempdir().unwrap();
    let stacks = StackDirectory::new(directory.path().join("stacks"));
    assert_eq!(stacks.list_stacks().unwrap(), []);
    assert_eq!(stacks.current_stack().unwrap(), None);
    for version in ["b1", "b2"] {
        let source = write_llama_cpp(directory.path(), version);
        stacks.install_stack(version, &source, None).unwrap();
        // The stack does not need what it was made of.
        fs::remove_dir_all(source.llama_cpp.unwrap()).unwrap();
    }
    stacks.roll_back().unwrap_err();
    stacks.use_stack("b1").unwrap();
    assert_eq!(stacks.roll_back().unwrap(), None, "the programs of the box");
    assert_eq!(stacks.current_stack().unwrap(), None);
    stacks.use_stack("b1").unwrap();
    stacks.use_stack("b2").unwrap();
    stacks.use_stack("b2").unwrap();
    let served = || {
        let current = stacks.current_stack().unwrap().unwrap();
        fs::read_to_string(current.programs.llama_cpp.unwrap().join("llama-server")).unwrap()
    };
    assert_eq!(served(), "b2");
    assert_eq!(stacks.roll_back().unwrap().as_deref(), Some("b1"));
    assert_eq!(served(), "b1");
    let marks = |it: &stacks::InstalledStack| (it.name.clone(), it.is_current, it.is_previous);
    let listed: Vec<_> = stacks.list_stacks().unwrap().iter().map(marks).collect();
    assert_eq!(listed, [("b1".into(), true, false), ("b2".into(), false, true)]);
    assert_eq!(stacks.roll_back().unwrap().as_deref(), Some("b2"), "and forward again");
    let copied = directory.path().join("stacks/b1/llama.cpp");
    assert_eq!(fs::read_link(copied.join("libllama.so")).unwrap(), Path::new("libllama.so.1"));
    assert_eq!(fs::read_to_string(copied.join("absolute.so")).unwrap(), "library");
    assert_eq!(fs::read_to_string(copied.join("backends/libvulkan.so")).unwrap(), "library");
}

#[test]
fn an_installation_is_whole_or_absent() {
    let directory = tempfile::tempdir().unwrap();
    let stacks = StackDirectory::new(directory.path().join("stacks"));
    let source = write_llama_cpp(directory.path(), "b1");
    let mut fail = |_: &Path| -> anyhow::Result<()> { anyhow::bail!("no network") };
    let error = stacks.install_stack("b1", &source, Some(&mut fail)).unwrap_err();
    assert_eq!(error.to_string(), "no network");
    assert_eq!(stacks.list_stacks().unwrap(), []);
    assert!(!directory.path().join("stacks/b1").exists());
    let mut make = |at: &Path| -> anyhow::Result<()> {
        fs::create_dir_all(at.join("bin"))?;
        Ok(fs::write(at.join("bin/python"), "")?)
    };
    let made = stacks.install_stack("b1", &source, Some(&mut make)).unwrap();
    assert_eq!(made.programs.python.unwrap(), directory.path().join("stacks/b1/python/bin/python"));
    let again = stacks.install_stack("b1", &source, None).unwrap_err().to_string();
    assert!(again.contains("exists") && again.contains("(A119)"), "{again}");
    // One that was interrupted is not listed.
    fs::create_dir(directory.path().join("stacks/b2")).unwrap();
    assert_eq!(stacks.list_stacks().unwrap().len(), 1);
    stacks.use_stack("b2").unwrap_err();
}

#[test]
fn an_interrupted_installation_does_not_block_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let stacks = StackDirectory::new(directory.path().join("stacks"));
    let source = write_llama_cpp(directory.path(), "b1");
    let left = directory.path().join("stacks/b1/llama.cpp");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("llama-server"), "a half").unwrap();
    fs::write(left.join("leftover"), "").unwrap();
    // One that is under way is no interrupted one.
    let other = File::open(directory.path().join("stacks")).unwrap();
    other.lock().unwrap();
    let error = stacks.install_stack("b1", &source, None).unwrap_err().to_string();
    assert!(error.contains("being installed") && error.contains("(A119)"), "{error}");
    assert!(left.join("leftover").exists());
    drop(other);
    stacks.install_stack("b1", &source, None).unwrap();
    assert_eq!(fs::read_to_string(left.join("llama-server")).unwrap(), "b1");
    assert!(!left.join("leftover").exists());
    assert!(!stacks.is_in_use("b1"));
    stacks.use_stack("b1").unwrap();
    assert!(stacks.is_in_use("b1") && !stacks.is_in_use("b2"));
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let stacks = StackDirectory::new(directory.path().join("stacks"));
    let source = write_llama_cpp(directory.path(), "b1");
    for name in ["", "..", "a/b", ".hidden", "current", "previous", "ü", &"x".repeat(65)] {
        let error = stacks.install_stack(name, &source, None).unwrap_err().to_string();
        assert!(error.contains("(A101)"), "{name}: {error}");
    }
    let nothing = stacks.install_stack("b1", &StackPrograms::default(), None).unwrap_err();
    assert!(nothing.to_string().contains("(A102)"), "{nothing}");
    let absent = StackPrograms { python: Some("/no/python".into()), llama_cpp: None };
    stacks.install_stack("b1", &absent, None).unwrap_err();
    assert_eq!(stacks.list_stacks().unwrap(), []);
}
