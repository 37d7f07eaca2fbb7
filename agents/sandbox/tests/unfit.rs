//! Hosts that cannot contain programs, as far as one host can imitate them.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::process::Command;

use requirements::{ordinary_user_command, require_namespaces, require_root};

/// Returns the error of opening a sandbox after `preparation`, by a user who is root of a namespace
/// only. Records this test as skipped and returns `None` if this host does not allow that.
fn open_after(preparation: &str) -> Option<String> {
    if !require_namespaces() {
        return None;
    }
    let script = format!("{preparation} && exec \"$0\" open");
    let cell = env!("CARGO_BIN_EXE_sandbox-cell");
    let arguments = ["--user", "--map-root-user", "--mount", "sh", "-c", &script, cell];
    let output = ordinary_user_command("unshare").args(arguments).output().unwrap();
    assert!(output.stdout.is_empty(), "{output:?}");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    Some(String::from_utf8(output.stderr).unwrap())
}

#[test]
fn without_user_namespaces_it_names_the_setting() {
    let Some(said) = open_after("echo 0 > /proc/sys/user/max_user_namespaces") else { return };
    assert!(said.contains("namespaces: No space left"), "{said}");
    assert!(said.contains("sysctl -w user.max_user_namespaces"), "{said}");
}

#[test]
fn where_parts_of_proc_are_hidden_it_says_so() {
    // As container runtimes do.
    let Some(said) = open_after("mount -t tmpfs none /proc/sys") else { return };
    assert!(said.contains("private /proc: "), "{said}");
}

#[test]
fn root_that_cannot_become_anybody_else_is_refused() {
    if !require_root() {
        return;
    }
    let arguments = ["--user", "--map-root-user", env!("CARGO_BIN_EXE_sandbox-cell"), "open"];
    let output = Command::new("unshare").args(arguments).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("there is no user to become"), "{said}");
}
