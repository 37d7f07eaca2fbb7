//! A verifier with rewards for how far a compiled program gets: it compiles, it compiles without
//! warnings, it runs, it passes its cases.

use sandbox::{ProgramEnd, ProgramLimits, SandboxProgram};
use wire::v1::verifier;

use super::{
    SandboxSlot,
    build::{BuildOutcome, build_program},
    cases::parse_cases,
    harness_report::describe_end,
    limits,
    output_match::OutputMatcher,
    stdio::{CaseResults, read_source, run_cases},
};
use crate::{
    calls::VerifyItem,
    judge_result::JudgeResult,
    language::{ProgramLanguage, requested_language},
    tools::ToolNeed,
};

/// The reward of a program that compiles with warnings.
const WARNINGS_REWARD: f64 = 0.3;
/// The reward of a program that compiles without warnings.
const CLEAN_REWARD: f64 = 0.5;
/// The reward of a program that runs; passed cases raise it up to 1.
const RUNS_REWARD: f64 = 0.7;

/// The settings of a `compile` verifier.
#[derive(Debug)]
pub(crate) struct CompileVerifier {
    language: String,
    run: bool,
    output: OutputMatcher,
    limits: ProgramLimits,
    compiler_limits: ProgramLimits,
}

impl From<&verifier::Compile> for CompileVerifier {
    fn from(compile: &verifier::Compile) -> Self {
        Self {
            language: compile.language.clone(),
            run: compile.run,
            output: compile.output.as_ref().into(),
            limits: limits::program_limits(compile.limits.as_ref()),
            compiler_limits: limits::compiler_limits(compile.compile_timeout_s),
        }
    }
}

impl CompileVerifier {
    /// Compiles and, if required, runs the program of the completion.
    pub(crate) fn judge_item(&self, item: &VerifyItem, desk: &mut SandboxSlot<'_>) -> JudgeResult {
        self.try_judge(item, desk).unwrap_or_else(|opinion| opinion)
    }

    /// Does the work of `judge_item`; the error is a result that ends it early.
    fn try_judge(
        &self,
        item: &VerifyItem,
        desk: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let cases = parse_cases(item).map_err(JudgeResult::input_error)?;
        let source = read_source(&self.language, item)?;
        if source.language == ProgramLanguage::Python {
            return Err(reject_python(
                requested_language(&self.language, item) == Ok(Some(ProgramLanguage::Python)),
            ));
        }
        let tool = desk.find_tool(&ToolNeed::Language(source.language))?;
        let files = [(source.language.file_name(), source.code)];
        desk.run_in_room(&files, |room| {
            let (argv, warnings) =
                match build_program(source.language, tool, &self.compiler_limits, room)? {
                    BuildOutcome::CompileError(why) => return Ok(JudgeResult::failed_because(why)),
                    BuildOutcome::CompilerUnavailable(why) => {
                        return Ok(JudgeResult::host_error(why));
                    }
                    BuildOutcome::Ready { argv, warnings } => (argv, warnings),
                };
            let compiled = if warnings { WARNINGS_REWARD } else { CLEAN_REWARD };
            if !cases.is_empty() {
                let ran = run_cases(&argv, &cases, self.output, &self.limits, true, room)?;
                return Ok(judge_cases(&ran, compiled));
            }
            if !self.run {
                return Ok(JudgeResult::full_pass().with_reward(compiled));
            }
            let ended =
                room.run(&SandboxProgram { argv, ..SandboxProgram::default() }, &self.limits)?;
            Ok(match ended.how {
                ProgramEnd::Exited(0) => JudgeResult::full_pass().with_reward(RUNS_REWARD),
                _ => JudgeResult::failed_because(describe_end(&ended, &self.limits))
                    .with_reward(compiled),
            })
        })
    }
}

/// Returns the result for a Python program: an error if the prompt requested Python, a failure if
/// the model chose it.
fn reject_python(asked: bool) -> JudgeResult {
    let told = "python is not compiled: judge it by `stdio` or `python`";
    if asked { JudgeResult::input_error(told) } else { JudgeResult::failed_because(told) }
}

/// Returns the result of a program with cases: the reward above `RUNS_REWARD` is divided among the
/// cases.
fn judge_cases(ran: &CaseResults, compiled: f64) -> JudgeResult {
    let CaseResults {
        passed,
        total,
        first_failure: wrong,
        exited_normally: in_order,
        start_error: not_started,
    } = ran;
    if let Some(why) = not_started {
        return JudgeResult::host_error(why);
    }
    if passed == total {
        return JudgeResult::full_pass();
    }
    let failed = JudgeResult::failed_because(format!("{passed} of {total} cases passed: {wrong}"));
    // A program that fails on some input counts as running if it passes another case.
    let runs = *in_order || *passed > 0;
    failed.with_reward(if runs {
        RUNS_REWARD + (1.0 - RUNS_REWARD) * ran.passed_share()
    } else {
        compiled
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_share_what_is_above_running() {
        let ran = |passed, in_order| CaseResults {
            passed,
            total: 2,
            exited_normally: in_order,
            ..CaseResults::default()
        };
        let reward = |passed, in_order| judge_cases(&ran(passed, in_order), CLEAN_REWARD).reward;
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
