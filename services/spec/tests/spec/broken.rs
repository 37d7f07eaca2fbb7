//! Broken specs: each error names the line and the column of the mistake, the key, and what to write
//! instead.

mod mistakes;

use serde_json::Value;
use spec::RunSpec;

use self::mistakes::{
    JSON, MISTAKES_IN_JSON, Mistake, SPEC, UNKNOWN_NAMES, WRONG_DOCUMENTS, WRONG_SECTIONS,
    WRONG_VALUES,
};
use crate::{schema_errors, schema_validator};

fn assert_refused(good: &str, mistakes: &[Mistake]) {
    RunSpec::parse(good).unwrap();
    for ((from, to), (line, column), words) in mistakes {
        assert_eq!(good.matches(from).count(), 1, "{from}");
        let error = RunSpec::parse_runs(&good.replace(from, to)).expect_err(to).to_string();
        let place = format!("line {line}, column {column}: ");
        assert!(error.starts_with(&place), "{to}: not {place}{error}");
        for word in *words {
            assert!(error.contains(word), "{to}: no {word}: {error}");
        }
        assert!(error.contains("(R10"), "{to}: {error}");
    }
}

#[test]
fn an_unknown_name_is_marked_with_the_most_similar_one() {
    assert_refused(SPEC, &UNKNOWN_NAMES);
}

#[test]
fn a_wrong_value_is_marked_with_what_it_may_be() {
    assert_refused(SPEC, &WRONG_VALUES);
}

#[test]
fn keys_that_are_missing_or_exclude_each_other_are_named() {
    assert_refused(SPEC, &WRONG_SECTIONS);
}

#[test]
fn a_text_that_is_no_spec_is_marked_with_its_first_mistake() {
    assert_refused(SPEC, &WRONG_DOCUMENTS);
}

#[test]
fn mistakes_in_json_are_named_as_in_yaml() {
    assert_refused(JSON, &MISTAKES_IN_JSON);
}

#[test]
fn the_schema_refuses_what_depends_on_one_key() {
    let validator = schema_validator();
    let mistakes = [&UNKNOWN_NAMES[..], &WRONG_VALUES, &WRONG_SECTIONS].concat();
    let accepted = mistakes.iter().filter(|((from, to), ..)| {
        let document = spec::parse_yaml::<Value>(&SPEC.replace(from, to));
        document.is_ok_and(|it| schema_errors(&validator, &it).is_empty())
    });
    let words: Vec<&str> = accepted.map(|(.., words)| words[0]).collect();
    let expected = [
        "raft.gates.perplexity[0].suite: must be one of text",
        "sweep.learning_rat: is not in the spec; did you mean learning_rate?",
        "extract: not a regular",
        "raft.verifier: is missing",
        "must be above sampling.max_new_tokens (256)",
        "must be at most 1, the highest reward",
        "promote: needs `raft.heldout`",
        "twice",
    ];
    assert_eq!(words, expected);
}
