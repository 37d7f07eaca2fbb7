//! A nats-server that is not ours: started as any user may start one.

use std::{
    fs::{self, File},
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::until;

/// Ends with the test.
pub struct NatsServer {
    child: Child,
    port: u16,
}

impl NatsServer {
    /// # Panics
    /// When it does not come up.
    pub fn start(arguments: &[&str]) -> Self {
        let port = free_ports::<1>()[0];
        let mut command = Command::new(program());
        command.args(["-a", "127.0.0.1", "-p", &port.to_string()]).args(arguments);
        Self::spawn(command.stderr(Stdio::null()), port)
    }

    /// One of `deploy/nats` that was laid out in `home`, and listens there on `port`.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start_in(home: &Path, config: &str, port: u16) -> Self {
        let said = File::create(home.join("said")).expect("a log");
        let mut command = Command::new(program());
        // Paths in it count from here, as they do from the unit's directory.
        command.current_dir(home).args(["--config", config]).stderr(said);
        Self::spawn(&mut command, port)
    }

    fn spawn(command: &mut Command, port: u16) -> Self {
        let child = command.spawn().expect("a nats-server starts");
        let server = Self { child, port };
        until("the nats-server listens", Duration::from_secs(20), || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()
        });
        server
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

/// The files of `deploy/nats` as on a server's host, with these in place of others; each must be
/// in some file.
///
/// # Panics
/// When one is not, or a file cannot be copied.
pub fn lay_out(home: &Path, keys: &Path, replaced: &[(&str, String)]) {
    fs::create_dir_all(home.join("keys")).expect("a directory");
    let mut found = vec![false; replaced.len()];
    for (from, to) in [(deployed(), home.to_owned()), (keys.to_owned(), home.join("keys"))] {
        for entry in fs::read_dir(from).expect("a directory") {
            let path = entry.expect("a file").path();
            if path.is_dir() {
                continue;
            }
            let copy = to.join(path.file_name().expect("a name"));
            // With its mode.
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

/// `deploy/nats`, whose own `keys` let everybody in.
pub fn deployed() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/nats")
}

/// As many free ports of this machine, all different.
///
/// # Panics
/// When there are none.
pub fn free_ports<const N: usize>() -> [u16; N] {
    let held: [TcpListener; N] =
        std::array::from_fn(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));
    held.map(|one| one.local_addr().expect("an address").port())
}

/// The one that `deploy/fetch-nats-server.sh` fetched, or one on PATH.
pub(crate) fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("FLOTILLA_NATS_SERVER") {
        return path.into();
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/nats-server");
    if fetched.exists() { fetched } else { "nats-server".into() }
}
