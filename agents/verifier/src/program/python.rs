//! Python solutions and the tests of HumanEval, MBPP and their like.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};
use wire::v1::verifier;

use super::{Desk, limits, report::Report};
use crate::{
    calls::Item,
    fences::{Fence, fences},
    language::Language,
    opinion::Opinion,
    tools::Need,
};

/// Tests a solution is run with.
const HARNESS: &str = include_str!("harness.py");

const FILE: &str = "program.py";

#[derive(Debug)]
pub(crate) struct Python {
    limits: sandbox::Limits,
    partial: bool,
    challenge: bool,
}

/// What the harness is told.
#[derive(Debug, Clone, PartialEq)]
struct Task {
    code: String,
    setup: String,
    tests: Vec<String>,
    entry: String,
}

impl From<&verifier::Python> for Python {
    fn from(python: &verifier::Python) -> Self {
        let limits = limits::of(python.limits.as_ref());
        Self { limits, partial: python.partial, challenge: python.challenge }
    }
}

impl Python {
    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        let task = match task(item, self.challenge) {
            Ok(task) => task,
            Err(problem) => return Opinion::error(problem),
        };
        self.run(&task, desk).unwrap_or_else(|trouble| trouble)
    }

    fn run(&self, task: &Task, desk: &mut Desk<'_>) -> Result<Opinion, Opinion> {
        let python = &desk.tool(&Need::Language(Language::Python))?.argv;
        let argv = [&python[..], &["-I".into(), "-B".into(), FILE.into()]].concat();
        let files = [(FILE, self.program(task).into_bytes())];
        let report = Report::of(argv, &files, &self.limits, desk)?;
        Ok(report.opinion(self.partial))
    }

    /// The harness and its task in one file: what is text in JSON is text in Python, too.
    fn program(&self, task: &Task) -> String {
        let Task { code, setup, tests, entry } = task;
        let partial = u8::from(self.partial);
        let task = json!({
            "code": code, "setup": setup, "tests": tests, "entry": entry, "partial": partial,
        });
        format!("{HARNESS}main({task})\n")
    }
}

/// The error says what the prompt lacks.
fn task(item: &Item, challenge: bool) -> Result<Task, String> {
    let tests = tests(item, challenge)?;
    let entry = item.text("entry_point").unwrap_or_default();
    let is_check = tests.iter().any(|test| CHECK.is_match(test));
    if is_check && entry.is_empty() {
        return Err("the prompt's tests define check(), and it has no \"entry_point\"".into());
    }
    let tests = if is_check {
        tests.into_iter().map(|test| format!("{test}\ncheck(candidate)\n")).collect()
    } else {
        tests
    };
    Ok(Task {
        code: code(item, entry),
        setup: [sources(item, "test_imports")?, sources(item, "test_setup_code")?]
            .concat()
            .join("\n"),
        tests,
        entry: entry.to_owned(),
    })
}

/// `def check(candidate)`, as HumanEval has it.
static CHECK: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?m)^def check\(").expect("a regular expression"));

fn tests(item: &Item, challenge: bool) -> Result<Vec<String>, String> {
    let mut tests = Vec::new();
    for name in ["test", "tests", "test_list"] {
        tests.extend(sources(item, name)?);
    }
    if challenge {
        tests.extend(sources(item, "challenge_test_list")?);
    }
    if tests.is_empty() {
        return Err("the prompt has no tests: no field \"test\", \"tests\" or \"test_list\"".into());
    }
    Ok(tests)
}

/// A field with source code: a text, or a list of them.
fn sources(item: &Item, name: &str) -> Result<Vec<String>, String> {
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

/// The program a completion stands for: a whole one, behind what its prompt says before the
/// function, or one that goes on where the prompt ends.
fn code(item: &Item, entry: &str) -> String {
    let prompt = item.asked();
    let start = defines(prompt, entry);
    // A fence in what goes on with a function ends it.
    let goes_on = start.is_some() && is_indented(&item.completion);
    let blocks = if goes_on { Vec::new() } else { fences(&item.completion) };
    let python = |block: &&Fence<'_>| {
        block.tag.is_empty() || Language::named(&block.tag) == Some(Language::Python)
    };
    let blocks: Vec<&str> = blocks.iter().filter(python).map(|block| block.body).collect();
    let whole = |code: &str| defines(code, entry).is_some();
    let block = blocks.iter().rev().find(|block| whole(block)).or(blocks.last());
    let code = block.copied().unwrap_or(&item.completion);
    // A prompt in words is no code.
    let Some(start) = start else { return code.to_owned() };
    if whole(code) {
        return format!("{}\n{code}", &prompt[..start]);
    }
    let rest = if block.is_some() { code } else { continuation(code) };
    format!("{prompt}{rest}")
}

/// Where a function or class of that name is defined, at the outermost level.
fn defines(code: &str, entry: &str) -> Option<usize> {
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

fn is_indented(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty());
    first.is_some_and(|line| line.starts_with("  ") || line.starts_with('\t'))
}

/// A continuation without what a model goes on with when it is done, by the words at which
/// HumanEval stops sampling.
fn continuation(text: &str) -> &str {
    const STOP: [&str; 6] = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"];
    let end = STOP.iter().filter_map(|word| text.find(word)).min();
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(completion: &str, fields: Value) -> Item {
        let Value::Object(fields) = fields else { panic!("fields") };
        let prompt = "import math\n\ndef f(x):\n    \"\"\"Doc.\"\"\"\n".to_owned();
        Item { prompt, completion: completion.into(), fields, ..Item::example() }
    }

    fn code_of(completion: &str) -> String {
        code(&item(completion, json!({})), "f")
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
        assert_eq!(code(&item, "f"), "import math\n\n\ndef f(x):\n    return 2\n");
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
        assert_eq!(defines("def foo():", "f"), None);
        assert_eq!(defines("  def f():", "f"), None);
        assert_eq!(defines("x\nasync def f ():", "f"), Some(2));
        assert_eq!(defines("class f:", "f"), Some(0));
    }

    #[test]
    fn tests_are_found_by_any_convention() {
        let human = json!({"test": "def check(candidate):\n    pass", "entry_point": "f"});
        let found = task(&item("", human), false).unwrap();
        assert!(found.tests[0].ends_with("\ncheck(candidate)\n") && found.entry == "f");
        let mbpp = json!({
            "test_list": ["assert f(1)", "assert f(2)"], "challenge_test_list": ["assert f(3)"],
            "test_setup_code": "x = 1", "test_imports": ["import os"],
        });
        let found = task(&item("", mbpp.clone()), false).unwrap();
        assert_eq!((found.tests.len(), &*found.setup), (2, "import os\nx = 1"));
        assert_eq!(task(&item("", mbpp), true).unwrap().tests.len(), 3);
        for (fields, problem) in [
            (json!({}), "no tests"),
            (json!({"tests": 3}), "neither"),
            (json!({"test": "def check(candidate): pass"}), "entry_point"),
        ] {
            let error = task(&item("", fields), false).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
