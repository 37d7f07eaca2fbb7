//! What a harness says of the tests it ran, in words that nobody else can say.

use std::hash::{BuildHasher, Hasher, RandomState};

use sandbox::{Ended, How, Limits, Program};

use super::Desk;
use crate::opinion::Opinion;

/// Of what a program wrote last, told.
const TAIL_BYTES: usize = 300;

/// `WORD done PASSED TOTAL DETAIL`
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Report {
    Done {
        passed: u32,
        total: u32,
        detail: String,
    },
    /// The prompt's own tests cannot be run.
    Unfit(String),
    /// It ended without a word of the harness's.
    Silent(String),
}

impl Report {
    /// Runs a harness that says a word it finds on its stdin, and nothing else, on its stdout.
    pub(super) fn of(
        argv: Vec<String>,
        files: &[(&str, Vec<u8>)],
        limits: &Limits,
        desk: &mut Desk<'_>,
    ) -> Result<Self, Opinion> {
        let word = word();
        let program = Program { argv, stdin: word.clone().into_bytes(), ..Program::default() };
        let ended = desk.in_room(files, |room| room.run(&program, limits))?;
        started(&ended)?;
        Ok(Self::read(&word, &ended, limits))
    }

    fn read(word: &str, ended: &Ended, limits: &Limits) -> Self {
        let text = String::from_utf8_lossy(&ended.stdout);
        let said = text.strip_prefix(word).and_then(|rest| rest.strip_prefix(' '));
        match said.filter(|_| ended.how == How::Exited(0)).and_then(Self::parse) {
            Some(report) => report,
            None => Self::Silent(told(ended, limits)),
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
            "error" => Some(Self::Unfit(detail)),
            _ => None,
        }
    }

    pub(super) fn opinion(self, partial: bool) -> Opinion {
        match self {
            Self::Unfit(problem) => Opinion::error(problem),
            Self::Silent(how) => Opinion::fail(how),
            Self::Done { passed, total, .. } if passed == total && total > 0 => Opinion::pass(),
            Self::Done { passed, total, detail } => {
                let failed = Opinion::fail(format!("{passed} of {total} tests passed: {detail}"));
                let share = if total > 0 { f64::from(passed) / f64::from(total) } else { 0.0 };
                if partial { failed.worth(share) } else { failed }
            }
        }
    }
}

/// A tool that was there when the box was looked at must start.
pub(super) fn started(ended: &Ended) -> Result<(), Opinion> {
    match &ended.how {
        How::NotStarted(why) => Err(Opinion::trouble(format!("it cannot be started: {why}"))),
        _ => Ok(()),
    }
}

/// How a program ended, and what it wrote last.
pub(super) fn told(ended: &Ended, limits: &Limits) -> String {
    let how = match &ended.how {
        How::Exited(code) => format!("it ended with code {code}"),
        How::Signalled(signal) => format!("it was ended by signal {signal}"),
        How::TimedOut => format!("it ran longer than {:?}", limits.wall),
        How::OutOfMemory => format!("it used more than {} MiB", limits.memory_bytes >> 20),
        How::OutputTooLong => format!("it printed more than {} KiB", limits.output_bytes >> 10),
        How::NotStarted(why) => format!("it cannot be started: {why}"),
    };
    let tail =
        String::from_utf8_lossy(&ended.stderr[ended.stderr.len().saturating_sub(TAIL_BYTES)..]);
    match tail.trim() {
        "" => how,
        tail => format!("{how}: {tail}"),
    }
}

/// Nobody guesses it: the standard library's hash keys come from the system's randomness.
fn word() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use wire::v1::verdicts::Outcome;

    use super::*;

    fn read(stdout: &str, how: How) -> Report {
        let (stdout, stderr) = (stdout.as_bytes().to_vec(), Vec::new());
        let ended = Ended { how, stdout, stderr, wall: Duration::ZERO };
        Report::read("w0rd", &ended, &Limits::default())
    }

    #[test]
    fn only_the_harness_with_its_word_is_believed() {
        let done = |passed| Report::Done { passed, total: 2, detail: "x y".into() };
        assert_eq!(read("w0rd done 2 2 x y", How::Exited(0)), done(2));
        for (stdout, how) in [
            ("done 2 2", How::Exited(0)),
            ("other done 2 2", How::Exited(0)),
            (" w0rd done 2 2", How::Exited(0)),
            ("w0rd done 2 2", How::Exited(1)),
            ("w0rd done 2 2", How::Signalled(9)),
            ("w0rd done -1 2", How::Exited(0)),
            ("", How::TimedOut),
        ] {
            assert!(matches!(read(stdout, how), Report::Silent(_)), "{stdout}");
        }
    }

    #[test]
    fn all_tests_pass_or_some_pay_a_share_if_that_is_wanted() {
        let done = |passed, total| Report::Done { passed, total, detail: String::new() };
        assert_eq!(done(3, 3).opinion(false), Opinion::pass());
        assert_eq!(done(0, 0).opinion(true).outcome, Outcome::Fail);
        assert_eq!(done(1, 4).opinion(false).reward.to_bits(), 0_f64.to_bits());
        assert_eq!(done(1, 4).opinion(true).reward.to_bits(), 0.25_f64.to_bits());
        assert_eq!(Report::Unfit("x".into()).opinion(true), Opinion::error("x"));
        assert_ne!(word(), word());
    }
}
