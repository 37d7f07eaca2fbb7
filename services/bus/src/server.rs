//! The managed nats-server: a child process with its own store directory, which keeps its port
//! across restarts and dies with this process. Knows nothing about facts.

mod binary;
mod config;
mod dir_lock;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use process::OwnedChild;
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

pub use self::binary::{NatsBinaryError, find_binary};
use self::{
    config::{ServerFiles, ServerPorts},
    dir_lock::DirLock,
};
use crate::monitor_http;

/// Recovery reads the whole store: 3 s for a million facts on an SSD.
const READY_LIMIT: Duration = Duration::from_secs(120);
const READY_POLL: Duration = Duration::from_millis(10);
/// A clean stop takes 0.4 s with a million facts.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const HEALTH_INTERVAL: Duration = Duration::from_secs(2);
const HEALTH_BAD_MAX: u32 = 3;
/// After SIGKILL only the kernel has work left.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Settings of the managed nats-server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Directory of this server alone: store, configuration, log and port.
    pub dir: PathBuf,
    /// `None`: `FLOTILLA_NATS_SERVER`, then PATH, then what is installed with the executable, then
    /// `.tools/nats-server` in the directories above the executable or the working directory.
    pub binary: Option<PathBuf>,
    /// `None`: a free port, chosen once and kept.
    pub port: Option<u16>,
    /// Loopback by default.
    pub listen: IpAddr,
    /// `None`: anyone who can reach the server may do everything.
    pub closed_fleet: Option<ClosedFleetConfig>,
}

/// Settings that restrict a server to the members of its fleet.
#[derive(Debug, Clone)]
pub struct ClosedFleetConfig {
    /// TLS and trusted keys, as a part of the server's configuration file.
    pub config: String,
    /// Public key of the account that owns the log.
    pub account: String,
}

impl ServerOptions {
    /// Returns the settings of an open server on loopback with a free port.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        let listen = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { dir: dir.into(), binary: None, port: None, listen, closed_fleet: None }
    }
}

/// A running nats-server. Dropping it kills the child process.
#[derive(Debug)]
pub struct ManagedServer {
    binary: PathBuf,
    files: ServerFiles,
    ports: ServerPorts,
    listen: IpAddr,
    closed: bool,
    child: OwnedChild,
    _lock: DirLock,
}

/// The reason why the nats-server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerStartError {
    #[error(transparent)]
    Binary(#[from] NatsBinaryError),
    #[error("use {} for a nats-server", dir.display())]
    Dir {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the fleet of {fleet} runs already: {} is in use by {holder}; stop it with \
         `flotilla down --dir {fleet}`, or choose another directory; `flotilla agent --dir {fleet} \
         --roles ROLE --name NAME` starts one more agent in it (B107)",
        dir.display(),
        fleet = dir.parent().unwrap_or(dir).display()
    )]
    InUse { dir: PathBuf, holder: String },
    #[error(
        "port {port} of the nats-server is taken by another program; stop that, or choose another \
         port (peers then need the new address); {} remembers the last one (B107)",
        remembered.display()
    )]
    PortTaken { port: u16, remembered: PathBuf },
    #[error("start {} (B106)", binary.display())]
    Spawn {
        binary: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the nats-server ended at once: {status} (B106); its log {} ends with: {tail}", log.display())]
    Exited { status: String, log: PathBuf, tail: String },
    #[error("the nats-server was not ready within {limit:?}; its log is {} (B106)", log.display())]
    NotReady { limit: Duration, log: PathBuf },
}

impl ManagedServer {
    /// Starts the child process and waits up to 120 s until JetStream answers. Locks the directory,
    /// ends a server left over by an earlier process, and writes the configuration first.
    ///
    /// # Errors
    /// Fails if no suitable binary is found, the directory or the port is taken, or the server does
    /// not become ready.
    pub async fn start(options: &ServerOptions) -> Result<Self, ServerStartError> {
        let dir_error = |source| ServerStartError::Dir { dir: options.dir.clone(), source };
        let binary = find_binary(options.binary.as_deref()).await?;
        durable_files::create_directory(&options.dir, 0o777).map_err(dir_error)?;
        let dir = options.dir.canonicalize().map_err(dir_error)?;
        let lock = match DirLock::acquire_lock(&dir).map_err(dir_error)? {
            Ok(lock) => lock,
            Err(holder) => return Err(ServerStartError::InUse { dir, holder }),
        };
        let files = ServerFiles::new(&dir);
        stop_leftover(&files).await?;
        let ports = config::choose_ports(&files, options).map_err(dir_error)?;
        files.write_config(&ports, options).map_err(dir_error)?;
        if let Some(closed) = &options.closed_fleet {
            files.move_open_streams(&closed.account).map_err(dir_error)?;
        }
        let child = launch_server(&binary, &files, &ports, options.listen).await?;
        files.save_ports(&ports).map_err(dir_error)?;
        let (listen, closed) = (options.listen, options.closed_fleet.is_some());
        Ok(Self { binary, files, ports, listen, closed, child, _lock: lock })
    }

    /// Returns the URL for clients on this machine.
    pub fn client_url(&self) -> String {
        let host = match self.listen {
            ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            ip => ip,
        };
        let scheme = if self.closed { "tls" } else { "nats" };
        format!("{scheme}://{}", SocketAddr::new(host, self.ports.client))
    }

    /// Returns the URL of the server's HTTP monitoring.
    pub fn monitor_url(&self) -> String {
        self.ports.monitor_url()
    }

    /// Returns the port for clients.
    pub fn client_port(&self) -> u16 {
        self.ports.client
    }

    /// Returns the id of the server's process.
    pub fn process_id(&self) -> u32 {
        self.child.process_id()
    }

    /// Returns the path of the log of the server.
    pub fn log_file(&self) -> &Path {
        &self.files.log
    }

    /// Waits until the child ends; returns at once if it has ended. Cancel-safe.
    pub async fn wait(&self) -> ExitStatus {
        self.child.wait().await
    }

    /// Waits until the server reports itself unhealthy three times in a row although its disk is
    /// writable, and returns its report. Cancel-safe.
    ///
    /// A stream whose write failed once refuses all further writes until the server is restarted.
    pub async fn wait_unhealthy(&self) -> String {
        let mut bad = 0;
        loop {
            sleep(HEALTH_INTERVAL).await;
            // A missing answer does not count: the server may be frozen or very busy.
            let health = monitor_http::get_response(&self.ports.monitor_url(), "/healthz").await;
            match health {
                Ok((status, body)) if status != 200 => {
                    bad += 1;
                    if bad >= HEALTH_BAD_MAX && self.files.is_writable() {
                        return String::from_utf8_lossy(&body).into_owned();
                    }
                }
                _ => bad = 0,
            }
        }
    }

    /// Starts the server again with the same port and data; stops it first if it runs.
    pub async fn restart(&mut self) -> Result<(), ServerStartError> {
        self.stop().await;
        self.child = launch_server(&self.binary, &self.files, &self.ports, self.listen).await?;
        Ok(())
    }

    /// Sends SIGTERM, then SIGKILL after 10 s.
    pub async fn stop(&mut self) {
        self.child.send_signal(Signal::TERM);
        if timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            tracing::warn!(pid = self.process_id(), "the nats-server ignores SIGTERM; killing it");
            self.child.send_signal(Signal::KILL);
            // A process that survives SIGKILL hangs in the kernel; there is no further remedy.
            let _ = timeout(KILL_LIMIT, self.child.wait()).await;
        }
    }
}

/// A server of an earlier process may still write its store.
async fn stop_leftover(files: &ServerFiles) -> Result<(), ServerStartError> {
    for (signal, limit) in [(Signal::TERM, STOP_LIMIT), (Signal::KILL, KILL_LIMIT)] {
        let deadline = Instant::now() + limit;
        let Some(pid) = files.find_leftover() else { return Ok(()) };
        tracing::warn!(pid = pid.as_raw_nonzero().get(), "ending a nats-server left behind here");
        // The process may have ended by itself.
        let _ = rustix::process::kill_process(pid, signal);
        while files.find_leftover().is_some() && Instant::now() < deadline {
            sleep(READY_POLL).await;
        }
    }
    match files.find_leftover() {
        None => Ok(()),
        Some(pid) => Err(ServerStartError::InUse {
            dir: files.dir.clone(),
            holder: format!("a nats-server that does not end (process {})", pid.as_raw_nonzero()),
        }),
    }
}

async fn launch_server(
    binary: &Path,
    files: &ServerFiles,
    ports: &ServerPorts,
    listen: IpAddr,
) -> Result<OwnedChild, ServerStartError> {
    for (ip, port) in [(listen, ports.client), (IpAddr::V4(Ipv4Addr::LOCALHOST), ports.monitor)] {
        if TcpListener::bind((ip, port)).is_err() {
            return Err(ServerStartError::PortTaken { port, remembered: files.ports.clone() });
        }
    }
    let spawn_error = |source| ServerStartError::Spawn { binary: binary.to_owned(), source };
    let errors = files.create_stderr_file().map_err(spawn_error)?;
    let mut command = std::process::Command::new(binary);
    command.arg("--config").arg(&files.config).current_dir(&files.dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    let child = OwnedChild::spawn(command).await.map_err(spawn_error)?;
    files.save_pid(child.process_id()).map_err(spawn_error)?;
    wait_ready(&child, files, ports).await?;
    Ok(child)
}

/// Fails if the process ends or 120 s pass.
async fn wait_ready(
    child: &OwnedChild,
    files: &ServerFiles,
    ports: &ServerPorts,
) -> Result<(), ServerStartError> {
    let deadline = Instant::now() + READY_LIMIT;
    let monitor = ports.monitor_url();
    loop {
        tokio::select! {
            status = child.wait() => {
                let (status, log) = (status.to_string(), files.log.clone());
                return Err(ServerStartError::Exited { status, log, tail: files.read_log_tail() });
            }
            health = monitor_http::get(&monitor, "/healthz") => if health.is_ok() {
                return Ok(());
            }
        }
        if Instant::now() >= deadline {
            return Err(ServerStartError::NotReady { limit: READY_LIMIT, log: files.log.clone() });
        }
        sleep(READY_POLL).await;
    }
}
