//! `llama-server` as a child: one model, perhaps an adapter, at an address of its own that
//! nobody else can use. Knows nothing of what it is asked.

mod health;

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use crate::{Child, Environment, Heard, Options};

/// Between two looks whether it is ready.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// From SIGTERM to SIGKILL.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// What a server that closed its pipes may take to be gone.
const ENDING_LIMIT: Duration = Duration::from_secs(1);

/// What the path of a unix socket may be long, on every system.
const SOCKET_PATH_MAX: usize = 100;

/// How `llama-server` is run on this box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSettings {
    pub program: PathBuf,
    pub options: Options,
    /// Of `--list-devices`; the CPU without one.
    pub device: Option<String>,
    pub environment: Environment,
    pub mmap: bool,
    pub threads: usize,
}

/// What is served.
#[derive(Debug, Clone, Copy)]
pub struct Serve<'a> {
    /// GGUF files.
    pub base: &'a Path,
    pub adapter: Option<&'a Path>,
    /// Sequences at once.
    pub slots: u32,
    /// Tokens that each of them may have, prompt included.
    pub context: u32,
    /// Attention and its cache in f32, for a base in f32.
    pub exact: bool,
    /// For its socket and its key; created, with nobody else's access.
    pub directory: &'a Path,
}

/// Where it listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Socket(PathBuf),
    /// Of this machine's loopback interface.
    Port(u16),
}

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("prepare {path} for llama-server")]
    Directory { path: PathBuf, source: io::Error },
    #[error("llama-server cannot be given {path:?}; it must be without `:` and `,` (E103)")]
    Name { path: PathBuf },
    #[error("start {program}")]
    Start { program: PathBuf, source: io::Error },
    #[error("llama-server ended ({ending}) before it was ready; it said last: {said} (E104)")]
    Ended { ending: String, said: String },
    #[error(
        "llama-server was not ready within {limit:?} and was ended; it said last: {said} (E104)"
    )]
    NotReady { limit: Duration, said: String },
}

/// A running server. Dropping it ends it. The kernel ends it with the thread that started it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    address: Address,
    key: String,
}

impl Server {
    /// Starts it; it is not ready yet.
    ///
    /// # Errors
    /// When its directory cannot be prepared or the program cannot be started.
    pub fn start(settings: &ServerSettings, serve: &Serve<'_>) -> Result<Self, ServerError> {
        for path in serve.adapter.iter().copied().chain([serve.base]) {
            if path.to_string_lossy().contains([':', ',']) {
                return Err(ServerError::Name { path: path.to_owned() });
            }
        }
        let directory = |source| {
            let path = serve.directory.to_owned();
            ServerError::Directory { path, source }
        };
        let (key, key_file) = prepare(serve.directory).map_err(directory)?;
        let address = address(serve.directory).map_err(directory)?;
        let arguments = arguments(settings, serve, &address, &key_file);
        let mut environment = settings.environment.clone();
        if settings.device.is_none() {
            // Threads that spin while they wait starve others, and each other, on a busy box.
            environment = environment.with("OMP_WAIT_POLICY", "passive");
        }
        let child = Child::spawn(&settings.program, arguments, &environment, true);
        let start = |source| ServerError::Start { program: settings.program.clone(), source };
        Ok(Self { child: child.map_err(start)?, address, key })
    }

    /// Waits until it is ready; `beat` is called again and again meanwhile.
    ///
    /// # Errors
    /// When it ends, or is not ready within the limit.
    pub fn await_ready(
        &mut self,
        limit: Duration,
        mut beat: impl FnMut(),
    ) -> Result<(), ServerError> {
        let until = Instant::now() + limit;
        loop {
            if let Some((ending, said)) = self.ended() {
                return Err(ServerError::Ended { ending, said });
            }
            // One that runs and is ready at this address is ours: a second could not listen there.
            if health::is_ready(&self.address) && self.ended().is_none() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(ServerError::NotReady { limit, said: self.said() });
            }
            beat();
            std::thread::sleep(LOOK_EVERY);
        }
    }

    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What it wants to be told with each request.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// How it ended and what it said last, if it did. To be asked again and again: what it prints
    /// is read here.
    pub fn ended(&mut self) -> Option<(String, String)> {
        loop {
            match self.child.hear(Duration::ZERO) {
                Heard::Line(_) => {}
                Heard::Nothing => match self.child.ended() {
                    Ok(None) => return None,
                    Ok(Some(_)) | Err(_) => break,
                },
                Heard::Ended => {
                    // It closes its pipes before it is gone, and for no other reason.
                    let _ = self.child.wait(ENDING_LIMIT);
                    break;
                }
            }
        }
        // Its last words may still be on their way.
        let until = Instant::now() + ENDING_LIMIT;
        while let Heard::Line(_) =
            self.child.hear(until.saturating_duration_since(Instant::now()).min(LOOK_EVERY))
        {
        }
        let ending = self.child.end().map_or_else(|error| error.to_string(), |how| how.to_string());
        Some((ending, self.said()))
    }

    fn said(&self) -> String {
        let lines: Vec<&str> = self.child.tail().lines().map(str::trim).collect();
        if lines.is_empty() { "nothing".to_owned() } else { lines.join(" | ") }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.terminate();
        // It is killed if it does not end.
        let _ = self.child.wait(STOP_LIMIT);
        let _ = self.child.end();
        if let Address::Socket(path) = &self.address {
            // A server that ends by itself removes it.
            let _ = fs::remove_file(path);
        }
    }
}

/// The private directory and the key in a file there: an argument could be read by everybody.
fn prepare(directory: &Path) -> io::Result<(String, PathBuf)> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    let mut bytes = [0_u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let key: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = directory.join("key");
    // Left behind by one that was killed.
    let _ = fs::remove_file(&path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    writeln!(file, "{key}")?;
    Ok((key, path))
}

/// A socket, or a port that is free just now where a socket's path would be too long.
fn address(directory: &Path) -> io::Result<Address> {
    let socket = directory.join("server.sock");
    if socket.as_os_str().len() <= SOCKET_PATH_MAX {
        let _ = fs::remove_file(&socket);
        return Ok(Address::Socket(socket));
    }
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    Ok(Address::Port(port))
}

fn arguments(
    settings: &ServerSettings,
    serve: &Serve<'_>,
    address: &Address,
    key_file: &Path,
) -> Vec<OsString> {
    let ServerSettings { options, threads, .. } = settings;
    let context = u64::from(serve.context) * u64::from(serve.slots);
    let mut all: Vec<String> = options.compute_on(settings.device.as_deref());
    let mut add = |words: &[&str]| all.extend(words.iter().map(|&word| word.to_owned()));
    add(&["--parallel", &serve.slots.to_string(), "--ctx-size", &context.to_string()]);
    add(&["--threads", &(*threads).max(1).to_string()]);
    if serve.exact {
        add(&["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]);
    }
    if !settings.mmap {
        add(options.without_mmap());
    }
    // Prompts that were computed before are not asked for again.
    if options.knows("--cache-ram") {
        add(&["--cache-ram", "0"]);
    }
    if let Some(no_page) = ["--no-ui", "--no-webui"].into_iter().find(|name| options.knows(name)) {
        add(&[no_page]);
    }
    if let Address::Port(port) = address {
        add(&["--host", "127.0.0.1", "--port", &port.to_string()]);
    }
    let mut all: Vec<OsString> = all.into_iter().map(OsString::from).collect();
    if let Address::Socket(path) = address {
        all.extend(["--host".into(), path.into()]);
    }
    all.extend(["--api-key-file".into(), key_file.into()]);
    all.extend(["--model".into(), serve.base.into()]);
    if let Some(adapter) = serve.adapter {
        all.extend(["--lora".into(), adapter.into()]);
    }
    all
}

#[cfg(test)]
mod tests;
