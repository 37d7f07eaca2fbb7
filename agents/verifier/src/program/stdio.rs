//! Programs that read stdin and write stdout.

use sandbox::{
    ProgramEnd, ProgramLimits, ProgramResult, SandboxError, SandboxProgram, SandboxRoom,
};
use wire::v1::verifier;

use super::{
    SandboxSlot,
    build::judge_built_program,
    cases::{TestCase, parse_cases},
    harness_report::describe_end,
    limits,
    output_match::OutputMatcher,
};
use crate::{
    calls::VerifyItem,
    judge_result::JudgeResult,
    language::{ProgramSource, extract_source, requested_language},
};

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
    /// Fails with a result that ends the judging early.
    pub(crate) fn judge_item(
        &self,
        item: &VerifyItem,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let cases = parse_cases(item).map_err(JudgeResult::input_error)?;
        if cases.is_empty() {
            return Err(JudgeResult::input_error("the prompt has no cases: no field \"cases\""));
        }
        let source = read_source(&self.language, item)?;
        judge_built_program(&source, &self.compiler_limits, slot, |program, room| {
            let all = self.partial;
            let ran = run_cases(&program.argv, &cases, self.output, &self.limits, all, room)?;
            Ok(cases_result(&ran, all))
        })
    }
}

/// Rewards the share of passed cases with `partial`.
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

#[derive(Debug, Default)]
pub(super) struct CaseResults {
    pub passed: usize,
    pub total: usize,
    pub first_failure: String,
    /// True if all runs ended with code 0, regardless of the output.
    pub exited_normally: bool,
    pub start_error: Option<String>,
}

impl CaseResults {
    /// Returns 0 without cases.
    pub(super) fn passed_share(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.passed as f64 / self.total as f64 }
    }
}

/// Stops at the first failed case unless `all` is set.
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
