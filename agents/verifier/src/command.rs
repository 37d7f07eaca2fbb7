//! Any executable as a verifier: one JSON request on its stdin, one JSON verdict on its
//! stdout. Runs in its own process group and is killed at its time limit.

use std::{
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use serde::Deserialize;
use wire::v1::verdicts::Outcome;

use crate::{calls::Item, judge::Opinion};

/// What a verifier may print.
const OUTPUT_BYTES_MAX: u64 = 64 * 1024;

/// What is in the pipe when it has ended is there at once.
const OUTPUT_LIMIT: Duration = Duration::from_secs(1);

/// Of a spec that nobody checked.
const LONGEST_LIMIT: Duration = Duration::from_secs(3600);

/// Between two looks whether it has ended.
const POLL: Duration = Duration::from_millis(5);

/// An executable that judges.
#[derive(Debug, Clone)]
pub(crate) struct Verifier {
    argv: Vec<String>,
    limit: Duration,
}

/// What it must print.
#[derive(Debug, Deserialize)]
struct Answer {
    outcome: Word,
    reward: Option<f64>,
    #[serde(default)]
    detail: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Pass,
    Fail,
    Error,
}

impl From<&wire::v1::verifier::Command> for Verifier {
    fn from(command: &wire::v1::verifier::Command) -> Self {
        let limit = Duration::try_from_secs_f64(command.timeout_s).unwrap_or(Duration::ZERO);
        let limit = limit.min(LONGEST_LIMIT);
        Self { argv: command.argv.clone(), limit }
    }
}

impl Verifier {
    /// Whatever goes wrong with the verifier is an `error`, never a failed sample.
    pub(crate) fn judge(&self, item: &Item) -> Opinion {
        match self.run(item) {
            Ok(output) => read(&output),
            Err(problem) => Opinion::error(problem),
        }
    }

    fn run(&self, item: &Item) -> Result<Vec<u8>, String> {
        let request = serde_json::to_vec(item).map_err(|error| error.to_string())?;
        let mut group = Group(self.spawn()?);
        let (stdin, stdout) = (group.0.stdin.take(), group.0.stdout.take());
        // Threads of their own: something it started elsewhere may hold the pipes for ever.
        // A verifier may also end without reading all of its request.
        std::thread::spawn(move || stdin.map(|mut stdin| stdin.write_all(&request)));
        let (send, output) = mpsc::channel();
        std::thread::spawn(move || send.send(read_bounded(stdout)));
        let ended = group.wait(self.limit);
        group.kill();
        ended?;
        let held = |_| "something it started holds its output open".to_owned();
        output.recv_timeout(OUTPUT_LIMIT).map_err(held)?
    }

    fn spawn(&self) -> Result<Child, String> {
        let (program, arguments) = self.argv.split_first().ok_or("argv is empty")?;
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

pub(crate) fn read(output: &[u8]) -> Opinion {
    let answer: Answer = match serde_json::from_slice(output) {
        Ok(answer) => answer,
        Err(error) => return Opinion::error(format!("it printed no verdict: {error}")),
    };
    let (outcome, default) = match answer.outcome {
        Word::Pass => (Outcome::Pass, 1.0),
        Word::Fail => (Outcome::Fail, 0.0),
        Word::Error => (Outcome::Error, 0.0),
    };
    let reward = answer.reward.unwrap_or(default);
    if !reward.is_finite() {
        return Opinion::error("its reward is not a number");
    }
    Opinion { outcome, reward, detail: answer.detail }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(script: &str, limit: Duration) -> Opinion {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let item = Item {
            prompt_id: "p".into(),
            index: 0,
            prompt: "2+2=".into(),
            completion: "4".into(),
            answer: Some("4".into()),
            fields: serde_json::Map::new(),
        };
        Verifier { argv, limit }.judge(&item)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn it_sees_the_completion_and_its_word_counts() {
        let script = r#"grep -q '"completion":"4"' && echo '{"outcome":"pass","reward":0.7}'"#;
        let opinion = judge(script, LONG);
        assert_eq!((opinion.outcome, opinion.reward), (Outcome::Pass, 0.7));
        let opinion = judge(r#"echo '{"outcome":"fail","detail":"no"}'"#, LONG);
        assert_eq!(opinion, Opinion::fail("no"));
    }

    #[test]
    fn whatever_it_does_wrong_is_an_error_never_a_reward_of_zero() {
        let cases = [
            ("exit 3", "it ended with"),
            ("echo hello", "it printed no verdict"),
            ("kill -9 $$", "it ended with"),
            ("yes", "it"),
            ("echo '{\"outcome\":\"pass\",\"reward\":1e999}'", "it"),
        ];
        for (script, detail) in cases {
            let opinion = judge(script, Duration::from_secs(2));
            assert_eq!(opinion.outcome, Outcome::Error, "{script}");
            assert!(opinion.detail.starts_with(detail), "{script}: {}", opinion.detail);
        }
    }

    #[test]
    fn one_that_leaves_something_behind_does_not_hold_the_others_up() {
        let began = Instant::now();
        // It must have left the group by the time its parent ends.
        let script = r#"f=$(mktemp -u); setsid sh -c "touch $f; exec sleep 30" &
            until [ -e $f ]; do sleep 0.01; done; rm $f; echo '{"outcome":"pass"}'"#;
        assert_eq!(judge(script, LONG).outcome, Outcome::Error);
        assert!(began.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_hung_one_is_killed_with_all_it_started() {
        let began = Instant::now();
        let opinion = judge("sleep 60 & sleep 60", Duration::from_millis(200));
        assert_eq!(opinion.outcome, Outcome::Error);
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}
