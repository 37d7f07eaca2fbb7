//! Statistics of a run's files and warnings about them, reported before the run starts.

use std::collections::BTreeMap;

use spec::VerifierSpec;
use wire::v1::{DataFile, data_file::Lengths};

use super::{
    error::DataError,
    examples::ExampleFile,
    heldout_split::{PromptOverlap, find_duplicates},
    prompts::PromptFile,
};

const LISTED_LINES_MAX: usize = 5;

pub(crate) fn prompt_statistics(field: &str, file: &str, prompts: &PromptFile) -> DataFile {
    let mut fields: BTreeMap<String, u64> = BTreeMap::new();
    for numbered in &prompts.prompts {
        let prompt = &numbered.prompt;
        // Other prompts got their id from the line number or the task id.
        let named =
            prompt.id != numbered.line.to_string() && !prompt.fields.contains_key("task_id");
        let own = [("id", named), ("prompt", true), ("answer", prompt.answer.is_some())];
        let own = own.into_iter().filter(|(_, there)| *there).map(|(name, _)| name);
        let names = own.chain(numbered.prompt.fields.keys().map(String::as_str));
        names.for_each(|name| *fields.entry(name.to_owned()).or_default() += 1);
    }
    let lengths =
        length_statistics(prompts.prompts.iter().map(|numbered| numbered.prompt.prompt.len()));
    DataFile {
        field: field.into(),
        file: file.into(),
        lines: prompts.prompts.len() as u64,
        rendered: prompts.rendered_count() as u64,
        duplicates: find_duplicates(prompts).len() as u64,
        fields: fields.into_iter().collect(),
        prompt_bytes: lengths,
        completion_bytes: None,
        prompt_tokens: None,
    }
}

pub(crate) fn example_statistics(field: &str, file: &str, examples: &ExampleFile) -> DataFile {
    let fields =
        examples.field_counts.iter().map(|(name, count)| (name.clone(), u64::from(*count)));
    DataFile {
        field: field.into(),
        file: file.into(),
        lines: examples.examples.len() as u64,
        rendered: examples.rendered_count as u64,
        duplicates: examples.duplicate_count() as u64,
        fields: fields.collect(),
        prompt_bytes: length_statistics(
            examples.examples.iter().map(|example| example.prompt.len()),
        ),
        completion_bytes: length_statistics(
            examples.examples.iter().map(|example| example.completion.len()),
        ),
        prompt_tokens: None,
    }
}

/// Returns the minimum, median, 95th percentile and maximum, or `None` without values.
pub(crate) fn length_statistics(values: impl Iterator<Item = usize>) -> Option<Lengths> {
    let mut values: Vec<u64> = values.map(|value| value as u64).collect();
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    // The smallest value that at least `percent` per cent of all values do not exceed.
    let at = |percent: usize| values[(values.len() * percent).div_ceil(100).saturating_sub(1)];
    Some(Lengths { min: values[0], median: at(50), p95: at(95), max: values[last] })
}

/// Returns a warning about prompts that lack a field that the verifier needs. Fails if all lack it.
pub(crate) fn check_prompt_fields(
    verifier: &VerifierSpec,
    file: &str,
    prompts: &PromptFile,
) -> Result<Option<String>, DataError> {
    let needs = verifier.required_fields();
    let lacking: Vec<(usize, &[&str])> = prompts
        .prompts
        .iter()
        .filter_map(|numbered| {
            let prompt = &numbered.prompt;
            let has = |name: &&str| match *name {
                "answer" => prompt.answer.is_some(),
                name => prompt.fields.get(name).is_some_and(|value| !value.is_null()),
            };
            let missing = needs.iter().find(|any| !any.iter().any(&has))?;
            Some((numbered.line, *missing))
        })
        .collect();
    let Some((_, missing)) = lacking.first() else { return Ok(None) };
    let missing: Vec<String> = missing.iter().map(|name| format!("{name:?}")).collect();
    let missing = missing.join(" or ");
    let (count, all) = (lacking.len(), prompts.prompts.len());
    if count == all {
        return Err(DataError::NoField { file: file.to_owned(), missing });
    }
    let lines = format_lines(lacking.iter().map(|(line, _)| *line));
    Ok(Some(format!(
        "{file}: {count} of {all} prompts have no {missing} for the verifier, so their samples \
         will be errors ({lines})"
    )))
}

pub(crate) fn duplicates_warning(file: &str, prompts: &PromptFile) -> Option<String> {
    let again = find_duplicates(prompts);
    let lines = format_lines(again.first()?.0..again.first()?.0 + 1);
    Some(format!(
        "{file}: {} of {} prompts appear more than once ({lines} repeats line {})",
        again.len(),
        prompts.prompts.len(),
        again.first()?.1,
    ))
}

/// Formats as `line 3 repeats line 7 of prompts.jsonl, …`.
pub(crate) fn format_overlaps(overlaps: &[PromptOverlap], train: &str) -> String {
    let each = overlaps.iter().take(LISTED_LINES_MAX).map(|overlap| {
        format!("line {} repeats line {} of {train}", overlap.heldout, overlap.train)
    });
    join_with_rest(each.collect(), overlaps.len())
}

/// Lists at most [`LISTED_LINES_MAX`] numbers.
fn format_lines(lines: impl ExactSizeIterator<Item = usize>) -> String {
    let count = lines.len();
    join_with_rest(lines.take(LISTED_LINES_MAX).map(|line| format!("line {line}")).collect(), count)
}

fn join_with_rest(named: Vec<String>, count: usize) -> String {
    let named_count = named.len();
    let named = named.join(", ");
    match count.saturating_sub(named_count) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::data::prompts::ChatFormat;

    fn prompts(lines: &str) -> PromptFile {
        PromptFile::read(&Bytes::from(lines.to_owned()), ChatFormat::default()).unwrap()
    }

    #[test]
    fn lengths_are_those_of_lines_that_are_there() {
        let all = length_statistics(1..=100).unwrap();
        assert_eq!((all.min, all.median, all.p95, all.max), (1, 50, 95, 100));
        let one = length_statistics([7].into_iter()).unwrap();
        assert_eq!((one.min, one.median, one.p95, one.max), (7, 7, 7, 7));
        assert_eq!(length_statistics([].into_iter()), None);
    }

    #[test]
    fn prompts_their_verifier_cannot_judge_are_counted_and_named() {
        let prompts = prompts(
            "{\"prompt\":\"a\",\"test\":\"t\"}\n{\"prompt\":\"b\"}\n{\"prompt\":\"c\",\"tests\":null}\n",
        );
        let said = |yaml: &str| {
            let verifier: VerifierSpec = serde_saphyr::from_str(yaml).unwrap();
            check_prompt_fields(&verifier, "p.jsonl", &prompts)
        };
        let python = said("python: {}").unwrap().unwrap();
        assert!(
            python.starts_with("p.jsonl: 2 of 3 prompts have no \"test\" or \"tests\""),
            "{python}"
        );
        assert!(python.ends_with("(line 2, line 3)"), "{python}");
        for needs_answer in [
            "numeric: {}",
            "chain: { stages: [{ verifier: { exact: {} } }] }",
            "regex: { pattern: '{answer}' }",
        ] {
            let error = said(needs_answer).unwrap_err().to_string();
            assert!(error.starts_with("p.jsonl: no prompt has \"answer\""), "{error}");
        }
        for needs_nothing in ["regex: { pattern: a }", "compile: {}", "json_schema: {schema: {}}"] {
            assert_eq!(said(needs_nothing).unwrap(), None, "{needs_nothing}");
        }
    }

    #[test]
    fn a_file_is_told_of_by_its_lines_fields_and_lengths() {
        let prompts = prompts(
            "{\"prompt\":\"ab\",\"answer\":1,\"level\":2}\n\n{\"prompt\":\" AB \",\"id\":\"x\"}\n",
        );
        let file = prompt_statistics("raft.prompts", "p.jsonl", &prompts);
        assert_eq!((file.lines, file.duplicates, file.rendered), (2, 1, 0));
        let fields = [("answer", 1), ("id", 1), ("level", 1), ("prompt", 2)];
        assert_eq!(file.fields, fields.map(|(name, count)| (name.to_owned(), count)).into());
        let said = duplicates_warning("p.jsonl", &prompts).unwrap();
        assert!(
            said.ends_with("1 of 2 prompts appear more than once (line 3 repeats line 1)"),
            "{said}"
        );
    }
}
