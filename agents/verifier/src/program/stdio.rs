//! Programs that read stdin and write stdout.

use sandbox::{
    ProgramEnd, ProgramLimits, ProgramResult, SandboxError, SandboxProgram, SandboxRoom,
};
use wire::v1::verifier;

use super::{
    SandboxSlot,
    build::{BuildOutcome, build_program},
    cases::{TestCase, parse_cases},
    harness_report::describe_end,
    limits,
    output_match::OutputMatcher,
};
use crate::{
    calls::VerifyItem,
    judge_result::JudgeResult,
    language::{ProgramSource, extract_source, requested_language},
    tools::ToolNeed,
};

/// The settings of a `stdio` verifier.
#[derive(Debug)]
pub(crate) struct StdioVerifier {
    language: String,
    output: OutputMatcher,
    limits: ProgramLimits,
    compiler_limits: ProgramLimits,
    partial: bool,
}

impl From<&verifier::Stdio> for StdioVerifier {
    fn from(stdio: &verifier::Stdio) -> Self {
        Self {
            language: stdio.language.clone(),
            output: stdio.output.as_ref().into(),
            limits: limits::program_limits(stdio.limits.as_ref()),
            compiler_limits: limits::compiler_limits(stdio.compile_timeout_s),
            partial: stdio.partial,
        }
    }
}

impl StdioVerifier {
    /// Runs the completion's program on the prompt's cases.
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
        if cases.is_empty() {
            return Err(JudgeResult::input_error("the prompt has no cases: no field \"cases\""));
        }
        let source = read_source(&self.language, item)?;
        let tool = desk.find_tool(&ToolNeed::Language(source.language))?;
        let files = [(source.language.file_name(), source.code)];
        desk.run_in_room(&files, |room| {
            Ok(match build_program(source.language, tool, &self.compiler_limits, room)? {
                BuildOutcome::CompileError(why) => JudgeResult::failed_because(why),
                BuildOutcome::CompilerUnavailable(why) => JudgeResult::host_error(why),
                BuildOutcome::Ready { argv, .. } => {
                    let all = self.partial;
                    cases_result(
                        &run_cases(&argv, &cases, self.output, &self.limits, all, room)?,
                        all,
                    )
                }
            })
        })
    }
}

/// Converts the results of the cases into a result. With `partial`, the reward is the share of
/// passed cases.
fn cases_result(ran: &CaseResults, partial: bool) -> JudgeResult {
    if let Some(why) = &ran.start_error {
        return JudgeResult::host_error(why);
    }
    if ran.passed == ran.total {
        return JudgeResult::full_pass();
    }
    let CaseResults { passed, total, first_failure: wrong, .. } = ran;
    let failed = JudgeResult::failed_because(format!("{passed} of {total} cases passed: {wrong}"));
    if partial { failed.with_reward(ran.passed_share()) } else { failed }
}

/// Extracts the completion's program in the requested language.
pub(super) fn read_source<'a>(
    setting: &str,
    item: &'a VerifyItem,
) -> Result<ProgramSource<'a>, JudgeResult> {
    let wanted = requested_language(setting, item).map_err(|name| {
        JudgeResult::input_error(format!(
            "the prompt's language {name:?} is not known to verifiers"
        ))
    })?;
    extract_source(wanted, &item.completion).map_err(JudgeResult::failed_because)
}

/// The results of a program on its cases.
#[derive(Debug, Default)]
pub(super) struct CaseResults {
    pub passed: usize,
    pub total: usize,
    /// A description of the first failed case.
    pub first_failure: String,
    /// True if all runs ended by themselves with code 0, regardless of the output.
    pub exited_normally: bool,
    pub start_error: Option<String>,
}

impl CaseResults {
    /// Returns the share of passed cases, 0 without cases.
    pub(super) fn passed_share(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.passed as f64 / self.total as f64 }
    }
}

/// Runs a program on its cases in order. Stops at the first failed case unless `all` is set.
pub(super) fn run_cases(
    argv: &[String],
    cases: &[TestCase],
    output: OutputMatcher,
    limits: &ProgramLimits,
    all: bool,
    room: &mut SandboxRoom<'_>,
) -> Result<CaseResults, SandboxError> {
    let mut ran =
        CaseResults { total: cases.len(), exited_normally: true, ..CaseResults::default() };
    for (number, case) in (1..).zip(cases) {
        let stdin = case.input.clone().into_bytes();
        let program = SandboxProgram { argv: argv.to_vec(), env: Vec::new(), stdin };
        let ended = room.run(&program, limits)?;
        if let ProgramEnd::NotStarted(why) = &ended.how {
            ran.start_error = Some(format!("it cannot be started: {why}"));
            break;
        }
        ran.exited_normally &= ended.how == ProgramEnd::Exited(0);
        match describe_failure(&ended, case, output, limits) {
            None => ran.passed += 1,
            Some(wrong) => {
                if ran.first_failure.is_empty() {
                    ran.first_failure = format!("case {number}: {wrong}");
                }
                if !all {
                    break;
                }
            }
        }
    }
    Ok(ran)
}

/// Returns why a case failed, or `None` if it passed.
fn describe_failure(
    ended: &ProgramResult,
    case: &TestCase,
    output: OutputMatcher,
    limits: &ProgramLimits,
) -> Option<String> {
    const TOLD_CHARS: usize = 60;
    let short = |text: &str| text.trim_end().chars().take(TOLD_CHARS).collect::<String>();
    if ended.how != ProgramEnd::Exited(0) {
        return Some(describe_end(ended, limits));
    }
    (!output.matches_expected(&ended.stdout, &case.output)).then(|| {
        let printed = String::from_utf8_lossy(&ended.stdout);
        format!("it printed {:?}, expected {:?}", short(&printed), short(&case.output))
    })
}
