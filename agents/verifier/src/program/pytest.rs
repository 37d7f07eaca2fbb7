//! A Python module that a pytest file tests.

use wire::v1::verifier;

use super::{SandboxSlot, harness_report::HarnessReport, limits};
use crate::{
    calls::VerifyItem, judge_result::JudgeResult, language, language::ProgramLanguage,
    tools::ToolNeed,
};

/// The Python program that runs pytest and reports the result.
const HARNESS: &str = include_str!("pytest_harness.py");

/// The name of the harness in the room.
const HARNESS_FILE: &str = "harness.py";

/// The settings of a `pytest` verifier.
#[derive(Debug)]
pub(crate) struct PytestVerifier {
    limits: sandbox::ProgramLimits,
    partial: bool,
    module: String,
}

impl From<&verifier::Pytest> for PytestVerifier {
    fn from(pytest: &verifier::Pytest) -> Self {
        let module = Some(&pytest.module).filter(|module| !module.is_empty());
        let module = format!("{}.py", module.map_or("solution", String::as_str));
        Self {
            limits: limits::program_limits(pytest.limits.as_ref()),
            partial: pytest.partial,
            module,
        }
    }
}

impl PytestVerifier {
    /// Runs the prompt's tests on the completion's module.
    pub(crate) fn judge_item(&self, item: &VerifyItem, desk: &mut SandboxSlot<'_>) -> JudgeResult {
        let Some(tests) = item.text_field("tests").or_else(|| item.text_field("test")) else {
            return JudgeResult::input_error(
                "the prompt has no field \"tests\" with a file for pytest",
            );
        };
        let code = match language::extract_source(Some(ProgramLanguage::Python), &item.completion) {
            Ok(source) => source.code,
            Err(problem) => return JudgeResult::failed_because(problem),
        };
        self.run_tests(code, tests, desk).unwrap_or_else(|trouble| trouble)
    }

    /// Runs the harness in a room with the module and the tests.
    fn run_tests(
        &self,
        code: &str,
        tests: &str,
        desk: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let python = &desk.find_tool(&ToolNeed::Pytest)?.argv;
        let argv = [&python[..], &["-I".into(), "-B".into(), HARNESS_FILE.into()]].concat();
        let files = [
            (HARNESS_FILE, HARNESS.as_bytes().to_vec()),
            (self.module.as_str(), code.as_bytes().to_vec()),
            ("test_program.py", tests.as_bytes().to_vec()),
        ];
        Ok(HarnessReport::run_harness(argv, &files, &self.limits, desk)?.into_result(self.partial))
    }
}
