//! Commands that judge: what they see of the host, in the sandbox and allowed outside of it.

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use requirements::require_namespaces;
use serde_json::json;
use tempfile::TempDir;
use verifier::{OfflineVerifier, OwnerGrants, Toolchain, VerifierTools};
use wire::v1::{
    Verifier,
    verdicts::Verdict,
    verifier::{Command, How},
};

use crate::rig::{find_toolchain, item, judge_all, told};

const LONG_S: f64 = 30.0;

/// Directories of a host: an agent's credentials, and a place for judges.
pub(crate) struct Place {
    directory: TempDir,
}

impl Place {
    pub(crate) fn create() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        open_to_all(directory.path());
        let place = Self { directory };
        for part in ["credentials", "judges"] {
            fs::create_dir(place.path(part)).expect("a directory");
            open_to_all(&place.path(part));
        }
        // The file is readable for all, so only hiding protects it.
        fs::write(place.path("credentials/key.nk"), "SUSECRET").expect("a key");
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().expect("it is there").join(name)
    }

    pub(crate) fn write_judge(&self, script: &str) -> String {
        let path = self.path("judges/judge");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
        open_to_all(&path);
        path.display().to_string()
    }

    /// Tests a host whose owner opened or allowed this. Records this test as skipped and returns
    /// `None` if the machine cannot contain programs.
    pub(crate) fn tested(&self, paths: &[PathBuf], commands: &[PathBuf]) -> Option<Toolchain> {
        if !require_namespaces() {
            return None;
        }
        let hidden = vec![self.path("credentials")];
        let grants = OwnerGrants::from_flags(paths, commands, &hidden).expect("they are there");
        let (toolchain, tested) =
            find_toolchain(VerifierTools::default(), hidden, grants).test_host();
        assert!(tested.contained.is_ok(), "there are namespaces, but no sandbox: {tested:?}");
        assert_eq!(tested.unmasked, None);
        Some(toolchain)
    }
}

pub(crate) fn open_to_all(path: &Path) {
    fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("its mode is set");
}

pub(crate) fn shell(script: &str) -> Vec<String> {
    ["sh", "-c", script].map(str::to_owned).to_vec()
}

fn judge(toolchain: &Toolchain, argv: Vec<String>, paths: &[&str], timeout_s: f64) -> Verdict {
    let paths = paths.iter().map(|&path| path.to_owned()).collect();
    let how = How::Command(Command { argv, timeout_s, paths, ..Command::default() });
    let mut item = item("2+2=", "4", json!({}));
    item.answer = Some("4".into());
    judge_all(toolchain.clone(), how, &[item]).remove(0)
}

/// Returns a script whose verdict's detail has one word for each line of `script`.
fn telling(script: &str) -> String {
    format!(
        "exec 2>/dev/null\nfound=$({script})\nprintf '{{\"outcome\":\"pass\",\"detail\":\"%s\"}}' \"$(echo $found)\""
    )
}

#[test]
fn it_sees_the_completion_and_its_word_counts() {
    let Some(toolchain) = Place::create().tested(&[], &[]) else { return };
    let script = r#"grep -q '"completion":"4"' && echo '{"outcome":"pass","reward":0.7}'"#;
    let verdict = judge(&toolchain, shell(script), &[], LONG_S);
    assert_eq!(told(&verdict), ("pass", 0.7, ""));
    let verdict =
        judge(&toolchain, shell(r#"echo '{"outcome":"fail","detail":"no"}'"#), &[], LONG_S);
    assert_eq!(told(&verdict), ("fail", 0.0, "no"));
}

#[test]
fn whatever_it_does_wrong_is_an_error_never_a_reward_of_zero() {
    let place = Place::create();
    let script = place.write_judge("exec sh -c \"$1\"");
    let Some(contained) = place.tested(&[], &[]) else { return };
    let Some(allowed) = place.tested(&[], &[script.clone().into()]) else { return };
    let cases = [
        ("exit 3", "it ended with"),
        ("echo oops >&2; exit 3", "oops"),
        ("echo hello", "it printed no verdict"),
        ("kill -9 $$", "ended"),
        ("yes", "it"),
        ("head -c 70000 /dev/zero", "it"),
        ("echo '{\"outcome\":\"pass\",\"reward\":1e999}'", "it"),
        ("sleep 60 & sleep 60", "it ran longer than"),
    ];
    let began = Instant::now();
    for (wrong, expected) in cases {
        for (toolchain, argv) in
            [(&contained, shell(wrong)), (&allowed, vec![script.clone(), wrong.to_owned()])]
        {
            let verdict = judge(toolchain, argv, &[], 2.0);
            let (outcome, _, detail) = told(&verdict);
            assert_eq!(outcome, "error", "{wrong}: {detail}");
            assert!(detail.contains(expected), "{wrong}: {detail}");
        }
    }
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn one_in_the_sandbox_reads_neither_the_kit_nor_the_agent_nor_the_network() {
    let place = Place::create();
    let Some(toolchain) = place.tested(&[place.path("judges")], &[]) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let (key, own) = (place.path("credentials/key.nk"), std::process::id());
    let script = telling(&format!(
        "cat {key}; cat /etc/shadow; cat /proc/{own}/cmdline /proc/{own}/environ; ls /root /home; \
         python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port})); print(1)'; \
         bash -c 'echo > /dev/tcp/127.0.0.1/{port} && echo connected'; echo end",
        key = key.display()
    ));
    let judge_path = place.write_judge(&script);
    for argv in [shell(&script), vec![judge_path]] {
        assert_eq!(told(&judge(&toolchain, argv, &[], LONG_S)), ("pass", 1.0, "end"));
    }
}

#[test]
fn a_spec_opens_nothing_that_the_owner_did_not() {
    let place = Place::create();
    let script = place.write_judge("cat \"$1\" >/dev/null && echo '{\"outcome\":\"pass\"}'");
    let data = place.path("data");
    fs::write(&data, "x").expect("a file");
    let (data, key) =
        (data.display().to_string(), place.path("credentials/key.nk").display().to_string());
    let argv = vec![script, data.clone()];

    let Some(closed) = place.tested(&[], &[]) else { return };
    let verdict = judge(&closed, argv.clone(), &[], LONG_S);
    let (outcome, _, detail) = told(&verdict);
    let flag = format!("--verifier-path {}", place.path("judges").display());
    assert!(outcome == "error" && detail.contains(&flag) && detail.contains("(V104)"), "{detail}");

    let open = place.tested(&[place.path("judges"), data.clone().into()], &[]).expect("as before");
    assert_eq!(told(&judge(&open, argv.clone(), &[], LONG_S)).0, "error", "the spec does not ask");
    assert_eq!(told(&judge(&open, argv.clone(), &[&data], LONG_S)).0, "pass");
    for (path, expected) in [
        (key.as_str(), "the agent's own directory"),
        ("/etc/shadow", "--verifier-path /etc/shadow"),
        ("/root", "--verifier-path /root"),
        ("/", "--verifier-path /"),
    ] {
        let verdict = judge(&open, argv.clone(), &[path], LONG_S);
        let (outcome, _, detail) = told(&verdict);
        assert!(outcome == "error" && detail.contains(expected), "{path}: {detail}");
    }
}

#[test]
fn an_allowed_one_runs_on_the_box_and_reads_neither_the_kit_nor_the_agent() {
    let place = Place::create();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let (credentials_path, own) = (place.path("credentials"), std::process::id());
    let credentials_path = credentials_path.display();
    let script = place.write_judge(&telling(&format!(
        "cat {credentials_path}/key.nk; ls {credentials_path}; umount {credentials_path} && echo unmounted; \
         unshare -rm sh -c 'umount {credentials_path}; cat {credentials_path}/key.nk'; \
         cat /proc/{own}/cmdline /proc/{own}/environ /proc/{own}/root{credentials_path}/key.nk; \
         env | grep FLOTILLA_; \
         bash -c 'echo > /dev/tcp/127.0.0.1/{port} && echo connected'; \
         grep -q 'CapEff:.*0000000000000000' /proc/self/status && echo powerless"
    )));
    let Some(toolchain) = place.tested(&[], &[script.clone().into()]) else { return };
    let expected =
        if Path::new("/bin/bash").exists() { "connected powerless" } else { "powerless" };
    assert_eq!(told(&judge(&toolchain, vec![script], &[], LONG_S)), ("pass", 1.0, expected));
    // A command that was not allowed is contained as before.
    let script = telling(&format!("cat {credentials_path}/key.nk; echo end"));
    assert_eq!(told(&judge(&toolchain, shell(&script), &[], LONG_S)), ("pass", 1.0, "end"));
}

#[test]
fn where_nothing_is_contained_only_what_was_allowed_runs() {
    let place = Place::create();
    let script = place.write_judge("touch \"$1\"; echo '{\"outcome\":\"pass\"}'");
    let ran = place.path("judges/ran").display().to_string();
    let hidden = vec![place.path("credentials")];
    let mut without = find_toolchain(VerifierTools::default(), hidden, OwnerGrants::default());
    // A sandbox that cannot be started.
    without.cell_launch.program = "/bin/false".into();
    let (without, tested) = without.test_host();
    assert!(tested.contained.is_err());
    let argv = vec![script, ran.clone()];
    let verdict = judge(&without, argv.clone(), &[], LONG_S);
    let (outcome, _, detail) = told(&verdict);
    assert!(outcome == "error" && detail.contains("--allow-command"), "{detail}");
    assert!(!Path::new(&ran).exists(), "it did not run");
    let how = How::Command(Command { argv, timeout_s: LONG_S, ..Command::default() });
    let once =
        OfflineVerifier::new(Verifier { how: Some(how) }, without, 1).expect("the settings work");
    let lacking = once.missing_needs(&[item("", "", json!({}))]);
    assert!(lacking.iter().any(|said| said.contains("(V104)")), "{lacking:?}");
}

#[test]
fn where_keys_cannot_be_hidden_nothing_is_run_outside_the_sandbox() {
    let place = Place::create();
    let script = place.write_judge("touch \"$1\"; echo '{\"outcome\":\"pass\"}'");
    let ran = place.path("judges/ran").display().to_string();
    let hidden = vec![place.path("credentials")];
    let grants =
        OwnerGrants::from_flags(&[], &[script.clone().into()], &hidden).expect("it is there");
    let mut without = find_toolchain(VerifierTools::default(), hidden, grants);
    without.masked_launch.program = "/bin/false".into();
    let (without, tested) = without.test_host();
    assert!(tested.unmasked.is_some());
    let verdict = judge(&without, vec![script, ran.clone()], &[], LONG_S);
    assert_eq!(told(&verdict).0, "error");
    assert!(!Path::new(&ran).exists(), "it did not run");
}

#[test]
fn one_that_leaves_something_behind_does_not_hold_the_others_up() {
    let place = Place::create();
    let leaving = "setsid sleep 30 & echo '{\"outcome\":\"pass\"}'";
    let script = place.write_judge(leaving);
    let Some(toolchain) = place.tested(&[], &[script.clone().into()]) else { return };
    let began = Instant::now();
    for argv in [shell(leaving), vec![script]] {
        assert_eq!(told(&judge(&toolchain, argv, &[], LONG_S)).0, "pass");
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}
