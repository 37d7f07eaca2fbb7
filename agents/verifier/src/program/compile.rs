//! A verifier with rewards for how far a compiled program gets: it compiles, it compiles without
//! warnings, it runs, it passes its cases.

use sandbox::{ProgramEnd, ProgramLimits, SandboxProgram};
use wire::v1::verifier;

use super::{
    SandboxSlot,
    build::{BuiltProgram, judge_built_program},
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
};

const WARNINGS_REWARD: f64 = 0.3;
const CLEAN_REWARD: f64 = 0.5;
/// Passed cases raise it up to 1.
const RUNS_REWARD: f64 = 0.7;

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
    /// Fails with a result that ends the judging early.
    pub(crate) fn judge_item(
        &self,
        item: &VerifyItem,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let cases = parse_cases(item).map_err(JudgeResult::input_error)?;
        let source = read_source(&self.language, item)?;
        if source.language == ProgramLanguage::Python {
            return Err(reject_python(
                requested_language(&self.language, item) == Ok(Some(ProgramLanguage::Python)),
            ));
        }
        judge_built_program(&source, &self.compiler_limits, slot, |program, room| {
            let BuiltProgram { argv, warnings } = program;
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

/// Returns an error if the prompt requested Python, a failure if the model chose it.
fn reject_python(asked: bool) -> JudgeResult {
    let problem = "python is not compiled: judge it by `stdio` or `python`";
    if asked { JudgeResult::input_error(problem) } else { JudgeResult::failed_because(problem) }
}

/// Divides the reward above `RUNS_REWARD` among the cases.
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
