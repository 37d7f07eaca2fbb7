use std::{collections::BTreeMap, os::unix::fs::PermissionsExt};

use super::*;

/// A shell script in the program's place.
fn fake(directory: &Path, script: &str) -> LlamaServerSettings {
    let program = directory.join("llama-server");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    LlamaServerSettings {
        program,
        options: ProgramOptions::default(),
        device: None,
        environment: ProcessEnvironment::new(&BTreeMap::new(), &[]),
        mmap: true,
        threads: 2,
    }
}

fn started(directory: &Path, script: &str, limit: Duration) -> Result<(), LlamaServerError> {
    let private = directory.join("private");
    let serve = ServedModel {
        base: Path::new("/base.gguf"),
        adapters: &[],
        adapter_by_request: false,
        alias: None,
        slots: 2,
        context: 512,
        exact: false,
        directory: &private,
        states: &private,
    };
    LlamaServer::start(&fake(directory, script), &serve)?.wait_ready(limit, || {})
}

#[test]
fn a_server_that_ends_is_reported_with_its_last_output() {
    let directory = tempfile::tempdir().unwrap();
    let limit = Duration::from_secs(30);
    let script = "echo error: failed to load model >&2; exit 1";
    let error = started(directory.path(), script, limit).unwrap_err().to_string();
    assert!(error.contains("exit status: 1") && error.contains("failed to load model"), "{error}");
    let error = started(directory.path(), "exit 0", limit).unwrap_err().to_string();
    assert!(error.contains("before it was ready") && error.contains("nothing"), "{error}");
}

#[test]
fn a_server_that_is_never_ready_is_ended_though_it_floods_its_pipes() {
    let directory = tempfile::tempdir().unwrap();
    let pid = directory.path().join("pid");
    let script = format!("echo $$ > {}; while :; do echo loading; done", pid.display());
    let error = started(directory.path(), &script, Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, LlamaServerError::NotReady { .. }), "{error}");
    let pid = fs::read_to_string(pid).unwrap();
    assert!(!Path::new("/proc").join(pid.trim()).exists(), "it still runs");
}

#[test]
fn other_users_can_read_the_key_neither_in_its_file_nor_in_the_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let seen = directory.path().join("arguments");
    let script = format!("echo \"$@\" > {}; exit 1", seen.display());
    assert!(started(directory.path(), &script, Duration::from_secs(30)).is_err());
    let private = directory.path().join("private");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&private), mode(&private.join("key"))), (0o700, 0o600));
    let key = fs::read_to_string(private.join("key")).unwrap();
    let arguments = fs::read_to_string(seen).unwrap();
    assert_eq!(key.trim().len(), 64);
    assert!(!arguments.contains(key.trim()) && arguments.contains("--api-key-file"));
    assert!(arguments.contains("server.sock") && arguments.contains("--ctx-size 1024"));
}

#[test]
fn a_path_too_long_for_a_socket_is_served_on_a_port() {
    let directory = tempfile::tempdir().unwrap();
    assert!(matches!(choose_address(directory.path()).unwrap(), ServerAddress::Socket(_)));
    let deep = directory.path().join("d".repeat(SOCKET_PATH_MAX));
    assert!(matches!(choose_address(&deep).unwrap(), ServerAddress::Port(1..)));
}

#[test]
fn a_path_that_llama_cpp_would_take_apart_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let settings = fake(directory.path(), "exit 0");
    let serve = ServedModel {
        base: Path::new("/base.gguf"),
        adapters: &["/a:0.5,b.gguf".into()],
        adapter_by_request: false,
        alias: None,
        slots: 1,
        context: 512,
        exact: false,
        directory: directory.path(),
        states: directory.path(),
    };
    let error = LlamaServer::start(&settings, &serve).unwrap_err().to_string();
    assert!(error.contains("/a:0.5,b.gguf"), "{error}");
}
