//! Verdicts that follow from a text and the prompt's answer.

use regex::Regex;

use crate::{
    calls::Item,
    judge::numeric::{self, Tolerance},
    opinion::Opinion,
};

/// Longest regular expression once compiled.
const REGEX_BYTES_MAX: usize = 1 << 20;

/// # Errors
/// When the text is no regular expression.
pub(crate) fn pattern(text: &str) -> Result<Option<Regex>, regex::Error> {
    if text.is_empty() { Ok(None) } else { Regex::new(text).map(Some) }
}

/// The last match's first group, or the whole match when there is no group; without a
/// pattern all of the completion, trimmed.
fn candidate<'a>(extract: Option<&Regex>, completion: &'a str) -> Option<&'a str> {
    let Some(regex) = extract else { return Some(completion.trim()) };
    let last = regex.captures_iter(completion).last()?;
    last.get(1).or_else(|| last.get(0)).map(|found| found.as_str().trim())
}

pub(crate) fn exact(extract: Option<&Regex>, item: &Item) -> Opinion {
    let Some(answer) = &item.answer else { return no_answer() };
    match candidate(extract, &item.completion) {
        None => Opinion::fail("no answer found"),
        Some(found) if found == answer.trim() => Opinion::pass(),
        Some(found) => Opinion::fail(format!("found {found:?}, expected {answer:?}")),
    }
}

pub(crate) fn numeric(extract: Option<&Regex>, tolerance: Tolerance, item: &Item) -> Opinion {
    let Some(answer) = &item.answer else { return no_answer() };
    // Data sets keep whole solutions as answers: GSM8K ends them with #### 42.
    let Some(expected) = numeric::number(answer).or_else(|| numeric::answer(answer)) else {
        return Opinion::error(format!("the prompt's answer {answer:?} is not a number"));
    };
    let found = match extract {
        Some(_) => candidate(extract, &item.completion).and_then(numeric::number),
        None => numeric::answer(&item.completion),
    };
    match found {
        None => Opinion::fail("no number found"),
        Some(found) if tolerance.admits(found, expected) => Opinion::pass(),
        Some(found) => Opinion::fail(format!("found {found}, expected {expected}")),
    }
}

pub(crate) fn found(pattern: &str, item: &Item) -> Opinion {
    let answer = regex::escape(item.answer.as_deref().unwrap_or_default());
    let pattern = pattern.replace("{answer}", &answer);
    match regex::RegexBuilder::new(&pattern).size_limit(REGEX_BYTES_MAX).build() {
        Ok(regex) if regex.is_match(&item.completion) => Opinion::pass(),
        Ok(_) => Opinion::fail("the pattern is not found"),
        Err(error) => Opinion::error(error.to_string()),
    }
}

fn no_answer() -> Opinion {
    Opinion::error("the prompt has no field \"answer\"")
}
