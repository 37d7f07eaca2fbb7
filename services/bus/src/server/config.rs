//! The configuration of the managed nats-server, and the files of its directory.

use std::{
    fs::{self, File},
    hash::{BuildHasher, RandomState},
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    ops::Range,
    path::{Path, PathBuf},
};

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::ServerOptions;

const TAIL_LINES: usize = 5;

/// Owns all streams on a server without accounts.
const OPEN_ACCOUNT: &str = "$G";

/// Bytes of the file that tests whether the disk is writable: more than a few facts and the server's
/// overhead need.
const PROBE_BYTES: usize = 1 << 20;

/// Below the ports that Linux gives to outgoing connections (from 32 768). A program could hold one
/// of those when the server starts again.
const KEPT_PORTS: Range<u16> = 10_000..32_000;

/// The mode of written files, limited by the umask.
const FILE_MODE: u32 = 0o666;

/// Chosen once and kept, because peers reconnect only to addresses they know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ServerPorts {
    pub(super) client: u16,
    pub(super) monitor: u16,
}

impl ServerPorts {
    pub(super) fn monitor_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitor)
    }
}

#[derive(Debug)]
pub(super) struct ServerFiles {
    pub(super) dir: PathBuf,
    pub(super) config: PathBuf,
    pub(super) ports: PathBuf,
    pub(super) log: PathBuf,
    /// The server's stderr, used before it has opened its log.
    errors: PathBuf,
    pid: PathBuf,
}

/// Returns the saved ports, or free ones. A port in `options` has priority.
pub(super) fn choose_ports(
    files: &ServerFiles,
    options: &ServerOptions,
) -> io::Result<ServerPorts> {
    let remembered = fs::read(&files.ports).ok();
    let remembered = remembered.and_then(|text| serde_json::from_slice::<ServerPorts>(&text).ok());
    let client = options.port.or(remembered.map(|ports| ports.client));
    let monitor = remembered.map(|ports| ports.monitor);
    // Hold both until both are known, so that they differ.
    let (free_client, free_monitor) = (bind_free_port()?, bind_free_port()?);
    Ok(ServerPorts {
        client: client.map_or_else(|| bound_port(&free_client), Ok)?,
        monitor: monitor.map_or_else(|| bound_port(&free_monitor), Ok)?,
    })
}

/// Binds a random free port of `KEPT_PORTS`, or any free one if a hundred of those are taken.
fn bind_free_port() -> io::Result<TcpListener> {
    let first = RandomState::new().hash_one(std::process::id());
    let ports = (0..100).map(|n| first.wrapping_add(n) % KEPT_PORTS.len() as u64);
    let mut free = ports
        .filter_map(|n| KEPT_PORTS.start.checked_add(u16::try_from(n).ok()?))
        .filter_map(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok());
    free.next().map_or_else(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)), Ok)
}

fn bound_port(listener: &TcpListener) -> io::Result<u16> {
    Ok(listener.local_addr()?.port())
}

impl ServerFiles {
    pub(super) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            config: dir.join("nats-server.conf"),
            ports: dir.join("ports.json"),
            log: dir.join("nats-server.log"),
            errors: dir.join("nats-server.stderr"),
            pid: dir.join("nats-server.pid"),
        }
    }

    pub(super) fn write_config(
        &self,
        ports: &ServerPorts,
        options: &ServerOptions,
    ) -> io::Result<()> {
        let text = format!(
            r#"# Written by flotilla at every start; changes are lost.
server_name: flotilla
listen: "{listen}"
http: "127.0.0.1:{monitor}"
# Room for a job's samples in one fact.
max_payload: 8MB
max_connections: 8192
# How far a slow reader may lag behind before it is disconnected.
max_pending: 128MB
log_file: {log}
logfile_size_limit: 10MB
logfile_max_num: 5
jetstream {{
  store_dir: {store}
  max_memory_store: 256MB
  # An acknowledged fact is on disk. The default loses up to two minutes of them.
  sync_interval: always
  # What may wait for the disk. A member that floods the log delays others by as much.
  max_buffered_msgs: 1024
}}
{closed}"#,
            listen = SocketAddr::new(options.listen, ports.client),
            closed = options.closed_fleet.as_ref().map_or("", |closed| &closed.config),
            monitor = ports.monitor,
            log = quote_path(&self.log)?,
            store = quote_path(&self.dir.join("store"))?,
        );
        durable_files::replace_file(&self.config, text.as_bytes(), FILE_MODE)
    }

    /// Moves the streams of an open fleet to `account` when the fleet becomes closed. A server
    /// keeps each account's streams in a directory of its own and records the owner nowhere else.
    pub(super) fn move_open_streams(&self, account: &str) -> io::Result<()> {
        let streams = self.dir.join("store/jetstream");
        let (open, closed) = (streams.join(OPEN_ACCOUNT), streams.join(account));
        if open.exists() && !closed.exists() {
            fs::rename(open, closed)?;
        }
        Ok(())
    }

    pub(super) fn save_ports(&self, ports: &ServerPorts) -> io::Result<()> {
        durable_files::replace_file(&self.ports, &serde_json::to_vec(ports)?, FILE_MODE)
    }

    /// A later process uses it to find a leftover server.
    pub(super) fn save_pid(&self, pid: u32) -> io::Result<()> {
        durable_files::replace_file(&self.pid, pid.to_string().as_bytes(), FILE_MODE)
    }

    /// Returns a server that an earlier process started here and that still runs.
    pub(super) fn find_leftover(&self) -> Option<Pid> {
        let pid = fs::read_to_string(&self.pid).ok()?.trim().parse().ok()?;
        let command_line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let ours = self.config.as_os_str().as_encoded_bytes();
        command_line.split(|byte| *byte == 0).any(|argument| argument == ours).then_some(())?;
        Pid::from_raw(pid)
    }

    /// Tests whether 1 MiB can be written.
    pub(super) fn is_writable(&self) -> bool {
        let probe = self.dir.join("probe");
        let written = fs::write(&probe, [0; PROBE_BYTES]);
        // If the file cannot be removed, the next probe overwrites it.
        let _ = fs::remove_file(&probe);
        written.is_ok()
    }

    pub(super) fn create_stderr_file(&self) -> io::Result<File> {
        File::create(&self.errors)
    }

    /// Returns the last five lines of the server's stderr, or of its log if stderr is empty.
    pub(super) fn read_log_tail(&self) -> String {
        let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let stderr = read(&self.errors);
        let text = if stderr.trim().is_empty() { read(&self.log) } else { stderr };
        let lines: Vec<&str> = text.trim().lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("; ")
    }
}

/// Fails if the path is not UTF-8 or contains quotes, backslashes or newlines.
fn quote_path(path: &Path) -> io::Result<String> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\n', '\\']));
    text.map(|text| format!("\"{text}\"")).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "nats-server cannot have such a path")
    })
}
