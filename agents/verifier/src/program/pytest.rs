//! A Python module, tested by a file for pytest.

use wire::v1::verifier;

use super::{Desk, limits, report::Report};
use crate::{calls::Item, language, language::Language, opinion::Opinion, tools::Need};

const HARNESS: &str = include_str!("pytest_harness.py");

const FILE: &str = "harness.py";

#[derive(Debug)]
pub(crate) struct Pytest {
    limits: sandbox::Limits,
    partial: bool,
    module: String,
}

impl From<&verifier::Pytest> for Pytest {
    fn from(pytest: &verifier::Pytest) -> Self {
        let module = Some(&pytest.module).filter(|module| !module.is_empty());
        let module = format!("{}.py", module.map_or("solution", String::as_str));
        Self { limits: limits::of(pytest.limits.as_ref()), partial: pytest.partial, module }
    }
}

impl Pytest {
    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        let Some(tests) = item.text("tests").or_else(|| item.text("test")) else {
            return Opinion::error("the prompt has no field \"tests\" with a file for pytest");
        };
        let code = match language::source(Some(Language::Python), &item.completion) {
            Ok(source) => source.code,
            Err(problem) => return Opinion::fail(problem),
        };
        self.run(code, tests, desk).unwrap_or_else(|trouble| trouble)
    }

    fn run(&self, code: &str, tests: &str, desk: &mut Desk<'_>) -> Result<Opinion, Opinion> {
        let python = &desk.tool(&Need::Pytest)?.argv;
        let argv = [&python[..], &["-I".into(), "-B".into(), FILE.into()]].concat();
        let files = [
            (FILE, HARNESS.as_bytes().to_vec()),
            (self.module.as_str(), code.as_bytes().to_vec()),
            ("test_program.py", tests.as_bytes().to_vec()),
        ];
        Ok(Report::of(argv, &files, &self.limits, desk)?.opinion(self.partial))
    }
}
