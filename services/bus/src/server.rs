//! The managed nats-server: a child process that has one store directory to itself,
//! keeps its port over restarts and dies with us. Knows nothing of facts.

mod binary;
mod child;
mod config;
mod lock;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

pub use self::binary::{BinaryError, find_binary};
use self::{
    child::Child,
    config::{Files, Ports},
    lock::DirLock,
};
use crate::http;

/// Recovery reads the whole store: 3 s for a million facts on an SSD.
const READY_LIMIT: Duration = Duration::from_secs(120);
const READY_POLL: Duration = Duration::from_millis(10);
/// An orderly stop takes 0.4 s with a million facts.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Between looks at its health, and how many bad ones in a row count.
const HEALTH_EVERY: Duration = Duration::from_secs(2);
const HEALTH_BAD_MAX: u32 = 3;
/// After SIGKILL only the kernel is left.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// How the child is to run.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Ours alone: store, configuration, log and port live there.
    pub dir: PathBuf,
    /// None: `FLOTILLA_NATS_SERVER`, then PATH, then `.tools/nats-server` near the executable
    /// or the working directory.
    pub binary: Option<PathBuf>,
    /// None: a free one, chosen once and kept.
    pub port: Option<u16>,
    /// Who may connect: loopback only, unless this says otherwise.
    pub listen: IpAddr,
    /// None: whoever can reach it may do everything.
    pub closed: Option<Closed>,
}

/// What closes a server to everybody but members of its fleet.
#[derive(Debug, Clone)]
pub struct Closed {
    /// TLS and whose tokens count, as a part of its configuration.
    pub config: String,
    /// Whose the log is: the account's public key.
    pub account: String,
}

impl ServerOptions {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        let listen = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { dir: dir.into(), binary: None, port: None, listen, closed: None }
    }
}

/// A running nats-server. Dropping it kills the child.
#[derive(Debug)]
pub struct ManagedServer {
    binary: PathBuf,
    files: Files,
    ports: Ports,
    listen: IpAddr,
    closed: bool,
    child: Child,
    _lock: DirLock,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error("use {} for a nats-server", dir.display())]
    Dir {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "{} is in use by {holder}; stop that or choose another directory: two servers would \
         destroy each other's data (B107)",
        dir.display()
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
    #[error("the nats-server ended at once: {status} (B106); its log, {}, says: {tail}", log.display())]
    Exited { status: String, log: PathBuf, tail: String },
    #[error("the nats-server was not ready within {limit:?}; its log is {} (B106)", log.display())]
    NotReady { limit: Duration, log: PathBuf },
}

impl ManagedServer {
    /// Starts the child and waits until JetStream answers.
    ///
    /// # Errors
    /// When there is no usable binary, the directory or the port is taken, or the server does
    /// not come up.
    pub async fn start(options: &ServerOptions) -> Result<Self, StartError> {
        let dir_error = |source| StartError::Dir { dir: options.dir.clone(), source };
        let binary = find_binary(options.binary.as_deref()).await?;
        std::fs::create_dir_all(&options.dir).map_err(dir_error)?;
        let dir = options.dir.canonicalize().map_err(dir_error)?;
        let lock = match DirLock::take(&dir).map_err(dir_error)? {
            Ok(lock) => lock,
            Err(holder) => return Err(StartError::InUse { dir, holder }),
        };
        let files = Files::new(&dir);
        end_leftover(&files).await?;
        let ports = config::ports(&files, options).map_err(dir_error)?;
        files.write_config(&ports, options).map_err(dir_error)?;
        if let Some(closed) = &options.closed {
            files.adopt(&closed.account).map_err(dir_error)?;
        }
        let child = launch(&binary, &files, &ports, options.listen).await?;
        files.remember(&ports).map_err(dir_error)?;
        let (listen, closed) = (options.listen, options.closed.is_some());
        Ok(Self { binary, files, ports, listen, closed, child, _lock: lock })
    }

    /// Where this machine's peers connect.
    pub fn url(&self) -> String {
        let host = match self.listen {
            ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            ip => ip,
        };
        let scheme = if self.closed { "tls" } else { "nats" };
        format!("{scheme}://{}", SocketAddr::new(host, self.ports.client))
    }

    pub fn monitor_url(&self) -> String {
        self.ports.monitor_url()
    }

    pub fn port(&self) -> u16 {
        self.ports.client
    }

    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    pub fn binary(&self) -> &Path {
        &self.binary
    }

    pub fn log_file(&self) -> &Path {
        &self.files.log
    }

    /// Waits until the child ends, for whatever reason. Cancel-safe; at once when it has ended.
    pub async fn wait(&self) -> ExitStatus {
        self.child.wait().await
    }

    /// Waits until the child says that it cannot serve, though its disk can be written to, and
    /// returns what it says: a stream whose write failed once refuses all others until the
    /// server is started again. Cancel-safe.
    pub async fn ailing(&self) -> String {
        let mut bad = 0;
        loop {
            sleep(HEALTH_EVERY).await;
            // No answer at all is not for us to judge: it may be frozen, or very busy.
            let health = http::ask(&self.ports.monitor_url(), "/healthz").await;
            match health {
                Ok((status, said)) if status != 200 => {
                    bad += 1;
                    if bad >= HEALTH_BAD_MAX && self.files.can_be_written() {
                        return String::from_utf8_lossy(&said).into_owned();
                    }
                }
                _ => bad = 0,
            }
        }
    }

    /// Starts it again with the same port and data, ending it first if it runs.
    ///
    /// # Errors
    /// As `start`.
    pub async fn restart(&mut self) -> Result<(), StartError> {
        self.stop().await;
        self.child = launch(&self.binary, &self.files, &self.ports, self.listen).await?;
        Ok(())
    }

    /// Ends the child in order, by force when it does not listen.
    pub async fn stop(&mut self) {
        self.child.signal(Signal::TERM);
        if timeout(STOP_LIMIT, self.child.wait()).await.is_err() {
            tracing::warn!(pid = self.pid(), "the nats-server ignores SIGTERM; killing it");
            self.child.signal(Signal::KILL);
            // A process that survives SIGKILL hangs in the kernel; nothing is left to try.
            let _ = timeout(KILL_LIMIT, self.child.wait()).await;
        }
    }
}

/// A child of an earlier process may still be writing its store for a moment.
async fn end_leftover(files: &Files) -> Result<(), StartError> {
    for (signal, limit) in [(Signal::TERM, STOP_LIMIT), (Signal::KILL, KILL_LIMIT)] {
        let deadline = Instant::now() + limit;
        let Some(pid) = files.leftover() else { return Ok(()) };
        tracing::warn!(pid = pid.as_raw_nonzero().get(), "ending a nats-server left behind here");
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, signal);
        while files.leftover().is_some() && Instant::now() < deadline {
            sleep(READY_POLL).await;
        }
    }
    match files.leftover() {
        None => Ok(()),
        Some(pid) => Err(StartError::InUse {
            dir: files.dir.clone(),
            holder: format!("a nats-server that does not end (process {})", pid.as_raw_nonzero()),
        }),
    }
}

async fn launch(
    binary: &Path,
    files: &Files,
    ports: &Ports,
    listen: IpAddr,
) -> Result<Child, StartError> {
    for (ip, port) in [(listen, ports.client), (IpAddr::V4(Ipv4Addr::LOCALHOST), ports.monitor)] {
        if TcpListener::bind((ip, port)).is_err() {
            return Err(StartError::PortTaken { port, remembered: files.ports.clone() });
        }
    }
    let spawn_error = |source| StartError::Spawn { binary: binary.to_owned(), source };
    let errors = files.open_errors().map_err(spawn_error)?;
    let mut command = std::process::Command::new(binary);
    command.arg("--config").arg(&files.config).current_dir(&files.dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    let child = child::spawn(command).await.map_err(spawn_error)?;
    files.remember_pid(child.pid()).map_err(spawn_error)?;
    ready(&child, files, ports).await?;
    Ok(child)
}

async fn ready(child: &Child, files: &Files, ports: &Ports) -> Result<(), StartError> {
    let deadline = Instant::now() + READY_LIMIT;
    let monitor = ports.monitor_url();
    loop {
        tokio::select! {
            status = child.wait() => {
                let (status, log) = (status.to_string(), files.log.clone());
                return Err(StartError::Exited { status, log, tail: files.log_tail() });
            }
            health = http::get(&monitor, "/healthz") => if health.is_ok() {
                return Ok(());
            }
        }
        if Instant::now() >= deadline {
            return Err(StartError::NotReady { limit: READY_LIMIT, log: files.log.clone() });
        }
        sleep(READY_POLL).await;
    }
}
