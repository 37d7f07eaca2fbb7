//! All of HumanEval: right solutions pass, and slightly wrong ones fail.

use std::io::Read;

use flate2::read::GzDecoder;
use verifier::VerifyItem;
use wire::{
    PromptEntry,
    v1::verifier::{How, Python},
};

use crate::rig::{box_with, judge_all, told};

/// The right answer with a small change of the same type.
const SPOILED: &str = "

def spoiled(function):
    def call(*args):
        answer = function(*args)
        if isinstance(answer, bool):
            return not answer
        if isinstance(answer, (int, float)):
            return answer + 1
        if isinstance(answer, (str, list, tuple)):
            return answer + type(answer)('x')
        return 0 if answer is None else None
    return call

";

fn prompts() -> Vec<PromptEntry> {
    let mut text = Vec::new();
    let packed = &include_bytes!("../data/humaneval.jsonl.gz")[..];
    GzDecoder::new(packed).read_to_end(&mut text).expect("it unpacks");
    PromptEntry::parse_all(&text).expect("they are prompts")
}

fn solution(prompt: &PromptEntry) -> &str {
    prompt.fields["canonical_solution"].as_str().expect("a text")
}

#[test]
fn all_canonical_solutions_pass_and_all_their_mutations_fail() {
    let Some(toolchain) = box_with("python") else { return };
    let prompts = prompts();
    assert_eq!(prompts.len(), 164);
    let entry =
        |prompt: &PromptEntry| prompt.fields["entry_point"].as_str().expect("a name").to_owned();
    let right = prompts
        .iter()
        .map(|prompt| VerifyItem::from_prompt(prompt, 0, solution(prompt).to_owned()));
    let fenced = prompts.iter().map(|prompt| {
        let code = format!("{}{}", prompt.prompt, solution(prompt));
        VerifyItem::from_prompt(prompt, 1, format!("Here you are:\n```python\n{code}\n```\n"))
    });
    let empty =
        prompts.iter().map(|prompt| VerifyItem::from_prompt(prompt, 2, "    return None\n".into()));
    let spoiled = prompts.iter().map(|prompt| {
        let (code, entry) = (solution(prompt), entry(prompt));
        let code = format!("{}{code}{SPOILED}{entry} = spoiled({entry})\n", prompt.prompt);
        VerifyItem::from_prompt(prompt, 3, code)
    });
    let items: Vec<VerifyItem> = right.chain(fenced).chain(empty).chain(spoiled).collect();
    let verdicts = judge_all(toolchain, How::Python(Python::default()), &items);
    assert_eq!(verdicts.len(), 4 * 164);
    for verdict in &verdicts {
        let expected = if verdict.index < 2 { ("pass", 1.0) } else { ("fail", 0.0) };
        let (outcome, reward, detail) = told(verdict);
        let id = &verdict.prompt_id;
        assert_eq!((outcome, reward), expected, "{id}, variant {}: {detail}", verdict.index);
    }
}
