//! A program of this box, run to its end with a bound on its time and its output. Runs in its own
//! process group, which is killed with it; not for what models wrote.

use std::{
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};

/// What a program may print.
const OUTPUT_BYTES_MAX: u64 = 64 * 1024;

/// What is in the pipe when it has ended is there at once.
const OUTPUT_LIMIT: Duration = Duration::from_secs(1);

/// Between two looks whether it has ended.
const POLL: Duration = Duration::from_millis(5);

/// What it prints, when it ends well within its limit. The error says what it did instead.
pub(crate) fn run(argv: &[String], input: Vec<u8>, limit: Duration) -> Result<Vec<u8>, String> {
    let mut group = Group(spawn(argv)?);
    let (stdin, stdout) = (group.0.stdin.take(), group.0.stdout.take());
    // Threads of their own: something it started elsewhere may hold the pipes for ever.
    // A program may also end without reading all of its input.
    std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&input)));
    let (send, output) = mpsc::channel();
    std::thread::spawn(move || send.send(read_bounded(stdout)));
    let ended = group.wait(limit);
    group.kill();
    ended?;
    let held = |_| "something it started holds its output open".to_owned();
    output.recv_timeout(OUTPUT_LIMIT).map_err(held)?
}

fn spawn(argv: &[String]) -> Result<Child, String> {
    let (program, arguments) = argv.split_first().ok_or("argv is empty")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    #[expect(unsafe_code, reason = "the closure makes one system call and allocates nothing")]
    // SAFETY: prctl is safe between fork and exec. The thread that spawns waits for the
    // child, so the child dies with this process and not before it is done.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    command.spawn().map_err(|error| format!("start {program}: {error}"))
}

fn read_bounded(stdout: Option<impl Read>) -> Result<Vec<u8>, String> {
    let mut output = Vec::new();
    let stdout = stdout.ok_or("no stdout")?;
    stdout
        .take(OUTPUT_BYTES_MAX + 1)
        .read_to_end(&mut output)
        .map_err(|error| format!("read its output: {error}"))?;
    if output.len() as u64 > OUTPUT_BYTES_MAX {
        return Err(format!("it printed more than {OUTPUT_BYTES_MAX} bytes"));
    }
    Ok(output)
}

/// A child and everything it started.
struct Group(Child);

impl Group {
    fn wait(&mut self, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        loop {
            match self.0.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(format!("it ended with {status}")),
                Ok(None) if Instant::now() >= deadline => {
                    return Err(format!("it ran longer than {limit:?}"));
                }
                Ok(None) => std::thread::sleep(POLL),
                Err(error) => return Err(format!("wait for it: {error}")),
            }
        }
    }

    fn kill(&self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // It may be gone already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
        let _ = self.0.wait();
    }
}
