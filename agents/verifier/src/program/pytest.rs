//! A Python module that a pytest file tests.

use wire::v1::verifier;

use super::{SandboxSlot, harness_report::HarnessReport, limits};
use crate::{
    calls::VerifyItem, judge_result::JudgeResult, language, language::ProgramLanguage,
    tools::ToolNeed,
};

const HARNESS: &str = include_str!("pytest_harness.py");

const HARNESS_FILE: &str = "harness.py";

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
    /// Fails with a result that ends the judging early.
    pub(crate) fn judge_item(
        &self,
        item: &VerifyItem,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let tests = item.text_field("tests").or_else(|| item.text_field("test"));
        let tests = tests.ok_or_else(|| {
            JudgeResult::input_error("the prompt has no field \"tests\" with a file for pytest")
        })?;
        let source = language::extract_source(Some(ProgramLanguage::Python), &item.completion);
        let code = source.map_err(JudgeResult::failed_because)?.code;
        let python = &slot.find_tool(&ToolNeed::Pytest)?.argv;
        let argv = [&python[..], &["-I".into(), "-B".into(), HARNESS_FILE.into()]].concat();
        let files = [
            (HARNESS_FILE, HARNESS.as_bytes().to_vec()),
            (self.module.as_str(), code.as_bytes().to_vec()),
            ("test_program.py", tests.as_bytes().to_vec()),
        ];
        Ok(HarnessReport::run_harness(argv, &files, &self.limits, slot)?.into_result(self.partial))
    }
}
