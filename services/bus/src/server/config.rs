//! What the managed nats-server is told, and the files of its directory.

use std::{
    fs::{self, File},
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
};

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::ServerOptions;

/// Lines of the log an error shows.
const TAIL_LINES: usize = 5;

/// Whose everything is on a server without accounts.
const OPEN_ACCOUNT: &str = "$G";

/// More than a few facts and what the server writes with them.
const PROBE_BYTES: usize = 1 << 20;

/// Chosen once and kept: peers reconnect only to addresses they know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ports {
    pub(super) client: u16,
    pub(super) monitor: u16,
}

impl Ports {
    pub(super) fn monitor_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.monitor)
    }
}

#[derive(Debug)]
pub(super) struct Files {
    pub(super) dir: PathBuf,
    pub(super) config: PathBuf,
    pub(super) ports: PathBuf,
    pub(super) log: PathBuf,
    /// What it says before it has a log.
    errors: PathBuf,
    pid: PathBuf,
}

/// The remembered ports, or free ones.
pub(super) fn ports(files: &Files, options: &ServerOptions) -> io::Result<Ports> {
    let remembered = fs::read(&files.ports).ok();
    let remembered = remembered.and_then(|text| serde_json::from_slice::<Ports>(&text).ok());
    let client = options.port.or(remembered.map(|ports| ports.client));
    let monitor = remembered.map(|ports| ports.monitor);
    // Both are held until both are known, so that they differ.
    let (free_client, free_monitor) = (free_port()?, free_port()?);
    Ok(Ports {
        client: client.map_or_else(|| port_of(&free_client), Ok)?,
        monitor: monitor.map_or_else(|| port_of(&free_monitor), Ok)?,
    })
}

fn free_port() -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

fn port_of(listener: &TcpListener) -> io::Result<u16> {
    Ok(listener.local_addr()?.port())
}

impl Files {
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

    pub(super) fn write_config(&self, ports: &Ports, options: &ServerOptions) -> io::Result<()> {
        let text = format!(
            r#"# Written by flotilla at every start; changes are lost.
server_name: flotilla
listen: "{listen}"
http: "127.0.0.1:{monitor}"
# Room for a job's samples in one fact.
max_payload: 8MB
max_connections: 8192
# A slow reader may lag behind by so much before it is cut off.
max_pending: 128MB
log_file: {log}
logfile_size_limit: 10MB
logfile_max_num: 5
jetstream {{
  store_dir: {store}
  max_memory_store: 256MB
  # An acknowledged fact is on disk. The default loses up to two minutes of them.
  sync_interval: always
}}
{closed}"#,
            listen = SocketAddr::new(options.listen, ports.client),
            closed = options.closed.as_ref().map_or("", |closed| &closed.config),
            monitor = ports.monitor,
            log = quoted(&self.log)?,
            store = quoted(&self.dir.join("store"))?,
        );
        write_whole(&self.config, text.as_bytes())
    }

    /// What was written before the server was closed is the account's from now on. A server keeps
    /// each account's streams in a directory of its own, and names them nowhere else.
    pub(super) fn adopt(&self, account: &str) -> io::Result<()> {
        let streams = self.dir.join("store/jetstream");
        let (open, closed) = (streams.join(OPEN_ACCOUNT), streams.join(account));
        if open.exists() && !closed.exists() {
            fs::rename(open, closed)?;
        }
        Ok(())
    }

    pub(super) fn remember(&self, ports: &Ports) -> io::Result<()> {
        write_whole(&self.ports, &serde_json::to_vec(ports)?)
    }

    pub(super) fn remember_pid(&self, pid: u32) -> io::Result<()> {
        write_whole(&self.pid, pid.to_string().as_bytes())
    }

    /// A server that an earlier process started here and that still runs.
    pub(super) fn leftover(&self) -> Option<Pid> {
        let pid = fs::read_to_string(&self.pid).ok()?.trim().parse().ok()?;
        let command_line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let ours = self.config.as_os_str().as_encoded_bytes();
        command_line.split(|byte| *byte == 0).any(|argument| argument == ours).then_some(())?;
        Pid::from_raw(pid)
    }

    /// Whether there is room for some facts.
    pub(super) fn can_be_written(&self) -> bool {
        let probe = self.dir.join("probe");
        let written = fs::write(&probe, [0; PROBE_BYTES]);
        // What cannot be removed is written over the next time.
        let _ = fs::remove_file(&probe);
        written.is_ok()
    }

    pub(super) fn open_errors(&self) -> io::Result<File> {
        File::create(&self.errors)
    }

    /// The last thing it said.
    pub(super) fn log_tail(&self) -> String {
        let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let said = read(&self.errors);
        let text = if said.trim().is_empty() { read(&self.log) } else { said };
        let lines: Vec<&str> = text.trim().lines().collect();
        lines[lines.len().saturating_sub(TAIL_LINES)..].join("; ")
    }
}

fn quoted(path: &Path) -> io::Result<String> {
    let text = path.to_str().filter(|text| !text.contains(['"', '\n', '\\']));
    text.map(|text| format!("\"{text}\"")).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidInput, "nats-server cannot have such a path")
    })
}

/// All of it or nothing, even over a crash.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(new, path)
}
