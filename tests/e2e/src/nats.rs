//! A nats-server that the test starts, and the configurations of `deploy/nats`.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use requirements::free_ports;

use crate::wait_until;

/// A nats-server that ends when it is dropped.
pub struct NatsServer {
    child: Child,
    port: u16,
}

impl NatsServer {
    pub fn start(arguments: &[&str]) -> Self {
        let port = free_ports::<1>()[0];
        let mut command = Command::new(server_program());
        command.args(["-a", "127.0.0.1", "-p", &port.to_string()]).args(arguments);
        Self::spawn(command.stderr(Stdio::null()), port)
    }

    /// Starts a server with one of the configurations that `copy_configs` wrote to `home`.
    pub fn start_with_config(home: &Path, config: &str, port: u16) -> Self {
        let log = File::create(home.join("said")).expect("a log");
        let mut command = Command::new(server_program());
        // Relative paths in the configuration start here, as in the systemd unit.
        command.current_dir(home).args(["--config", config]).stderr(log);
        Self::spawn(&mut command, port)
    }

    fn spawn(command: &mut Command, port: u16) -> Self {
        let child = command.spawn().expect("a nats-server starts");
        let server = Self { child, port };
        wait_until("the nats-server listens", Duration::from_secs(20), || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()
        });
        server
    }

    /// Kills the server with SIGKILL and waits for its end.
    pub fn kill(mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("our own process can be killed");
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies the files of `deploy/nats` and the keys to `home` and replaces these texts. Panics if one
/// of the texts is in none of the files.
pub fn copy_configs(home: &Path, keys: &Path, replaced: &[(&str, String)]) {
    fs::create_dir_all(home.join("keys")).expect("a directory");
    let mut found = vec![false; replaced.len()];
    for (from, to) in [(deploy_directory(), home.to_owned()), (keys.to_owned(), home.join("keys"))]
    {
        for entry in fs::read_dir(from).expect("a directory") {
            let path = entry.expect("a file").path();
            if path.is_dir() {
                continue;
            }
            let copy = to.join(path.file_name().expect("a name"));
            // Keeps the mode.
            fs::copy(&path, &copy).expect("a file");
            let mut text = fs::read_to_string(&path).expect("text");
            for (number, (old, new)) in replaced.iter().enumerate() {
                found[number] |= text.contains(old);
                text = text.replace(old, new);
            }
            fs::write(copy, text).expect("a file");
        }
    }
    assert!(found.iter().all(|found| *found), "not there: {replaced:?}");
}

/// Returns `deploy/nats`. Its own `keys` give everybody access.
pub fn deploy_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nats")
}

/// The server that `deploy/fetch-nats-server.sh` fetched, or one on PATH.
pub fn server_program() -> PathBuf {
    if let Some(path) = std::env::var_os("FLOTILLA_NATS_SERVER") {
        return path.into();
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/nats-server");
    if fetched.exists() { fetched } else { "nats-server".into() }
}
