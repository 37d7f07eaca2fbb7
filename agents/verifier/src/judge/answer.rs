//! Verdicts that follow from the completion's text and the prompt's answer.

use regex::Regex;
use wire::v1::verdicts::Verdict;

use crate::{
    calls::VerifyItem,
    judge::numeric::{self, NumberTolerance},
    judge_result::JudgeResult,
};

/// The limit of a compiled regular expression's size.
const REGEX_BYTES_MAX: usize = 1 << 20;

/// Returns `None` for an empty text.
pub(crate) fn compile_pattern(text: &str) -> Result<Option<Regex>, regex::Error> {
    if text.is_empty() { Ok(None) } else { Regex::new(text).map(Some) }
}

/// Returns the last match's first group, or the whole match without a group. Without a pattern,
/// returns the whole completion, trimmed.
fn extract_candidate<'a>(extract: Option<&Regex>, completion: &'a str) -> Option<&'a str> {
    let Some(regex) = extract else { return Some(completion.trim()) };
    let last = regex.captures_iter(completion).last()?;
    last.get(1).or_else(|| last.get(0)).map(|found| found.as_str().trim())
}

pub(crate) fn judge_exact(extract: Option<&Regex>, item: &VerifyItem) -> JudgeResult {
    let Some(answer) = &item.answer else { return missing_answer() };
    match extract_candidate(extract, &item.completion) {
        None => JudgeResult::failed_because(Verdict::NO_ANSWER),
        Some(found) if found == answer.trim() => JudgeResult::full_pass(),
        // Some data sets keep whole solutions as answers.
        Some(found) if extract_candidate(extract, answer) == Some(found) => {
            JudgeResult::full_pass()
        }
        Some(found) => JudgeResult::failed_because(format!("found {found:?}, expected {answer:?}")),
    }
}

pub(crate) fn judge_numeric(
    extract: Option<&Regex>,
    tolerance: NumberTolerance,
    item: &VerifyItem,
) -> JudgeResult {
    let Some(answer) = &item.answer else { return missing_answer() };
    // Some data sets keep whole solutions as answers: GSM8K ends them with #### 42.
    let Some(expected) = numeric::parse_number(answer).or_else(|| numeric::find_answer(answer))
    else {
        return JudgeResult::input_error(format!("the prompt's answer {answer:?} is not a number"));
    };
    let found = match extract {
        Some(_) => extract_candidate(extract, &item.completion).and_then(numeric::parse_number),
        None => numeric::find_answer(&item.completion),
    };
    match found {
        None => JudgeResult::failed_because(Verdict::NO_NUMBER),
        Some(found) if tolerance.accepts_number(found, expected) => JudgeResult::full_pass(),
        Some(found) => JudgeResult::failed_because(format!("found {found}, expected {expected}")),
    }
}

/// Replaces `{answer}` in the pattern by the prompt's answer.
pub(crate) fn judge_pattern(pattern: &str, item: &VerifyItem) -> JudgeResult {
    let answer = regex::escape(item.answer.as_deref().unwrap_or_default());
    let pattern = pattern.replace("{answer}", &answer);
    match regex::RegexBuilder::new(&pattern).size_limit(REGEX_BYTES_MAX).build() {
        Ok(regex) if regex.is_match(&item.completion) => JudgeResult::full_pass(),
        Ok(_) => JudgeResult::failed_because("the pattern is not found"),
        Err(error) => JudgeResult::input_error(error.to_string()),
    }
}

fn missing_answer() -> JudgeResult {
    JudgeResult::input_error("the prompt has no field \"answer\"")
}
