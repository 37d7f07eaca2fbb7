//! `llama-server`, or a program with its HTTP API, as a child process: one model, perhaps with
//! adapters, at a private address. This module does not know the requests.

mod health;
mod memory;

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

use crate::{LlamaProcess, ProcessEnvironment, ProcessEvent, ProgramOptions, ProgramOutput};

const LLAMA_SERVER: &str = "llama-server";

const READY_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time from SIGTERM to SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// The time that a server may take to exit after it closed its pipes.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Rounds of GNU's OpenMP in which a thread waits before it sleeps: about 0.2 ms.
const SPINS_BEFORE_SLEEP: &str = "100000";

/// The largest length of a unix socket's path in bytes that every system supports.
const SOCKET_PATH_MAX: usize = 100;

/// The settings with which `llama-server` runs on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LlamaServerSettings {
    pub program: PathBuf,
    pub options: ProgramOptions,
    /// A name of `--list-devices`; the CPU if `None`.
    pub device: Option<String>,
    pub environment: ProcessEnvironment,
    /// True to map weights into memory.
    pub mmap: bool,
    pub threads: usize,
}

/// A program with llama-server's HTTP API, or the part of it that its clients use.
///
/// It takes `--api-key-file` and `--host` with the path of a socket, or also `--port`, answers
/// `GET /health` with 200 once it is ready, and `GET /slots` between two of its steps.
#[derive(Debug, Clone)]
pub struct ServerProgram {
    /// Names it in messages.
    pub name: &'static str,
    pub program: PathBuf,
    /// Those before its address.
    pub arguments: Vec<OsString>,
    pub environment: ProcessEnvironment,
    /// True if its weights are in the memory of a device.
    pub on_device: bool,
}

/// A model to serve, and its limits.
#[derive(Debug, Clone, Copy)]
pub struct ServedModel<'a> {
    pub base: &'a Path,
    pub adapters: &'a [PathBuf],
    /// True if each request names the adapter that it uses by its place in `adapters`; else all
    /// requests use all adapters.
    pub adapter_by_request: bool,
    /// The number of sequences at once.
    pub slots: u32,
    /// The largest number of tokens of a sequence, prompt included.
    pub context: u32,
    /// The name of the model in OpenAI's answers; `None` for the file's path.
    pub alias: Option<&'a str>,
    /// True to compute attention and its cache in f32, for a base in f32.
    pub exact: bool,
    /// The directory for the server's socket and key, created with access for this user only.
    pub directory: &'a Path,
    /// The directory to which the server may write the state of slots, created with access for this
    /// user only.
    pub states: &'a Path,
}

/// The address that a server listens on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    Socket(PathBuf),
    /// A port of the loopback interface.
    Port(u16),
}

/// The reason why a server did not become ready.
#[derive(Debug, thiserror::Error)]
pub enum LlamaServerError {
    #[error("prepare {path} for {name}")]
    Directory { name: &'static str, path: PathBuf, source: io::Error },
    #[error("llama-server cannot be given {path:?}; it must be without `:` and `,` (E103)")]
    Name { path: PathBuf },
    #[error("start {program}")]
    Start { program: PathBuf, source: io::Error },
    #[error("{name} ended ({ending}) before it was ready; last output: {last_output} (E104)")]
    Ended { name: &'static str, ending: String, last_output: String },
    #[error(
        "{name} was not ready within {limit:?} and was ended; last output: {last_output} (E104)"
    )]
    NotReady { name: &'static str, limit: Duration, last_output: String },
}

/// A running `llama-server`, or a program like it. Dropping it ends the process, first with SIGTERM
/// and after 3 s with SIGKILL. The kernel kills it when the thread that started it ends.
///
/// ```text
/// start -> wait_ready -> (requests with api_key at listen_address; poll_exit now and then) -> drop
/// ```
#[derive(Debug)]
pub struct LlamaServer {
    name: &'static str,
    child: LlamaProcess,
    address: ServerAddress,
    key: String,
    on_device: bool,
}

impl LlamaServer {
    /// Starts a server. It is not ready yet.
    ///
    /// # Errors
    /// When a path contains `:` or `,`, the directory cannot be prepared or the program cannot be
    /// started.
    pub fn start(
        settings: &LlamaServerSettings,
        serve: &ServedModel<'_>,
    ) -> Result<Self, LlamaServerError> {
        let adapters = serve.adapters.iter().map(PathBuf::as_path);
        for path in adapters.chain([serve.base]) {
            if path.to_string_lossy().contains([':', ',']) {
                return Err(LlamaServerError::Name { path: path.to_owned() });
            }
        }
        create_private_directory(serve.states).map_err(|source| LlamaServerError::Directory {
            name: LLAMA_SERVER,
            path: serve.states.into(),
            source,
        })?;
        let mut environment = settings.environment.clone();
        if settings.device.is_none() {
            // Threads that spin while they wait slow down other processes, and each other, on a
            // busy host. Those that sleep at once need a tenth longer for each step on an idle one.
            environment = environment.with_variable("OMP_WAIT_POLICY", "passive");
            environment = environment.with_variable("GOMP_SPINCOUNT", SPINS_BEFORE_SLEEP);
        }
        let program = ServerProgram {
            name: LLAMA_SERVER,
            program: settings.program.clone(),
            arguments: command_arguments(settings, serve),
            environment,
            on_device: settings.device.is_some(),
        };
        Self::start_program(&program, serve.directory)
    }

    /// Starts a program with llama-server's HTTP API. Its socket and key are in `directory`, which
    /// is created with access for this user only.
    ///
    /// # Errors
    /// When the directory cannot be prepared or the program cannot be started.
    pub fn start_program(
        program: &ServerProgram,
        directory: &Path,
    ) -> Result<Self, LlamaServerError> {
        let ServerProgram { name, program, arguments, environment, on_device } = program;
        let failed =
            |source| LlamaServerError::Directory { name, path: directory.to_owned(), source };
        let (key, key_file) = prepare_directory(directory).map_err(failed)?;
        let address = choose_address(directory).map_err(failed)?;
        let arguments = arguments
            .iter()
            .cloned()
            .chain(address_arguments(&address, key_file))
            .collect::<Vec<_>>();
        let child =
            LlamaProcess::spawn_program(program, arguments, environment, ProgramOutput::Log);
        let start = |source| LlamaServerError::Start { program: program.clone(), source };
        Ok(Self { name, child: child.map_err(start)?, address, key, on_device: *on_device })
    }

    /// Returns the program's name, for messages.
    pub fn program_name(&self) -> &'static str {
        self.name
    }

    /// Waits until the server is ready, at most `limit`. Calls `on_heartbeat` between two checks.
    pub fn wait_ready(
        &mut self,
        limit: Duration,
        mut on_heartbeat: impl FnMut(),
    ) -> Result<(), LlamaServerError> {
        let until = Instant::now() + limit;
        loop {
            if let Some((ending, last_output)) = self.poll_exit() {
                return Err(LlamaServerError::Ended { name: self.name, ending, last_output });
            }
            // A ready server at this address is ours if our process runs: a second server could not
            // listen there.
            if health::is_ready(&self.address) && self.poll_exit().is_none() {
                return Ok(());
            }
            if Instant::now() >= until {
                let (name, last_output) = (self.name, self.last_output());
                return Err(LlamaServerError::NotReady { name, limit, last_output });
            }
            on_heartbeat();
            std::thread::sleep(READY_POLL_INTERVAL);
        }
    }

    pub fn listen_address(&self) -> &ServerAddress {
        &self.address
    }

    /// Returns the API key that each request must carry.
    pub fn api_key(&self) -> &str {
        &self.key
    }

    /// Returns true if this machine has memory for a second server like this one. Weights in the
    /// processor's memory are mapped once for both; a device would hold them twice, so a server on
    /// a device gets no second one.
    pub fn has_room_for_second(&self) -> bool {
        !self.on_device && memory::has_room_for_second(self.child.process_id()).unwrap_or(false)
    }

    /// Asks the server to end, and returns at once.
    pub fn request_stop(&self) {
        self.child.send_sigterm();
    }

    /// Returns the exit status and the last output if the server ended.
    pub fn poll_exit(&mut self) -> Option<(String, String)> {
        loop {
            match self.child.wait_event(Duration::ZERO) {
                ProcessEvent::Line(_) => {}
                ProcessEvent::TimedOut => match self.child.exit_status() {
                    Ok(None) => return None,
                    Ok(Some(_)) | Err(_) => break,
                },
                ProcessEvent::Closed => {
                    // The server closes its pipes only when it exits, shortly before it is gone.
                    let _ = self.child.wait_exit(EXIT_TIMEOUT);
                    break;
                }
            }
        }
        // The last lines may still be in the queue.
        let until = Instant::now() + EXIT_TIMEOUT;
        while let ProcessEvent::Line(_) = self
            .child
            .wait_event(until.saturating_duration_since(Instant::now()).min(READY_POLL_INTERVAL))
        {
        }
        let ending = self
            .child
            .kill_and_wait()
            .map_or_else(|error| error.to_string(), |how| how.to_string());
        Some((ending, self.last_output()))
    }

    fn last_output(&self) -> String {
        let tail = self.child.output_tail();
        let lines: Vec<&str> = tail.lines().map(str::trim).collect();
        if lines.is_empty() { "nothing".to_owned() } else { lines.join(" | ") }
    }
}

impl Drop for LlamaServer {
    fn drop(&mut self) {
        self.child.send_sigterm();
        // The server is killed if it does not end in time.
        let _ = self.child.wait_exit(STOP_TIMEOUT);
        let _ = self.child.kill_and_wait();
        if let ServerAddress::Socket(path) = &self.address {
            // A server that ends by itself removes its socket.
            let _ = fs::remove_file(path);
        }
    }
}

fn create_private_directory(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Creates the private directory, and a new key in a file there. The key is not passed as an
/// argument because other users can read the arguments of a process.
fn prepare_directory(directory: &Path) -> io::Result<(String, PathBuf)> {
    create_private_directory(directory)?;
    let mut bytes = [0_u8; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let key: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = directory.join("key");
    // A killed server leaves its key file.
    let _ = fs::remove_file(&path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    writeln!(file, "{key}")?;
    Ok((key, path))
}

/// A unix socket, or a currently free port if the socket's path would be too long.
fn choose_address(directory: &Path) -> io::Result<ServerAddress> {
    let socket = directory.join("server.sock");
    if socket.as_os_str().len() <= SOCKET_PATH_MAX {
        let _ = fs::remove_file(&socket);
        return Ok(ServerAddress::Socket(socket));
    }
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    Ok(ServerAddress::Port(port))
}

fn address_arguments(address: &ServerAddress, key_file: PathBuf) -> Vec<OsString> {
    let mut all: Vec<OsString> = match address {
        ServerAddress::Socket(path) => vec!["--host".into(), path.into()],
        ServerAddress::Port(port) => {
            ["--host", "127.0.0.1", "--port", &port.to_string()].map(OsString::from).into()
        }
    };
    all.extend(["--api-key-file".into(), key_file.into()]);
    all
}

fn command_arguments(settings: &LlamaServerSettings, serve: &ServedModel<'_>) -> Vec<OsString> {
    let LlamaServerSettings { options, threads, .. } = settings;
    let context = u64::from(serve.context) * u64::from(serve.slots);
    let mut all: Vec<String> = options.device_arguments(settings.device.as_deref());
    let mut add = |words: &[&str]| all.extend(words.iter().map(|&word| word.to_owned()));
    add(&["--parallel", &serve.slots.to_string(), "--ctx-size", &context.to_string()]);
    add(&["--threads", &(*threads).max(1).to_string()]);
    if serve.exact {
        add(&["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]);
    }
    if !settings.mmap {
        add(options.no_mmap_arguments());
    }
    // The slots keep the prompts that are drawn from, so a cache besides would only use memory.
    if options.has_option("--cache-ram") {
        add(&["--cache-ram", "0"]);
    }
    if let Some(no_page) =
        ["--no-ui", "--no-webui"].into_iter().find(|name| options.has_option(name))
    {
        add(&[no_page]);
    }
    let mut all: Vec<OsString> = all.into_iter().map(OsString::from).collect();
    // A server that computes nothing to warm up is ready sooner.
    if options.has_option("--no-warmup") {
        all.push("--no-warmup".into());
    }
    if options.has_option("--slot-save-path") {
        all.extend(["--slot-save-path".into(), serve.states.into()]);
    }
    all.extend(["--model".into(), serve.base.into()]);
    if let Some(alias) = serve.alias {
        all.extend(["--alias".into(), alias.into()]);
    }
    for adapter in serve.adapters {
        all.extend(["--lora".into(), adapter.into()]);
    }
    if serve.adapter_by_request && !serve.adapters.is_empty() {
        all.push("--lora-init-without-apply".into());
    }
    all
}

#[cfg(test)]
mod tests;
