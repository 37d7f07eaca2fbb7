//! A nats-server that is not ours: started as any user may start one.

use std::{
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
        let port = free_port();
        let child = Command::new(program())
            .args(["-a", "127.0.0.1", "-p", &port.to_string()])
            .args(arguments)
            .stderr(Stdio::null())
            .spawn()
            .expect("a nats-server starts");
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

fn free_port() -> u16 {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr());
    free.expect("a free port").port()
}

/// The one that `deploy/fetch-nats-server.sh` fetched, or one on PATH.
pub(crate) fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("FLOTILLA_NATS_SERVER") {
        return path.into();
    }
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/nats-server");
    if fetched.exists() { fetched } else { "nats-server".into() }
}
