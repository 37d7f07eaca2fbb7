//! Real child processes that answer well, badly and not at all.

use std::{
    collections::BTreeSet,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use line_programs::{
    CommandLauncher, LineBounds, LineFailure, LineProgram, LineProgramError, LineProgramPool,
    PoolSettings,
};
use serde_json::{Map, Value, json};

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(60);

const SHORT: Duration = Duration::from_millis(400);

/// A shell function that answers the line `$1` with its own id.
const ANSWER: &str = r#"answer() { id=${1##*\"id\":}; id=${id%%[,\}]*}; echo "{\"id\":$id,\"pid\":$$}"; }
"#;

/// Answers every line.
const SERVE: &str = r#"while read -r line; do answer "$line"; done"#;

fn shell(script: &str) -> CommandLauncher {
    let script = format!("{ANSWER}{script}");
    CommandLauncher::new(move || {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script]);
        command
    })
}

fn bounds() -> LineBounds {
    LineBounds {
        answer_bytes_max: 1000,
        start_timeout: Duration::ZERO,
        stop_timeout: Duration::from_secs(5),
        ..LineBounds::default()
    }
}

fn pool(script: &str, processes: usize, concurrent: usize) -> LineProgramPool {
    let settings = PoolSettings { processes, concurrent, idle_timeout: LONG, bounds: bounds() };
    LineProgramPool::new(Box::new(shell(script)), settings)
}

fn request(text: &str) -> Map<String, Value> {
    let Value::Object(request) = json!({ "text": text }) else { panic!("an object") };
    request
}

fn pid(answer: &Map<String, Value>) -> u64 {
    answer["pid"].as_u64().expect("a process id")
}

async fn start(script: &str) -> LineProgram {
    LineProgram::start(&shell(script), bounds()).await.expect("it starts")
}

async fn ask(program: &LineProgram, timeout: Duration) -> Result<u64, LineProgramError> {
    program.request_answer(request("a"), timeout).await.map(|answer| pid(&answer))
}

/// Waits until a condition holds, and panics after a minute.
async fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns false for a process that has ended, even if it was not waited for.
fn is_process(pid: u64) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with(['Z', 'X']))
}

#[tokio::test]
async fn one_process_answers_request_after_request() {
    let program = start(SERVE).await;
    let first = ask(&program, LONG).await.expect("an answer");
    for _ in 0..50 {
        assert_eq!(ask(&program, LONG).await, Ok(first));
    }
    assert!(program.is_running());
}

#[tokio::test]
async fn answers_may_come_in_another_order() {
    // Two lines are read before the second is answered, then the first.
    let swap = r#"while read -r one && read -r two; do answer "$two"; answer "$one"; done"#;
    let program = start(swap).await;
    for _ in 0..20 {
        let (one, two) = tokio::join!(ask(&program, LONG), ask(&program, LONG));
        assert_eq!(one.expect("an answer"), two.expect("an answer"));
    }
}

#[tokio::test]
async fn a_large_request_is_written_while_the_program_answers_others() {
    // sed is faster than the shell with long lines.
    let sed = r#"exec sed -u "s/.*\"id\":\([0-9]*\).*/{\"id\":\1,\"pid\":$$}/""#;
    let program = start(sed).await;
    let large = "x".repeat(1 << 20);
    let (large, small) =
        tokio::join!(program.request_answer(request(&large), LONG), ask(&program, LONG));
    assert_eq!(pid(&large.expect("an answer")), small.expect("an answer"));
    let bounds = LineBounds { request_bytes_max: 100, ..bounds() };
    let program = LineProgram::start(&shell(SERVE), bounds).await.expect("it starts");
    let refused = program.request_answer(request(&"x".repeat(200)), LONG).await.unwrap_err();
    assert_eq!(refused.failure, LineFailure::Request, "{refused}");
    assert!(ask(&program, LONG).await.is_ok(), "a refused request does not end it");
}

#[tokio::test]
async fn whatever_is_not_an_answer_ends_the_process_with_the_reason() {
    let cases = [
        ("read -r line; echo oops >&2; exit 3", "it ended with exit status: 3: oops"),
        ("read -r line; kill -9 $$", "it ended with signal: 9"),
        ("exit 0", "it ended with exit status: 0"),
        ("read -r line; echo hello; sleep 60", "it wrote a line that is no answer"),
        ("read -r line; echo '{\"pid\":1}'; sleep 60", "no \"id\""),
        ("read -r line; echo '{\"id\":77}'; sleep 60", "id 77, which is unknown"),
        ("read -r line; yes | tr -d '\\n'", "a line of more than 1000 bytes"),
        ("yes", "it wrote a line that is no answer"),
        ("read -r line; exec >&-; sleep 60", "it closed its stdout"),
    ];
    for (script, expected) in cases {
        let program = start(script).await;
        let began = Instant::now();
        let error = ask(&program, LONG).await.expect_err(script);
        // A program that fails before it was asked may be gone already.
        let early = error.failure == LineFailure::Interrupted && !script.starts_with("read");
        assert!(early || error.failure == LineFailure::Broken, "{script}: {error:?}");
        assert!(error.to_string().contains(expected), "{script}: {error}");
        assert!(began.elapsed() < LONG / 2, "{script}");
        wait_until("it is not running", || !program.is_running()).await;
    }
}

#[tokio::test]
async fn a_second_answer_to_a_request_ends_the_process() {
    let program = start(r#"while read -r line; do answer "$line"; answer "$line"; done"#).await;
    assert!(ask(&program, LONG).await.is_ok());
    wait_until("it is not running", || !program.is_running()).await;
}

#[tokio::test]
async fn a_hanging_process_is_killed_with_its_children_and_the_other_requests_may_be_repeated() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("child");
    let hang = format!("echo waiting >&2; sleep 600 & echo $! > {}; wait", file.display());
    let program = start(&hang).await;
    let read_child = || fs::read_to_string(&file).unwrap_or_default().trim().parse::<u64>().ok();
    wait_until("its child was started", || read_child().is_some()).await;
    let (slow, other) = tokio::join!(ask(&program, SHORT), ask(&program, LONG));
    let slow = slow.unwrap_err();
    assert_eq!(slow.failure, LineFailure::TimedOut);
    assert_eq!(slow.to_string(), "it did not answer within 400ms: waiting");
    assert_eq!(other.unwrap_err().failure, LineFailure::Interrupted);
    let child = read_child().expect("a process id");
    wait_until("its child is gone", || !is_process(child)).await;
}

#[tokio::test]
async fn stderr_never_blocks_a_program_and_its_end_is_quoted() {
    let flood = r#"read -r line; answer "$line"; read -r line; yes x | head -c 1000000 >&2; echo END >&2; exit 1"#;
    let program = start(flood).await;
    assert!(ask(&program, LONG).await.is_ok());
    let error = ask(&program, LONG).await.unwrap_err();
    assert!(error.stderr.ends_with("END") && error.stderr.len() <= 1000, "{error}");
}

#[tokio::test]
async fn the_first_answer_may_take_longer() {
    let slow = format!("sleep 1; {SERVE}");
    let bounds = LineBounds { start_timeout: LONG, ..bounds() };
    let program = LineProgram::start(&shell(&slow), bounds).await.expect("it starts");
    assert!(ask(&program, SHORT).await.is_ok());
}

#[tokio::test]
async fn a_dropped_program_ends_and_so_does_one_that_ignores_its_stdin() {
    let program = start(SERVE).await;
    let first = ask(&program, LONG).await.expect("an answer");
    drop(program);
    wait_until("it ended", || !is_process(first)).await;
    let bounds = LineBounds { stop_timeout: SHORT, ..bounds() };
    let script = r#"read -r line; answer "$line"; sleep 600"#;
    let program = LineProgram::start(&shell(script), bounds).await.expect("it starts");
    let first = ask(&program, LONG).await.expect("an answer");
    drop(program);
    wait_until("it was killed", || !is_process(first)).await;
}

#[tokio::test]
async fn a_cancelled_request_leaves_the_program_usable() {
    let script = r#"while read -r line; do sleep 0.3; answer "$line"; done"#;
    let program = start(script).await;
    let cancelled = tokio::time::timeout(Duration::from_millis(50), ask(&program, LONG)).await;
    assert!(cancelled.is_err());
    assert!(ask(&program, LONG).await.is_ok());
}

#[tokio::test]
async fn a_pool_starts_as_many_as_are_needed_and_no_more() {
    let slow = r#"while read -r line; do sleep 0.2; answer "$line"; done"#;
    let pool = pool(slow, 3, 1);
    let asked = (0..9).map(|_| {
        let pool = pool.clone();
        tokio::spawn(async move { pool.request_answer(&request("a"), LONG).await })
    });
    let mut pids = BTreeSet::new();
    for asked in asked.collect::<Vec<_>>() {
        pids.insert(pid(&asked.await.expect("a task").expect("an answer")));
    }
    assert_eq!(pids.len(), 3);
    // One request after the other needs one process.
    let mut pids = BTreeSet::new();
    for _ in 0..4 {
        pids.insert(pid(&pool.request_answer(&request("a"), LONG).await.expect("an answer")));
    }
    assert_eq!(pids.len(), 1);
}

#[tokio::test]
async fn a_lease_stays_with_its_process() {
    let pool = pool(SERVE, 2, 1);
    let (one, two) = tokio::join!(pool.lease_program(), pool.lease_program());
    let (one, two) = (one.expect("a lease"), two.expect("a lease"));
    let third = tokio::time::timeout(SHORT, pool.lease_program()).await;
    assert!(third.is_err(), "both are leased");
    let mut pids = Vec::new();
    for leased in [&one, &two, &one, &two] {
        pids.push(pid(&leased.request_answer(request("a"), LONG).await.expect("an answer")));
    }
    assert_eq!(pids[..2], pids[2..]);
    assert_ne!(pids[0], pids[1]);
    drop(one);
    let again = pool.lease_program().await.expect("a lease");
    let answer = again.request_answer(request("a"), LONG).await.expect("an answer");
    assert_eq!(pid(&answer), pids[0]);
}

#[tokio::test]
async fn a_pool_replaces_a_process_that_ended_and_repeats_what_another_request_interrupted() {
    // A request with "die" ends the process, one with "hang" is never answered.
    let script = r#"while read -r line; do case "$line" in *die*) exit 9;; *hang*) ;; *) sleep 0.1; answer "$line";; esac; done"#;
    let pool = pool(script, 1, 4);
    let first = pid(&pool.request_answer(&request("a"), LONG).await.expect("an answer"));
    let died = pool.request_answer(&request("die"), LONG).await.unwrap_err();
    assert_eq!(died.failure, LineFailure::Broken);
    let second = pid(&pool.request_answer(&request("a"), LONG).await.expect("an answer"));
    assert_ne!(first, second);
    let many = [request("hang"), request("a"), request("a"), request("a"), request("a")];
    let timeouts = [SHORT, LONG, LONG, LONG, LONG];
    let asked = many.iter().zip(timeouts).map(|(one, limit)| pool.request_answer(one, limit));
    let answers = futures::future::join_all(asked).await;
    assert_eq!(answers[0].as_ref().unwrap_err().failure, LineFailure::TimedOut);
    for answer in &answers[1..] {
        assert!(answer.is_ok(), "{answer:?}");
    }
}

#[tokio::test]
async fn a_program_that_always_fails_is_not_started_for_each_request() {
    let directory = tempfile::tempdir().expect("a directory");
    let starts = directory.path().join("starts");
    let script =
        format!("echo start >> {}; read -r line; echo broken >&2; exit 7", starts.display());
    let pool = pool(&script, 1, 1);
    let began = Instant::now();
    let mut last = String::new();
    for _ in 0..100 {
        last = pool.request_answer(&request("a"), LONG).await.unwrap_err().to_string();
    }
    assert!(last.contains("exit status: 7: broken") && last.contains("times in a row"), "{last}");
    let count = fs::read_to_string(&starts).expect("it was started").lines().count();
    assert!((3..20).contains(&count), "{count} starts");
    assert!(began.elapsed() < LONG);
}

#[tokio::test]
async fn idle_processes_end_and_a_missing_program_is_named() {
    let settings = PoolSettings {
        processes: 1,
        concurrent: 1,
        idle_timeout: Duration::from_millis(200),
        bounds: bounds(),
    };
    let pool = LineProgramPool::new(Box::new(shell(SERVE)), settings);
    let first = pid(&pool.request_answer(&request("a"), LONG).await.expect("an answer"));
    wait_until("the idle process ended", || !is_process(first)).await;
    assert!(pool.request_answer(&request("a"), LONG).await.is_ok(), "another one is started");
    let missing = CommandLauncher::new(|| Command::new("/nonexistent/program"));
    let pool = LineProgramPool::new(Box::new(missing), settings);
    let error = pool.request_answer(&request("a"), LONG).await.unwrap_err();
    assert_eq!(error.failure, LineFailure::NotStarted);
    assert!(error.to_string().starts_with("start /nonexistent/program: "), "{error}");
}
