//! Garage, a server that others wrote, with the configuration that `deploy/garage` installs.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use requirements::free_ports;
use tempfile::TempDir;

use crate::{BUCKET, client_variables};

const CONFIGURATION: &str = include_str!("../../../deploy/garage/garage.toml");
const START_LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A Garage process with one node and one bucket on free loopback ports. It is killed when it is
/// dropped.
pub struct GarageServer {
    process: Child,
    address: SocketAddr,
    directory: TempDir,
}

impl GarageServer {
    /// Starts this garage program and waits until it listens.
    ///
    /// # Errors
    /// If it cannot be started or ends at once; the error contains its log.
    pub fn start(program: &Path) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        let ports: [u16; 3] = free_ports();
        let configuration = CONFIGURATION
            .replace("/var/lib/garage", &directory.path().display().to_string())
            .replace("[::]:3900", &format!("127.0.0.1:{}", ports[0]))
            .replace("127.0.0.1:3901", &format!("127.0.0.1:{}", ports[1]))
            .replace("127.0.0.1:3903", &format!("127.0.0.1:{}", ports[2]));
        let path = directory.path().join("garage.toml");
        fs::write(&path, configuration)?;
        let log = File::create(directory.path().join("log"))?;
        let process = Command::new(program)
            .arg("-c")
            .arg(path)
            .args(["server", "--single-node", "--default-bucket"])
            .env("GARAGE_RPC_SECRET", "ab".repeat(32))
            .env("GARAGE_DEFAULT_ACCESS_KEY", access_key())
            .env("GARAGE_DEFAULT_SECRET_KEY", secret_key())
            .env("GARAGE_DEFAULT_BUCKET", BUCKET)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[0]));
        let mut server = Self { process, address, directory };
        server.wait_until_listening()?;
        Ok(server)
    }

    /// Returns the URL for `Store::open`.
    pub fn url(&self) -> String {
        format!("s3://{BUCKET}/store")
    }

    /// Returns the environment variables that a client needs.
    pub fn env(&self) -> BTreeMap<String, String> {
        client_variables(self.address, &access_key(), &secret_key(), "garage")
    }

    fn wait_until_listening(&mut self) -> io::Result<()> {
        let began = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            let ended = self.process.try_wait()?;
            if ended.is_some() || began.elapsed() > START_LIMIT {
                let log = fs::read_to_string(self.directory.path().join("log"))?;
                return Err(io::Error::other(format!("garage does not listen: {ended:?}\n{log}")));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for GarageServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a key in the form that Garage accepts.
fn access_key() -> String {
    format!("GK{}", "12".repeat(12))
}

fn secret_key() -> String {
    "34".repeat(32)
}
