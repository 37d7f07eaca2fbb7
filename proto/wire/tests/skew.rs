//! Facts of the next and the previous version can be read: unknown fields and values, and missing
//! fields. Every fact that the previous version wrote in a recorded fleet is tried, changed in each
//! of these ways (`docs/UPGRADES.md`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{collections::BTreeSet, fs::File, io::Read, path::Path};

use flate2::read::GzDecoder;
use serde_json::{Value, json};
use wire::Fact;

const PREVIOUS: &str = "0.2.0";

fn recorded() -> Vec<(String, Value)> {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/e2e/recordings");
    let file = File::open(recordings.join(PREVIOUS).join("facts.jsonl.gz")).unwrap();
    let mut text = String::new();
    GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let fact = |line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        (line["subject"].as_str().unwrap().to_owned(), line["fact"].take())
    };
    text.lines().map(fact).collect()
}

fn read(subject: &str, fact: &Value) -> Result<Fact, String> {
    let decoded = Fact::from_json(subject, fact.to_string().as_bytes());
    decoded.map_err(|error| format!("{error}: {:?}: {fact}", std::error::Error::source(&error)))
}

/// Collects the pointers to every object of a document.
fn objects(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            found.push(at.to_owned());
            for (name, value) in fields {
                objects(value, &format!("{at}/{}", name.replace('/', "~1")), found);
            }
        }
        Value::Array(items) => {
            // Two items stand for all.
            for (index, item) in items.iter().enumerate().take(2) {
                objects(item, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

#[test]
fn every_kind_of_fact_that_a_run_writes_was_recorded() {
    let kinds = |(subject, _): &(String, Value)| subject.split('.').nth(2).unwrap().to_owned();
    let kinds: BTreeSet<String> = recorded().iter().map(kinds).collect();
    for kind in [
        "spec",
        "control",
        "cycle",
        "order",
        "samples",
        "verdicts",
        "selection",
        "checkpoint",
        "eval",
        "failure",
        "done",
    ] {
        assert!(kinds.contains(kind), "no {kind} in {kinds:?}");
    }
}

#[test]
fn facts_of_the_previous_version_are_read_and_written_as_they_were() {
    for (subject, fact) in recorded() {
        let read = read(&subject, &fact).unwrap();
        let again: Value = serde_json::from_slice(&read.to_json()).unwrap();
        assert_eq!(again, fact, "{subject}");
    }
}

#[test]
fn fields_of_the_next_version_are_ignored_wherever_they_are() {
    let strange = [json!(1), json!("x"), json!({"a": [1]}), json!([{"b": null}])];
    for (subject, fact) in recorded() {
        let expected = read(&subject, &fact).unwrap();
        let mut places = Vec::new();
        objects(&fact, "", &mut places);
        for (place, strange) in places.iter().zip(strange.iter().cycle()) {
            let mut changed = fact.clone();
            let object = changed.pointer_mut(place).unwrap().as_object_mut().unwrap();
            if is_map(place) {
                continue;
            }
            object.insert("ofTomorrow".into(), strange.clone());
            assert_eq!(read(&subject, &changed).unwrap(), expected, "{subject} at {place}");
        }
    }
}

/// Returns true for maps, whose entries are not fields.
fn is_map(place: &str) -> bool {
    const MAPS: [&str; 4] = ["dropped", "fields", "files", "samplesByAgent"];
    place.rsplit('/').next().is_some_and(|name| MAPS.contains(&name))
}

#[test]
fn no_field_is_needed_to_read_a_fact() {
    for (subject, fact) in recorded() {
        let mut places = Vec::new();
        objects(&fact, "", &mut places);
        for place in places {
            let names: Vec<String> =
                fact.pointer(&place).unwrap().as_object().unwrap().keys().cloned().collect();
            for name in names {
                let mut changed = fact.clone();
                changed.pointer_mut(&place).unwrap().as_object_mut().unwrap().remove(&name);
                read(&subject, &changed).unwrap();
            }
        }
    }
}

#[test]
fn an_unknown_value_is_read_as_unset() {
    let is_value =
        |text: &str| text.len() > 2 && text.bytes().all(|b| b.is_ascii_uppercase() || b == b'_');
    let mut tried = BTreeSet::new();
    for (subject, fact) in recorded() {
        let mut places = Vec::new();
        objects(&fact, "", &mut places);
        for place in places {
            let values: Vec<(String, String)> = fact
                .pointer(&place)
                .unwrap()
                .as_object()
                .unwrap()
                .iter()
                .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
                .filter(|(_, value)| is_value(value))
                .collect();
            for (name, value) in values {
                let with = |replacement: Option<&str>| {
                    let mut changed = fact.clone();
                    let object = changed.pointer_mut(&place).unwrap().as_object_mut().unwrap();
                    match replacement {
                        Some(other) => object.insert(name.clone(), json!(other)),
                        None => object.remove(&name),
                    };
                    read(&subject, &changed)
                };
                let unsaid = with(None).unwrap();
                if with(Some("SOMETHING_FREE")).is_ok_and(|read| read != unsaid) {
                    // A text in capitals that is no enum value.
                    continue;
                }
                tried.insert(value.clone());
                assert_eq!(with(Some("OF_TOMORROW")).unwrap(), unsaid, "{subject} {place}/{name}");
            }
        }
    }
    for value in ["PASS", "SUCCEEDED", "FAILED", "PAUSE", "ADAPTER", "MODEL"] {
        assert!(tried.contains(value), "no {value} in {tried:?}");
    }
}
