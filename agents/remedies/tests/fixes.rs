//! Fixes of a host below a directory: applied, interrupted and undone.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use doctor::{Fix, FixChange, FixEffect};
use remedies::{FixJournal, FixStep, HostRoot, apply_fixes, undo_fixes};

const GRUB: &str = "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet\"\n\n# end without a line break";

fn write(path: &str, content: &str) -> FixChange {
    FixChange::Write { path: path.to_owned(), content: content.to_owned() }
}

fn run(command: &str, undo: &str) -> FixChange {
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    FixChange::Run { command: words(command), undo: words(undo) }
}

fn fix(changes: Vec<FixChange>) -> Fix {
    let summary = "edit grub".to_owned();
    Fix { ids: vec!["C-22"], summary, changes, takes_effect: FixEffect::Reboot }
}

/// A directory with a file of grub that only its owner may read.
struct TestHost {
    directory: tempfile::TempDir,
    ran: Vec<String>,
    fails: &'static str,
}

impl TestHost {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("root/etc/default")).unwrap();
        let host = Self { directory, ran: Vec::new(), fails: "" };
        fs::write(host.path("etc/default/grub"), GRUB).unwrap();
        let private = fs::Permissions::from_mode(0o640);
        fs::set_permissions(host.path("etc/default/grub"), private).unwrap();
        host
    }

    fn path(&self, below: &str) -> std::path::PathBuf {
        self.directory.path().join("root").join(below)
    }

    fn with_root<T>(&mut self, act: impl FnOnce(&mut HostRoot<'_>) -> T) -> T {
        let (root, state) =
            (self.directory.path().join("root"), self.directory.path().join("state"));
        let Self { ran, fails, .. } = self;
        let mut run = |words: &[String]| {
            let line = words.join(" ");
            ran.push(line.clone());
            if line == *fails { anyhow::bail!("it failed") } else { Ok(()) }
        };
        act(&mut HostRoot { root: &root, state: &state, run: &mut run })
    }

    fn journal(&self) -> FixJournal {
        FixJournal::read(&self.directory.path().join("state")).unwrap()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn an_applied_fix_is_undone_byte_for_byte() {
    let mut host = TestHost::new();
    let fixes = [fix(vec![
        write("/etc/default/grub", "changed\n"),
        write("/etc/sysctl.d/90-flotilla.conf", "vm.swappiness = 10\n"),
        run("update-grub", "update-grub"),
        run("sysctl -w vm.swappiness=10", "sysctl -w vm.swappiness=60"),
        FixChange::Manual("look".to_owned()),
    ])];
    host.with_root(|root| apply_fixes(root, &fixes)).unwrap();
    let (grub, sysctl) =
        (host.path("etc/default/grub"), host.path("etc/sysctl.d/90-flotilla.conf"));
    assert_eq!(fs::read_to_string(&grub).unwrap(), "changed\n");
    assert_eq!((mode(&grub), mode(&sysctl)), (0o640, 0o644));
    assert_eq!(host.ran, ["update-grub", "sysctl -w vm.swappiness=10"]);
    assert_eq!(host.journal().records.len(), 1);
    host.ran.clear();
    let undone = host.with_root(undo_fixes).unwrap();
    assert_eq!(undone, ["edit grub"]);
    assert_eq!(fs::read_to_string(&grub).unwrap(), GRUB);
    assert_eq!(mode(&grub), 0o640);
    assert!(!sysctl.exists());
    assert_eq!(host.ran, ["update-grub", "sysctl -w vm.swappiness=60"]);
    assert_eq!(host.journal(), FixJournal::default());
    assert_eq!(host.with_root(undo_fixes).unwrap(), [""; 0], "a second time");
}

#[test]
fn a_fix_that_fails_half_way_is_undone_as_far_as_it_came() {
    let mut host = TestHost::new();
    host.fails = "update-grub";
    let changes = vec![
        write("/etc/default/grub", "changed\n"),
        run("update-grub", ""),
        write("/etc/never", "x"),
    ];
    let error = host.with_root(|root| apply_fixes(root, &[fix(changes)])).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("it failed") && text.contains("--undo"), "{text}");
    assert!(!host.path("etc/never").exists());
    host.with_root(undo_fixes).unwrap();
    assert_eq!(fs::read_to_string(host.path("etc/default/grub")).unwrap(), GRUB);
}

/// Returns for each command of the journal whether it has been run and not undone.
fn done_commands(journal: &FixJournal) -> Vec<bool> {
    let steps = journal.records.iter().flat_map(|record| &record.steps);
    let done = steps.filter_map(|step| match step {
        FixStep::Command { is_done, .. } => Some(*is_done),
        FixStep::File { .. } => None,
    });
    done.collect()
}

#[test]
fn a_command_that_did_not_succeed_blocks_no_undo() {
    let mut host = TestHost::new();
    host.fails = "usermod";
    let changes = vec![run("sysctl", "old"), run("usermod", "gpasswd")];
    host.with_root(|root| apply_fixes(root, &[fix(changes)])).unwrap_err();
    assert_eq!(done_commands(&host.journal()), [true, false]);
    host.ran.clear();
    host.fails = "gpasswd";
    host.with_root(undo_fixes).unwrap();
    assert_eq!(host.ran, ["old", "gpasswd"], "it may have been interrupted after its work");
    assert_eq!(host.journal(), FixJournal::default());
}

#[test]
fn an_undo_that_is_repeated_may_find_its_commands_undone() {
    let mut host = TestHost::new();
    let changes = vec![run("usermod", "gpasswd"), run("sysctl", "old")];
    host.with_root(|root| apply_fixes(root, &[fix(changes)])).unwrap();
    host.fails = "old";
    let error = format!("{:#}", host.with_root(undo_fixes).unwrap_err());
    assert!(error.contains("it failed"), "{error}");
    assert_eq!(done_commands(&host.journal()), [false, true]);
    // What is undone cannot be undone again; the rest now can.
    host.fails = "gpasswd";
    host.with_root(undo_fixes).unwrap();
    assert_eq!(host.ran, ["usermod", "sysctl", "gpasswd", "old", "gpasswd", "old"]);
    assert_eq!(host.journal(), FixJournal::default());
}

#[test]
fn a_restored_file_that_lost_its_mode_gets_it_back() {
    let mut host = TestHost::new();
    let fixes = [fix(vec![write("/etc/default/grub", "changed\n")])];
    host.with_root(|root| apply_fixes(root, &fixes)).unwrap();
    let grub = host.path("etc/default/grub");
    fs::write(&grub, GRUB).unwrap();
    fs::set_permissions(&grub, fs::Permissions::from_mode(0o644)).unwrap();
    host.with_root(undo_fixes).unwrap();
    assert_eq!((mode(&grub), fs::read_to_string(&grub).unwrap().as_str()), (0o640, GRUB));
}

#[test]
fn a_file_that_was_changed_since_is_left_alone_and_stays_in_the_journal() {
    let mut host = TestHost::new();
    let fixes = [fix(vec![write("/etc/default/grub", "changed\n")])];
    host.with_root(|root| apply_fixes(root, &fixes)).unwrap();
    let grub = host.path("etc/default/grub");
    fs::write(&grub, "the owner's\n").unwrap();
    let error = format!("{:#}", host.with_root(undo_fixes).unwrap_err());
    assert!(error.contains("was changed since") && error.contains("(A118)"), "{error}");
    assert_eq!(fs::read_to_string(&grub).unwrap(), "the owner's\n");
    assert_eq!(host.journal().records.len(), 1);
    // As it was before is as good as undone.
    fs::write(&grub, GRUB).unwrap();
    host.with_root(undo_fixes).unwrap();
    assert_eq!(host.journal(), FixJournal::default());
}

#[test]
fn a_link_and_a_file_that_is_no_text_are_refused_before_anything_is_written() {
    let mut host = TestHost::new();
    symlink(host.path("etc/default/grub"), host.path("etc/link")).unwrap();
    fs::write(host.path("etc/bytes"), [0xff, 0xfe]).unwrap();
    for path in ["/etc/link", "/etc/bytes"] {
        let error = host.with_root(|root| apply_fixes(root, &[fix(vec![write(path, "x")])]));
        error.unwrap_err();
    }
    assert_eq!(fs::read_to_string(host.path("etc/default/grub")).unwrap(), GRUB);
    assert_eq!(fs::read(host.path("etc/bytes")).unwrap(), [0xff, 0xfe]);
}

#[test]
fn a_damaged_journal_changes_nothing() {
    let mut host = TestHost::new();
    let state = host.directory.path().join("state");
    fs::create_dir_all(&state).unwrap();
    fs::write(state.join("fixes.json"), "{").unwrap();
    let fixes = [fix(vec![write("/etc/default/grub", "changed\n")])];
    let error = format!("{:#}", host.with_root(|root| apply_fixes(root, &fixes)).unwrap_err());
    assert!(error.contains("damaged"), "{error}");
    assert_eq!(fs::read_to_string(host.path("etc/default/grub")).unwrap(), GRUB);
}
