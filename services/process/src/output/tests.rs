use std::{
    process::Command,
    time::{Duration, Instant},
};

use super::{OutputTail, RunLimits, run_program};

const LIMITS: RunLimits = RunLimits {
    time: Duration::from_secs(20),
    poll: Duration::from_millis(5),
    stdout_bytes: 1000,
    stderr_bytes: 10,
    stderr_of_success: true,
};

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    command
}

#[test]
fn a_tail_keeps_the_end_at_a_character_boundary() {
    let mut tail = OutputTail::new(5);
    tail.push_str("abc");
    tail.push_str("déf");
    assert_eq!(tail.as_str(), "cdéf", "5 bytes: é has two");
    tail.push_str("ééé");
    assert_eq!(tail.as_str(), "éé", "the third é would be cut in half");
}

#[test]
fn a_program_reads_its_input_and_its_output_is_kept() {
    let mut seen = 0;
    let ended =
        run_program(&mut shell("cat; echo 12345678901234 >&2"), b"in".into(), LIMITS, |_| {
            seen += 1;
        })
        .expect("it succeeds");
    assert_eq!((ended.stdout.as_slice(), ended.stderr.as_str()), (&b"in"[..], "1234567890"));
    assert!(seen > 0);
}

#[test]
fn a_failure_carries_the_start_of_stderr() {
    let error = run_program(&mut shell("echo no >&2; exit 3"), Vec::new(), LIMITS, |_| ())
        .expect_err("it fails");
    assert_eq!(
        (error.problem.as_str(), error.stderr.trim()),
        ("it ended with exit status: 3", "no")
    );
}

#[test]
fn a_program_that_prints_too_much_or_runs_too_long_fails() {
    let many = run_program(&mut shell("head -c 1001 /dev/zero"), Vec::new(), LIMITS, |_| ());
    assert_eq!(many.expect_err("too much").problem, "it printed more than 1000 bytes");
    let limits = RunLimits { time: Duration::from_millis(100), ..LIMITS };
    let began = Instant::now();
    let long = run_program(&mut shell("sleep 60 & sleep 60"), Vec::new(), limits, |_| ());
    assert_eq!(long.expect_err("too long").problem, "it ran longer than 100ms");
    assert!(began.elapsed() < Duration::from_secs(30), "the group was killed");
}

#[test]
fn a_program_that_prints_without_end_does_not_run_to_its_time_limit() {
    let began = Instant::now();
    let error = run_program(&mut shell("exec yes"), Vec::new(), LIMITS, |_| ());
    let problem = error.expect_err("too much").problem;
    assert!(problem.starts_with("it ended with signal: 13"), "{problem}");
    assert!(began.elapsed() < LIMITS.time, "its pipe was closed");
}

#[test]
fn a_success_returns_stderr_only_if_that_is_wanted() {
    let limits = RunLimits { stderr_of_success: false, ..LIMITS };
    for (limits, stderr) in [(LIMITS, "no\n"), (limits, "")] {
        let mut command = shell("echo yes; echo no >&2");
        let ended = run_program(&mut command, Vec::new(), limits, |_| ()).expect("a success");
        assert_eq!((ended.stdout.as_slice(), ended.stderr.as_str()), (&b"yes\n"[..], stderr));
    }
}
