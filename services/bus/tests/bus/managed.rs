//! The managed server child process.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Stdio, time::Duration};

use bus::server::{ManagedServer, NatsBinaryError, ServerOptions, ServerStartError};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::timeout,
};

use crate::rig::{PATIENCE, Rig, control, until};

const HELPER_DIR: &str = "FLOTILLA_TEST_HELPER_DIR";

fn running(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[tokio::test]
async fn a_directory_serves_one_server_and_the_port_is_kept() {
    let dir = TempDir::new().unwrap();
    let options = ServerOptions::new(dir.path());
    let mut server = ManagedServer::start(&options).await.unwrap();
    let error = ManagedServer::start(&options).await.unwrap_err();
    assert!(matches!(error, ServerStartError::InUse { .. }), "{error:?}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    let (port, pid) = (server.client_port(), server.process_id());
    server.stop().await;
    assert!(!running(pid));
    server.restart().await.unwrap();
    assert_eq!(server.client_port(), port);
    let pid = server.process_id();
    drop(server);
    let server = ManagedServer::start(&options).await.unwrap();
    assert_eq!(server.client_port(), port, "peers know this port");
    assert!(!running(pid), "two servers on one store");
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = TempDir::new().unwrap();
    let mut options = ServerOptions::new(dir.path());
    options.port = Some(taken.local_addr().unwrap().port());
    let error = ManagedServer::start(&options).await.unwrap_err();
    assert!(
        matches!(error, ServerStartError::PortTaken { port, .. } if Some(port) == options.port)
    );
}

#[tokio::test]
async fn a_server_that_is_too_old_or_none_at_all_is_refused() {
    let dir = TempDir::new().unwrap();
    let fake = |name: &str, body: &str| {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    };
    let mut options = ServerOptions::new(dir.path().join("data"));
    options.binary = Some(fake("old", "echo nats-server: v2.10.1"));
    let error = ManagedServer::start(&options).await.unwrap_err();
    assert!(matches!(error, ServerStartError::Binary(NatsBinaryError::TooOld { .. })), "{error:?}");
    for part in ["2.10.1", "2.11", "fetch-nats-server.sh"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    for binary in [fake("odd", "echo hello"), Path::new("/nonexistent").to_owned()] {
        options.binary = Some(binary);
        let error = ManagedServer::start(&options).await.unwrap_err();
        assert!(
            matches!(error, ServerStartError::Binary(NatsBinaryError::Broken { .. })),
            "{error:?}"
        );
    }
    let dies = "[ $1 = --version ] && echo nats-server: v2.15.1 || { echo no luck >&2; exit 3; }";
    options.binary = Some(fake("dies", dies));
    let error = ManagedServer::start(&options).await.unwrap_err();
    assert!(error.to_string().contains("no luck"), "{error}");
}

#[tokio::test]
async fn an_unexpected_end_is_noticed() {
    let (mut rig, bus) = Rig::start().await;
    bus.publish_fact(&control(1, "x")).await.unwrap();
    assert!(timeout(Duration::from_millis(50), rig.server.wait()).await.is_err());
    rig.kill().await;
    rig.server.restart().await.unwrap();
    bus.publish_fact(&control(2, "x")).await.unwrap();
}

#[tokio::test]
async fn the_child_dies_with_us_and_its_directory_is_free_again() {
    let dir = TempDir::new().unwrap();
    let mut helper = Command::new(std::env::current_exe().unwrap())
        .args(["managed::helper_process", "--exact", "--ignored", "--nocapture"])
        .env(HELPER_DIR, dir.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(helper.stdout.take().unwrap()).lines();
    let child = loop {
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
        if let Some(pid) = line.split("child ").nth(1) {
            break pid.trim().parse().unwrap();
        }
    };
    assert!(running(child));
    helper.start_kill().unwrap();
    helper.wait().await.unwrap();
    until("the child is gone", async || !running(child)).await;
    ManagedServer::start(&ServerOptions::new(dir.path())).await.unwrap();
}

#[tokio::test]
#[ignore = "run by the_child_dies_with_us"]
async fn helper_process() {
    let Some(dir) = std::env::var_os(HELPER_DIR) else { return };
    let server = ManagedServer::start(&ServerOptions::new(dir)).await.unwrap();
    println!("\nchild {}", server.process_id());
    std::future::pending::<()>().await;
}
