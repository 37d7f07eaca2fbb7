//! Statistics of a run's files and warnings about them, reported before the run starts.

use std::collections::BTreeMap;

use spec::VerifierSpec;
use wire::{
    RowPlace,
    v1::{DataFile, data_file::Lengths},
};

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
        let named = prompt.id != numbered.place.number().to_string()
            && !prompt.fields.contains_key("task_id");
        let own = [("id", named), ("prompt", true), ("answer", prompt.answer.is_some())];
        let own = own.into_iter().filter(|(_, there)| *there).map(|(name, _)| name);
        let names = own.chain(numbered.prompt.fields.keys().map(String::as_str));
        names.for_each(|name| *fields.entry(name.to_owned()).or_default() += 1);
    }
    let lengths =
        Lengths::measure(prompts.prompts.iter().map(|numbered| numbered.prompt.prompt.len()));
    DataFile {
        field: field.into(),
        file: file.into(),
        lines: prompts.prompts.len() as u64,
        rendered: prompts.rendered_count() as u64,
        duplicates: find_duplicates(prompts).len() as u64,
        fields: fields.into_iter().collect(),
        prompt_bytes: lengths,
        ..DataFile::default()
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
        prompt_bytes: Lengths::measure(
            examples.examples.iter().map(|example| example.prompt.len()),
        ),
        completion_bytes: Lengths::measure(
            examples.examples.iter().map(|example| example.completion.len()),
        ),
        ..DataFile::default()
    }
}

/// Returns a warning about prompts that lack a field that the verifier needs. Fails if all lack it.
pub(crate) fn check_prompt_fields(
    verifier: &VerifierSpec,
    file: &str,
    prompts: &PromptFile,
) -> Result<Option<String>, DataError> {
    let needs = verifier.required_fields();
    let lacking: Vec<(RowPlace, &[&str])> = prompts
        .prompts
        .iter()
        .filter_map(|numbered| {
            let prompt = &numbered.prompt;
            let has = |name: &&str| match *name {
                "answer" => prompt.answer.is_some(),
                name => prompt.fields.get(name).is_some_and(|value| !value.is_null()),
            };
            let missing = needs.iter().find(|any| !any.iter().any(&has))?;
            Some((numbered.place, *missing))
        })
        .collect();
    let Some((_, missing)) = lacking.first() else { return Ok(None) };
    let missing: Vec<String> = missing.iter().map(|name| format!("{name:?}")).collect();
    let missing = missing.join(" or ");
    let (count, all) = (lacking.len(), prompts.prompts.len());
    if count == all {
        return Err(DataError::NoField { file: file.to_owned(), missing });
    }
    let lines = format_places(lacking.iter().map(|(place, _)| *place));
    Ok(Some(format!(
        "{file}: {count} of {all} prompts have no {missing} for the verifier, so their samples \
         will be errors ({lines})"
    )))
}

pub(crate) fn duplicates_warning(file: &str, prompts: &PromptFile) -> Option<String> {
    let again = find_duplicates(prompts);
    let (repeat, first) = again.first()?;
    Some(format!(
        "{file}: {} of {} prompts appear more than once ({repeat} repeats {first})",
        again.len(),
        prompts.prompts.len(),
    ))
}

/// Formats as `line 3 repeats line 7 of prompts.jsonl, …`.
pub(crate) fn format_overlaps(overlaps: &[PromptOverlap], train: &str) -> String {
    let each = overlaps
        .iter()
        .take(LISTED_LINES_MAX)
        .map(|overlap| format!("{} repeats {} of {train}", overlap.heldout, overlap.train));
    join_with_rest(each.collect(), overlaps.len())
}

/// Lists at most [`LISTED_LINES_MAX`] places.
fn format_places(places: impl ExactSizeIterator<Item = RowPlace>) -> String {
    let count = places.len();
    join_with_rest(places.take(LISTED_LINES_MAX).map(|place| place.to_string()).collect(), count)
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
        PromptFile::read(&Bytes::from(lines.to_owned()).into(), ChatFormat::default()).unwrap()
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
