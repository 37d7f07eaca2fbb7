//! Verdicts that follow from the completion and the prompt's answer alone.

use regex::Regex;
use wire::v1::{
    verdicts::{Outcome, Verdict},
    verifier::How,
};

use crate::{calls::Item, command};

/// A verifier with its patterns compiled.
#[derive(Debug)]
pub(crate) enum Judge {
    Exact {
        extract: Option<Regex>,
    },
    Numeric {
        extract: Option<Regex>,
        tolerance: f64,
    },
    /// The pattern may name the answer, so it is compiled for each item.
    Regex {
        pattern: String,
    },
    Command(command::Verifier),
}

/// What a judge thinks of one completion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Opinion {
    pub outcome: Outcome,
    pub reward: f64,
    pub detail: String,
}

/// Longest detail a verdict carries.
pub(crate) const DETAIL_BYTES_MAX: usize = 500;

/// Longest regular expression once compiled.
const REGEX_BYTES_MAX: usize = 1 << 20;

impl Opinion {
    pub(crate) fn pass() -> Self {
        Self { outcome: Outcome::Pass, reward: 1.0, detail: String::new() }
    }

    pub(crate) fn fail(detail: impl Into<String>) -> Self {
        Self { outcome: Outcome::Fail, reward: 0.0, detail: detail.into() }
    }

    pub(crate) fn error(detail: impl Into<String>) -> Self {
        Self { outcome: Outcome::Error, reward: 0.0, detail: detail.into() }
    }

    pub(crate) fn on(mut self, item: &Item) -> Verdict {
        let mut end = self.detail.len().min(DETAIL_BYTES_MAX);
        while !self.detail.is_char_boundary(end) {
            end -= 1;
        }
        self.detail.truncate(end);
        Verdict {
            prompt_id: item.prompt_id.clone(),
            index: item.index,
            outcome: self.outcome.into(),
            reward: self.reward,
            detail: self.detail,
        }
    }
}

impl Judge {
    /// # Errors
    /// When a pattern is no regular expression.
    pub(crate) fn new(how: &How) -> Result<Self, regex::Error> {
        Ok(match how {
            How::Exact(exact) => Self::Exact { extract: pattern(&exact.extract)? },
            How::Numeric(numeric) => {
                Self::Numeric { extract: pattern(&numeric.extract)?, tolerance: numeric.tolerance }
            }
            How::Regex(regex) => Self::Regex { pattern: regex.pattern.clone() },
            How::Command(command) => Self::Command(command.into()),
        })
    }

    pub(crate) fn judge(&self, item: &Item) -> Opinion {
        match self {
            Self::Exact { extract } => exact(extract.as_ref(), item),
            Self::Numeric { extract, tolerance } => numeric(extract.as_ref(), *tolerance, item),
            Self::Regex { pattern } => found(pattern, item),
            Self::Command(verifier) => verifier.judge(item),
        }
    }
}

fn pattern(text: &str) -> Result<Option<Regex>, regex::Error> {
    if text.is_empty() { Ok(None) } else { Regex::new(text).map(Some) }
}

/// The last match's first group, or the whole match when there is no group; without a
/// pattern all of the completion, trimmed.
fn candidate<'a>(extract: Option<&Regex>, completion: &'a str) -> Option<&'a str> {
    let Some(regex) = extract else { return Some(completion.trim()) };
    let last = regex.captures_iter(completion).last()?;
    last.get(1).or_else(|| last.get(0)).map(|found| found.as_str().trim())
}

fn exact(extract: Option<&Regex>, item: &Item) -> Opinion {
    let Some(answer) = &item.answer else { return no_answer() };
    match candidate(extract, &item.completion) {
        None => Opinion::fail("no answer found"),
        Some(found) if found == answer.trim() => Opinion::pass(),
        Some(found) => Opinion::fail(format!("found {found:?}, expected {answer:?}")),
    }
}

fn no_answer() -> Opinion {
    Opinion::error("the prompt has no field \"answer\"")
}

fn numeric(extract: Option<&Regex>, tolerance: f64, item: &Item) -> Opinion {
    let Some(answer) = &item.answer else { return no_answer() };
    let Some(expected) = number(answer) else {
        return Opinion::error(format!("the prompt's answer {answer:?} is not a number"));
    };
    let found = match extract {
        Some(_) => candidate(extract, &item.completion).and_then(number),
        None => last_number(&item.completion),
    };
    match found {
        None => Opinion::fail("no number found"),
        Some(found) if (found - expected).abs() <= tolerance => Opinion::pass(),
        Some(found) => Opinion::fail(format!("found {found}, expected {expected}")),
    }
}

/// `1,234.5`, `-3`, `1e-3`, `3/4`, `$12`, `50%` (as 50).
fn number(text: &str) -> Option<f64> {
    let kept: String = text
        .chars()
        .filter(|c| !matches!(c, ',' | '$' | '%' | '_') && !c.is_whitespace())
        .collect();
    let value = match kept.split_once('/') {
        Some((above, below)) => above.parse::<f64>().ok()? / below.parse::<f64>().ok()?,
        None => kept.parse().ok()?,
    };
    value.is_finite().then_some(value)
}

/// The last run of characters that reads as a number.
fn last_number(text: &str) -> Option<f64> {
    let part_of = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '-' | '/');
    text.split(|c| !part_of(c)).rev().find_map(|word| number(word.trim_end_matches(['.', ','])))
}

fn found(pattern: &str, item: &Item) -> Opinion {
    let answer = regex::escape(item.answer.as_deref().unwrap_or_default());
    let pattern = pattern.replace("{answer}", &answer);
    match regex::RegexBuilder::new(&pattern).size_limit(REGEX_BYTES_MAX).build() {
        Ok(regex) if regex.is_match(&item.completion) => Opinion::pass(),
        Ok(_) => Opinion::fail("the pattern is not found"),
        Err(error) => Opinion::error(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use wire::v1::verifier::{Exact, Numeric, Regex as Pattern};

    use super::*;

    fn outcome(how: &How, completion: &str, answer: Option<&str>) -> Outcome {
        let item = Item {
            prompt_id: "p".into(),
            index: 0,
            prompt: String::new(),
            completion: completion.into(),
            answer: answer.map(str::to_owned),
            fields: serde_json::Map::new(),
        };
        Judge::new(how).unwrap().judge(&item).outcome
    }

    #[test]
    fn exact_compares_the_last_thing_extracted() {
        let how = How::Exact(Exact { extract: r"#(\d+)".into() });
        assert_eq!(outcome(&how, "7+5=12 #132", Some("132")), Outcome::Pass);
        assert_eq!(outcome(&how, "#132 no, #133", Some("132")), Outcome::Fail);
        assert_eq!(outcome(&how, "132", Some("132")), Outcome::Fail);
        let whole = How::Exact(Exact { extract: String::new() });
        assert_eq!(outcome(&whole, " yes\n", Some("yes")), Outcome::Pass);
    }

    #[test]
    fn numbers_are_compared_as_numbers() {
        let how = How::Numeric(Numeric { extract: String::new(), tolerance: 1e-6 });
        for (completion, answer) in [
            ("so it is 1,234.50.", "1234.5"),
            ("1/4", "0.25"),
            ("between 3 and -7", "-7"),
            ("42 apples", "42.0"),
        ] {
            assert_eq!(outcome(&how, completion, Some(answer)), Outcome::Pass, "{completion}");
        }
        assert_eq!(outcome(&how, "none", Some("1")), Outcome::Fail);
        assert_eq!(outcome(&how, "1/0", Some("1")), Outcome::Fail);
    }

    #[test]
    fn a_pattern_may_name_the_answer() {
        let how = How::Regex(Pattern { pattern: r"^result: {answer}$".into() });
        assert_eq!(outcome(&how, "result: 1.5", Some("1.5")), Outcome::Pass);
        assert_eq!(outcome(&how, "result: 1x5", Some("1.5")), Outcome::Fail);
    }

    #[test]
    fn a_prompt_without_an_answer_is_the_verifiers_error_not_a_failure() {
        let exact = How::Exact(Exact { extract: String::new() });
        let numeric = How::Numeric(Numeric { extract: String::new(), tolerance: 0.0 });
        assert_eq!(outcome(&exact, "1", None), Outcome::Error);
        assert_eq!(outcome(&numeric, "1", None), Outcome::Error);
        assert_eq!(outcome(&numeric, "1", Some("one")), Outcome::Error);
    }
}
