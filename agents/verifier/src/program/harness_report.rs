//! The report of a test harness, protected by a secret word against programs that forge it.

use std::hash::{BuildHasher, Hasher, RandomState};

use sandbox::{ProgramEnd, ProgramLimits, ProgramResult, SandboxProgram};

use super::SandboxSlot;
use crate::judge_result::JudgeResult;

const STDERR_TAIL_BYTES: usize = 300;

/// The report line `WORD done PASSED TOTAL DETAIL`.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum HarnessReport {
    Done {
        passed: u32,
        total: u32,
        detail: String,
    },
    /// The prompt's own tests cannot be run.
    InvalidTests(String),
    Missing(String),
}

impl HarnessReport {
    /// Runs a harness that reads a secret word from stdin and prints only the report, which begins
    /// with it.
    pub(super) fn run_harness(
        argv: Vec<String>,
        files: &[(&str, Vec<u8>)],
        limits: &ProgramLimits,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<Self, JudgeResult> {
        let word = secret_word();
        let program =
            SandboxProgram { argv, stdin: word.clone().into_bytes(), ..SandboxProgram::default() };
        let ended = slot.run_in_room(files, |room| room.run(&program, limits))?;
        check_started(&ended)?;
        Ok(Self::read_report(&word, &ended, limits))
    }

    /// Accepts a report only after the secret word and with exit code 0.
    fn read_report(word: &str, ended: &ProgramResult, limits: &ProgramLimits) -> Self {
        let text = String::from_utf8_lossy(&ended.stdout);
        let report = text.strip_prefix(word).and_then(|rest| rest.strip_prefix(' '));
        match report.filter(|_| ended.how == ProgramEnd::Exited(0)).and_then(Self::parse) {
            Some(report) => report,
            None => Self::Missing(describe_end(ended, limits)),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.splitn(4, ' ');
        let (kind, passed, total) = (words.next()?, words.next()?, words.next()?);
        let detail = words.next().unwrap_or_default().trim().to_owned();
        match kind {
            "done" => Some(Self::Done {
                passed: passed.parse().ok()?,
                total: total.parse().ok()?,
                detail,
            }),
            "error" => Some(Self::InvalidTests(detail)),
            _ => None,
        }
    }

    /// Rewards the share of passed tests with `partial`.
    pub(super) fn into_result(self, partial: bool) -> JudgeResult {
        match self {
            Self::InvalidTests(problem) => JudgeResult::input_error(problem),
            Self::Missing(how) => JudgeResult::failed_because(how),
            Self::Done { passed, total, .. } if passed == total && total > 0 => {
                JudgeResult::full_pass()
            }
            Self::Done { passed, total, detail } => {
                let failed = JudgeResult::failed_because(format!(
                    "{passed} of {total} tests passed: {detail}"
                ));
                let share = if total > 0 { f64::from(passed) / f64::from(total) } else { 0.0 };
                if partial { failed.with_reward(share) } else { failed }
            }
        }
    }
}

/// Returns a host error if the program could not be started, because the tool existed when the host
/// was tested.
pub(super) fn check_started(ended: &ProgramResult) -> Result<(), JudgeResult> {
    match &ended.how {
        ProgramEnd::NotStarted(why) => {
            Err(JudgeResult::host_error(format!("it cannot be started: {why}")))
        }
        _ => Ok(()),
    }
}

/// Includes the end of stderr.
pub(crate) fn describe_end(ended: &ProgramResult, limits: &ProgramLimits) -> String {
    let how = match &ended.how {
        ProgramEnd::Exited(code) => format!("it ended with code {code}"),
        ProgramEnd::Signalled(signal) => format!("it was ended by signal {signal}"),
        ProgramEnd::TimedOut => format!("it ran longer than {:?}", limits.wall),
        ProgramEnd::OutOfMemory => format!("it used more than {} MiB", limits.memory_bytes >> 20),
        ProgramEnd::OutputTooLong => {
            format!("it printed more than {} KiB", limits.output_bytes >> 10)
        }
        ProgramEnd::NotStarted(why) => format!("it cannot be started: {why}"),
    };
    let tail = String::from_utf8_lossy(
        &ended.stderr[ended.stderr.len().saturating_sub(STDERR_TAIL_BYTES)..],
    );
    match tail.trim() {
        "" => how,
        tail => format!("{how}: {tail}"),
    }
}

/// Draws on the standard library's hash keys, which come from the system's randomness, so that
/// programs cannot guess the word.
fn secret_word() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wire::v1::verdicts::Outcome;

    use super::*;

    fn read(stdout: &str, how: ProgramEnd) -> HarnessReport {
        let (stdout, stderr) = (stdout.as_bytes().to_vec(), Vec::new());
        let ended = ProgramResult { how, stdout, stderr, wall: Duration::ZERO };
        HarnessReport::read_report("w0rd", &ended, &ProgramLimits::default())
    }

    #[test]
    fn only_the_harness_with_its_word_is_believed() {
        let done = |passed| HarnessReport::Done { passed, total: 2, detail: "x y".into() };
        assert_eq!(read("w0rd done 2 2 x y", ProgramEnd::Exited(0)), done(2));
        for (stdout, how) in [
            ("done 2 2", ProgramEnd::Exited(0)),
            ("other done 2 2", ProgramEnd::Exited(0)),
            (" w0rd done 2 2", ProgramEnd::Exited(0)),
            ("w0rd done 2 2", ProgramEnd::Exited(1)),
            ("w0rd done 2 2", ProgramEnd::Signalled(9)),
            ("w0rd done -1 2", ProgramEnd::Exited(0)),
            ("", ProgramEnd::TimedOut),
        ] {
            assert!(matches!(read(stdout, how), HarnessReport::Missing(_)), "{stdout}");
        }
    }

    #[test]
    fn all_tests_pass_or_some_pay_a_share_if_that_is_wanted() {
        let done = |passed, total| HarnessReport::Done { passed, total, detail: String::new() };
        assert_eq!(done(3, 3).into_result(false), JudgeResult::full_pass());
        assert_eq!(done(0, 0).into_result(true).outcome, Outcome::Fail);
        assert_eq!(done(1, 4).into_result(false).reward.to_bits(), 0_f64.to_bits());
        assert_eq!(done(1, 4).into_result(true).reward.to_bits(), 0.25_f64.to_bits());
        assert_eq!(
            HarnessReport::InvalidTests("x".into()).into_result(true),
            JudgeResult::input_error("x")
        );
        assert_ne!(secret_word(), secret_word());
    }
}
