//! What there is to be told of a run's files before it starts.

use std::collections::BTreeMap;

use wire::v1::{DataFile, data_file::Lengths};

use super::{
    examples::Examples,
    prompts::Prompts,
    split::{Overlap, duplicates},
};
use crate::VerifierSpec;

/// Lines named in one message.
const NAMED_MAX: usize = 5;

pub(crate) fn of_prompts(field: &str, file: &str, prompts: &Prompts) -> DataFile {
    let mut fields: BTreeMap<String, u64> = BTreeMap::new();
    for numbered in &prompts.prompts {
        let prompt = &numbered.prompt;
        // Without one, it is known by its line or its task.
        let named =
            prompt.id != numbered.line.to_string() && !prompt.fields.contains_key("task_id");
        let own = [("id", named), ("prompt", true), ("answer", prompt.answer.is_some())];
        let own = own.into_iter().filter(|(_, there)| *there).map(|(name, _)| name);
        let names = own.chain(numbered.prompt.fields.keys().map(String::as_str));
        names.for_each(|name| *fields.entry(name.to_owned()).or_default() += 1);
    }
    let lengths = lengths(prompts.prompts.iter().map(|numbered| numbered.prompt.prompt.len()));
    DataFile {
        field: field.into(),
        file: file.into(),
        lines: prompts.prompts.len() as u64,
        rendered: prompts.rendered() as u64,
        duplicates: duplicates(prompts).len() as u64,
        fields: fields.into_iter().collect(),
        prompt_bytes: lengths,
        completion_bytes: None,
        prompt_tokens: None,
    }
}

pub(crate) fn of_examples(field: &str, file: &str, examples: &Examples) -> DataFile {
    let fields = examples.fields.iter().map(|(name, count)| (name.clone(), u64::from(*count)));
    DataFile {
        field: field.into(),
        file: file.into(),
        lines: examples.examples.len() as u64,
        rendered: examples.rendered as u64,
        duplicates: examples.duplicates() as u64,
        fields: fields.collect(),
        prompt_bytes: lengths(examples.examples.iter().map(|example| example.prompt.len())),
        completion_bytes: lengths(examples.examples.iter().map(|example| example.completion.len())),
        prompt_tokens: None,
    }
}

/// `None` of nothing.
pub(crate) fn lengths(values: impl Iterator<Item = usize>) -> Option<Lengths> {
    let mut values: Vec<u64> = values.map(|value| value as u64).collect();
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    // The smallest that so many per cent are no longer than.
    let at = |percent: usize| values[(values.len() * percent).div_ceil(100).saturating_sub(1)];
    Some(Lengths { min: values[0], median: at(50), p95: at(95), max: values[last] })
}

/// Prompts that lack what their verifier reads.
pub(crate) fn unjudgeable(
    verifier: &VerifierSpec,
    file: &str,
    prompts: &Prompts,
) -> Option<String> {
    let needs = verifier.reads();
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
    let (_, missing) = lacking.first()?;
    let missing: Vec<String> = missing.iter().map(|name| format!("{name:?}")).collect();
    let lines = named(lacking.iter().map(|(line, _)| *line));
    Some(format!(
        "{file}: {} of {} prompts have no {} for the verifier, which will call their samples \
         errors ({lines})",
        lacking.len(),
        prompts.prompts.len(),
        missing.join(" or "),
    ))
}

pub(crate) fn repeated(file: &str, prompts: &Prompts) -> Option<String> {
    let again = duplicates(prompts);
    let lines = named(again.first()?.0..again.first()?.0 + 1);
    Some(format!(
        "{file}: {} of {} prompts stand in it more than once ({lines} asks what line {} does)",
        again.len(),
        prompts.prompts.len(),
        again.first()?.1,
    ))
}

/// `line 3 asks what line 7 of prompts.jsonl does, …`
pub(crate) fn told(overlaps: &[Overlap], train: &str) -> String {
    let each = overlaps.iter().take(NAMED_MAX).map(|overlap| {
        format!("line {} asks what line {} of {train} does", overlap.heldout, overlap.train)
    });
    more(each.collect(), overlaps.len())
}

fn named(lines: impl ExactSizeIterator<Item = usize>) -> String {
    let count = lines.len();
    more(lines.take(NAMED_MAX).map(|line| format!("line {line}")).collect(), count)
}

fn more(named: Vec<String>, count: usize) -> String {
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
    use crate::data::prompts::Manner;

    fn prompts(lines: &str) -> Prompts {
        Prompts::read(&Bytes::from(lines.to_owned()), Manner::default()).unwrap()
    }

    #[test]
    fn lengths_are_those_of_lines_that_are_there() {
        let all = lengths(1..=100).unwrap();
        assert_eq!((all.min, all.median, all.p95, all.max), (1, 50, 95, 100));
        let one = lengths([7].into_iter()).unwrap();
        assert_eq!((one.min, one.median, one.p95, one.max), (7, 7, 7, 7));
        assert_eq!(lengths([].into_iter()), None);
    }

    #[test]
    fn prompts_their_verifier_cannot_judge_are_counted_and_named() {
        let prompts = prompts(
            "{\"prompt\":\"a\",\"test\":\"t\"}\n{\"prompt\":\"b\"}\n{\"prompt\":\"c\",\"tests\":null}\n",
        );
        let said = |yaml: &str| {
            let verifier: VerifierSpec = serde_saphyr::from_str(yaml).unwrap();
            unjudgeable(&verifier, "p.jsonl", &prompts)
        };
        let python = said("python: {}").unwrap();
        assert!(
            python.starts_with("p.jsonl: 2 of 3 prompts have no \"test\" or \"tests\""),
            "{python}"
        );
        assert!(python.ends_with("(line 2, line 3)"), "{python}");
        assert!(said("numeric: {}").unwrap().contains("3 of 3 prompts have no \"answer\""));
        assert!(said("chain: { stages: [{ verifier: { exact: {} } }] }").is_some());
        assert!(said("regex: { pattern: '{answer}' }").is_some());
        for needs_nothing in ["regex: { pattern: a }", "compile: {}", "json_schema: {schema: {}}"] {
            assert_eq!(said(needs_nothing), None, "{needs_nothing}");
        }
    }

    #[test]
    fn a_file_is_told_of_by_its_lines_fields_and_lengths() {
        let prompts = prompts(
            "{\"prompt\":\"ab\",\"answer\":1,\"level\":2}\n\n{\"prompt\":\" AB \",\"id\":\"x\"}\n",
        );
        let file = of_prompts("raft.prompts", "p.jsonl", &prompts);
        assert_eq!((file.lines, file.duplicates, file.rendered), (2, 1, 0));
        let fields = [("answer", 1), ("id", 1), ("level", 1), ("prompt", 2)];
        assert_eq!(file.fields, fields.map(|(name, count)| (name.to_owned(), count)).into());
        let said = repeated("p.jsonl", &prompts).unwrap();
        assert!(
            said.ends_with(
                "1 of 2 prompts stand in it more than once (line 3 asks what line 1 does)"
            ),
            "{said}"
        );
    }
}
