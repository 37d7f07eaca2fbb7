//! The ladder of compiled programs: how far does one get?

use sandbox::{How, Limits, Program};
use wire::v1::verifier;

use super::{
    Desk,
    cases::cases,
    limits,
    native::{Built, build},
    output::Output,
    report::told,
    stdio::{Ran, read, run_cases},
};
use crate::{
    calls::Item,
    language::{Language, asked},
    opinion::Opinion,
    tools::Need,
};

/// Rewards of the rungs below the top.
const WARNINGS: f64 = 0.3;
const CLEAN: f64 = 0.5;
const RUNS: f64 = 0.7;

#[derive(Debug)]
pub(crate) struct Compile {
    language: String,
    run: bool,
    output: Output,
    limits: Limits,
    compiler: Limits,
}

impl From<&verifier::Compile> for Compile {
    fn from(compile: &verifier::Compile) -> Self {
        Self {
            language: compile.language.clone(),
            run: compile.run,
            output: compile.output.as_ref().into(),
            limits: limits::of(compile.limits.as_ref()),
            compiler: limits::of_compiler(compile.compile_timeout_s),
        }
    }
}

impl Compile {
    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        self.climb(item, desk).unwrap_or_else(|opinion| opinion)
    }

    fn climb(&self, item: &Item, desk: &mut Desk<'_>) -> Result<Opinion, Opinion> {
        let cases = cases(item).map_err(Opinion::error)?;
        let source = read(&self.language, item)?;
        if source.language == Language::Python {
            return Err(not_compiled(asked(&self.language, item) == Ok(Some(Language::Python))));
        }
        let tool = desk.tool(&Need::Language(source.language))?;
        let files = [(source.language.file(), source.code)];
        desk.in_room(&files, |room| {
            let (argv, warnings) = match build(source.language, tool, &self.compiler, room)? {
                Built::Fails(why) => return Ok(Opinion::fail(why)),
                Built::Trouble(why) => return Ok(Opinion::trouble(why)),
                Built::Runs { argv, warnings } => (argv, warnings),
            };
            let compiled = if warnings { WARNINGS } else { CLEAN };
            if !cases.is_empty() {
                let ran = run_cases(&argv, &cases, self.output, &self.limits, true, room)?;
                return Ok(answered(&ran, compiled));
            }
            if !self.run {
                return Ok(Opinion::pass().worth(compiled));
            }
            let ended = room.run(&Program { argv, ..Program::default() }, &self.limits)?;
            Ok(match ended.how {
                How::Exited(0) => Opinion::pass().worth(RUNS),
                _ => Opinion::fail(told(&ended, &self.limits)).worth(compiled),
            })
        })
    }
}

/// Whoever asks for it is at fault; a model that chose it by its fence has failed.
fn not_compiled(asked: bool) -> Opinion {
    let told = "python is not compiled: judge it by `stdio` or `python`";
    if asked { Opinion::error(told) } else { Opinion::fail(told) }
}

/// What is above running is shared out among the cases.
fn answered(ran: &Ran, compiled: f64) -> Opinion {
    let Ran { passed, total, wrong, in_order, not_started } = ran;
    if let Some(why) = not_started {
        return Opinion::trouble(why);
    }
    if passed == total {
        return Opinion::pass();
    }
    let failed = Opinion::fail(format!("{passed} of {total} cases passed: {wrong}"));
    // One that fails on some input runs if it answers another.
    let runs = *in_order || *passed > 0;
    failed.worth(if runs { RUNS + (1.0 - RUNS) * ran.share() } else { compiled })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_share_what_is_above_running() {
        let ran = |passed, in_order| Ran { passed, total: 2, in_order, ..Ran::default() };
        let reward = |passed, in_order| answered(&ran(passed, in_order), CLEAN).reward;
        for (found, expected) in [
            (reward(2, true), 1.0),
            (reward(1, true), 0.85),
            (reward(0, true), 0.7),
            (reward(0, false), 0.5),
            (reward(1, false), 0.85),
        ] {
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }
}
