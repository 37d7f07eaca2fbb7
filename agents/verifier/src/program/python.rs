//! Python solutions with the tests of HumanEval, MBPP and similar data sets.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};
use wire::v1::verifier;

use super::{SandboxSlot, harness_report::HarnessReport, limits};
use crate::{
    calls::VerifyItem,
    fences::{FencedBlock, find_blocks},
    judge_result::JudgeResult,
    language::ProgramLanguage,
    tools::ToolNeed,
};

const HARNESS: &str = include_str!("harness.py");

const HARNESS_FILE: &str = "program.py";

#[derive(Debug)]
pub(crate) struct PythonVerifier {
    limits: sandbox::ProgramLimits,
    partial: bool,
    challenge: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct PythonTask {
    code: String,
    setup: String,
    tests: Vec<String>,
    entry: String,
}

impl From<&verifier::Python> for PythonVerifier {
    fn from(python: &verifier::Python) -> Self {
        let limits = limits::program_limits(python.limits.as_ref());
        Self { limits, partial: python.partial, challenge: python.challenge }
    }
}

impl PythonVerifier {
    /// Fails with a result that ends the judging early.
    pub(crate) fn judge_item(
        &self,
        item: &VerifyItem,
        slot: &mut SandboxSlot<'_>,
    ) -> Result<JudgeResult, JudgeResult> {
        let task = build_task(item, self.challenge).map_err(JudgeResult::input_error)?;
        let python = &slot.find_tool(&ToolNeed::Language(ProgramLanguage::Python))?.argv;
        let argv = [&python[..], &["-I".into(), "-B".into(), HARNESS_FILE.into()]].concat();
        let files = [(HARNESS_FILE, self.harness_program(&task).into_bytes())];
        let report = HarnessReport::run_harness(argv, &files, &self.limits, slot)?;
        Ok(report.into_result(self.partial))
    }

    /// Joins the harness and its task; a JSON text is a valid Python literal.
    fn harness_program(&self, task: &PythonTask) -> String {
        let PythonTask { code, setup, tests, entry } = task;
        let partial = u8::from(self.partial);
        let task = json!({
            "code": code, "setup": setup, "tests": tests, "entry": entry, "partial": partial,
        });
        format!("{HARNESS}main({task})\n")
    }
}

/// Fails with what the prompt lacks.
fn build_task(item: &VerifyItem, challenge: bool) -> Result<PythonTask, String> {
    let tests = collect_tests(item, challenge)?;
    let entry = item.text_field("entry_point").unwrap_or_default();
    let is_check = tests.iter().any(|test| CHECK_PATTERN.is_match(test));
    if is_check && entry.is_empty() {
        return Err("the prompt's tests define check(), and it has no \"entry_point\"".into());
    }
    let tests = if is_check {
        tests.into_iter().map(|test| format!("{test}\ncheck(candidate)\n")).collect()
    } else {
        tests
    };
    Ok(PythonTask {
        code: solution_code(item, entry),
        setup: [source_fields(item, "test_imports")?, source_fields(item, "test_setup_code")?]
            .concat()
            .join("\n"),
        tests,
        entry: entry.to_owned(),
    })
}

/// The test function of HumanEval.
static CHECK_PATTERN: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?m)^def check\(").expect("a regular expression"));

fn collect_tests(item: &VerifyItem, challenge: bool) -> Result<Vec<String>, String> {
    let mut tests = Vec::new();
    for name in ["test", "tests", "test_list"] {
        tests.extend(source_fields(item, name)?);
    }
    if challenge {
        tests.extend(source_fields(item, "challenge_test_list")?);
    }
    if tests.is_empty() {
        return Err("the prompt has no tests: no field \"test\", \"tests\" or \"test_list\"".into());
    }
    Ok(tests)
}

/// Accepts one text or a list of texts.
fn source_fields(item: &VerifyItem, name: &str) -> Result<Vec<String>, String> {
    let wrong = || format!("the prompt's field {name:?} is neither a text nor a list of texts");
    match item.fields.get(name) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text.clone()]),
        Some(Value::Array(list)) => {
            let text = |one: &Value| one.as_str().map(str::to_owned).ok_or_else(wrong);
            list.iter().map(text).collect()
        }
        Some(_) => Err(wrong()),
    }
}

/// Returns a whole program, a function behind the prompt's preceding code, or a continuation of the
/// prompt.
fn solution_code(item: &VerifyItem, entry: &str) -> String {
    let prompt = item.question_text();
    let start = find_definition(prompt, entry);
    // A fence inside the continuation of a function ends it.
    let goes_on = start.is_some() && starts_indented(&item.completion);
    let blocks = if goes_on { Vec::new() } else { find_blocks(&item.completion) };
    let python = |block: &&FencedBlock<'_>| {
        block.tag.is_empty()
            || ProgramLanguage::from_name(&block.tag) == Some(ProgramLanguage::Python)
    };
    let blocks: Vec<&str> = blocks.iter().filter(python).map(|block| block.body).collect();
    let whole = |code: &str| find_definition(code, entry).is_some();
    let block = blocks.iter().rev().find(|block| whole(block)).or(blocks.last());
    let code = block.copied().unwrap_or(&item.completion);
    // A prompt in natural language contains no code.
    let Some(start) = start else { return code.to_owned() };
    if whole(code) {
        return format!("{}\n{code}", &prompt[..start]);
    }
    let rest = if block.is_some() { code } else { trim_continuation(code) };
    format!("{prompt}{rest}")
}

/// Returns the offset of the function or class at the outermost level.
fn find_definition(code: &str, entry: &str) -> Option<usize> {
    if entry.is_empty() {
        return None;
    }
    let mut at = 0;
    code.split_inclusive('\n').find_map(|line| {
        let start = at;
        at += line.len();
        let named =
            ["def ", "async def ", "class "].iter().find_map(|word| line.strip_prefix(word));
        let rest = named?.trim_start().strip_prefix(entry)?;
        let ends = !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
        ends.then_some(start)
    })
}

fn starts_indented(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty());
    first.is_some_and(|line| line.starts_with("  ") || line.starts_with('\t'))
}

/// Cuts at the first stop word of HumanEval, after which a model no longer writes the solution.
fn trim_continuation(text: &str) -> &str {
    const STOP: [&str; 6] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"];
    let end = STOP.iter().filter_map(|word| text.find(word)).min();
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(completion: &str, fields: Value) -> VerifyItem {
        let Value::Object(fields) = fields else { panic!("fields") };
        let prompt = "import math\n\ndef f(x):\n    \"\"\"Doc.\"\"\"\n".to_owned();
        VerifyItem { prompt, completion: completion.into(), fields, ..VerifyItem::example_item() }
    }

    fn code_of(completion: &str) -> String {
        solution_code(&item(completion, json!({})), "f")
    }

    #[test]
    fn a_completion_goes_on_where_the_prompt_ends_or_stands_behind_its_imports() {
        let prompt = "import math\n\ndef f(x):\n    \"\"\"Doc.\"\"\"\n";
        assert_eq!(code_of("    return 1\n"), format!("{prompt}    return 1\n"));
        assert_eq!(
            code_of("def f(x):\n    return 1\n"),
            "import math\n\n\ndef f(x):\n    return 1\n"
        );
        let fenced = "Sure:\n```python\ndef f(x):\n    return 2\n```\nUse it so:\n```\nf(1)\n```\n";
        assert_eq!(code_of(fenced), "import math\n\n\ndef f(x):\n    return 2\n");
        assert_eq!(code_of("```python\n    return 3\n```"), format!("{prompt}    return 3\n"));
    }

    #[test]
    fn of_a_conversation_the_prompt_is_what_the_user_said() {
        let fields = json!({"plain_prompt": "import math\n\ndef f(x):\n"});
        let mut item = item("```python\ndef f(x):\n    return 2\n```", fields);
        item.prompt = "<|im_start|>user\nimport math\n\ndef f(x):\n<|im_end|>".into();
        assert_eq!(solution_code(&item, "f"), "import math\n\n\ndef f(x):\n    return 2\n");
    }

    #[test]
    fn what_follows_a_finished_continuation_is_left_out() {
        for more in
            ["def g():\n    pass", "print(f(1))", "# done", "if x:", "class A:", "```\nSo it is."]
        {
            let text = format!("    return 1\n{more}");
            assert!(code_of(&text).ends_with("    return 1"), "{more}");
        }
    }

    #[test]
    fn a_name_is_not_found_inside_another() {
        assert_eq!(find_definition("def foo():", "f"), None);
        assert_eq!(find_definition("  def f():", "f"), None);
        assert_eq!(find_definition("x\nasync def f ():", "f"), Some(2));
        assert_eq!(find_definition("class f:", "f"), Some(0));
    }

    #[test]
    fn tests_are_found_by_any_convention() {
        let human = json!({"test": "def check(candidate):\n    pass", "entry_point": "f"});
        let found = build_task(&item("", human), false).unwrap();
        assert!(found.tests[0].ends_with("\ncheck(candidate)\n") && found.entry == "f");
        let mbpp = json!({
            "test_list": ["assert f(1)", "assert f(2)"], "challenge_test_list": ["assert f(3)"],
            "test_setup_code": "x = 1", "test_imports": ["import os"],
        });
        let found = build_task(&item("", mbpp.clone()), false).unwrap();
        assert_eq!((found.tests.len(), &*found.setup), (2, "import os\nx = 1"));
        assert_eq!(build_task(&item("", mbpp), true).unwrap().tests.len(), 3);
        for (fields, problem) in [
            (json!({}), "no tests"),
            (json!({"tests": 3}), "neither"),
            (json!({"test": "def check(candidate): pass"}), "entry_point"),
        ] {
            let error = build_task(&item("", fields), false).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
