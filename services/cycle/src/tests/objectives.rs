//! Runs with a training objective: what their samples record, their datasets and their gates.

use serde_json::Value;
use wire::{
    FactBody, encode_logprobs,
    v1::{
        self,
        gates::{Gate, Then},
    },
};

use super::log::Log;
use crate::{Run, audit_records, preview_selection};

fn log(cycles: u32, change: impl FnOnce(&mut v1::spec::Raft)) -> Log {
    let objective = v1::Objective {
        name: "grpo".into(),
        settings: [("truncate_tokens".into(), 2.0)].into(),
        off_policy: false,
    };
    Log::start_raft(cycles, |raft| {
        raft.training.as_mut().unwrap().objective = Some(objective);
        raft.token_logprobs = true;
        change(raft);
    })
}

#[test]
fn a_dataset_has_the_logprobs_and_tokens_that_were_drawn() {
    let mut log = log(1, |_| {});
    log.drawn = [
        // Of index 0, which is cut; of index 1, whose text has other tokens; of index 2, without.
        (encode_logprobs(&[-0.5, -0.25]), Vec::new()),
        (encode_logprobs(&[-1.0, -2.0]), vec![7, 9]),
        (Vec::new(), Vec::new()),
    ]
    .into();
    log.run_to_the_end();
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
    let asked = |purpose| {
        log.generate_orders().filter(|o| o.purpose() == purpose).all(|order| order.token_logprobs)
    };
    assert!(asked(v1::Purpose::Train) && !asked(v1::Purpose::Heldout));
    let place = log
        .records()
        .iter()
        .position(|record| matches!(record.fact.body, FactBody::Selected(_)))
        .unwrap();
    let FactBody::Selected(selected) = &log.records()[place].fact.body else { panic!() };
    assert_eq!(selected.retokenized, 60, "indices 1, 4 and 7 of 20 prompts");
    assert_eq!(selected.dropped["no log-probabilities"], 40, "indices 2 and 5");
    let mut before = Run::start(&log.records()[0]).unwrap();
    log.records()[1..place].iter().for_each(|record| before.fold_record(record));
    let dataset = preview_selection(&before, 1, None).unwrap().dataset;
    let lines: Vec<Value> = dataset
        .split(|byte| *byte == b'\n')
        .filter_map(|l| serde_json::from_slice(l).ok())
        .collect();
    assert_eq!(lines.len(), 120);
    for line in lines {
        let (cut, behaviour, ids) = (&line["unfinished"], &line["behaviour"], &line["token_ids"]);
        match line["index"].as_u64().unwrap() % 3 {
            0 => assert_eq!(
                (cut, behaviour, ids),
                (&true.into(), &serde_json::json!([-0.5, -0.25]), &Value::Null)
            ),
            1 => assert_eq!(
                (cut, behaviour, ids),
                (&Value::Null, &serde_json::json!([-1.0, -2.0]), &serde_json::json!([7, 9]))
            ),
            _ => panic!("a sample without log-probabilities is trained on: {line}"),
        }
    }
}

/// The lines of the dataset that the first selection of a log writes.
fn dataset_lines(log: &Log) -> Vec<Value> {
    let is_selection = |record: &wire::Record| matches!(record.fact.body, FactBody::Selected(_));
    let place = log.records().iter().position(is_selection).unwrap();
    let mut before = Run::start(&log.records()[0]).unwrap();
    log.records()[1..place].iter().for_each(|record| before.fold_record(record));
    let dataset = preview_selection(&before, 1, None).unwrap().dataset;
    let lines = dataset.split(|byte| *byte == b'\n');
    lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

#[test]
fn a_dataset_of_episodes_has_their_tokens_and_masks_what_was_not_drawn() {
    let environment = v1::verifier::Environment { max_turns: 2, ..Default::default() };
    let how = v1::verifier::How::Environment(environment);
    let mut log = Log::start_raft(1, |raft| raft.verifier = Some(v1::Verifier { how: Some(how) }));
    let turn = |token_ids: &[u32], observation_ids: &[u32]| v1::samples::Turn {
        token_ids: token_ids.into(),
        observation_ids: observation_ids.into(),
        ..Default::default()
    };
    log.turns = vec![turn(&[7], &[8, 9]), turn(&[5], &[])];
    log.run_to_the_end();
    assert!(log.generate_orders().all(|order| order.episodes));
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
    let lines = dataset_lines(&log);
    assert!(!lines.is_empty());
    for line in lines {
        assert_eq!(line["token_ids"], serde_json::json!([7, 8, 9, 5]));
        assert_eq!(line["masked"], serde_json::json!([[1, 3]]));
    }
    let mut plain = Log::start_raft(1, |_| {});
    plain.run_to_the_end();
    let none = |line: &Value| line["masked"].is_null() && line["token_ids"].is_null();
    assert!(dataset_lines(&plain).iter().all(none));
}

#[test]
fn an_episode_with_other_tokens_than_its_turns_is_a_finding() {
    let how = v1::verifier::How::Environment(v1::verifier::Environment::default());
    let mut log = Log::start_raft(1, |raft| raft.verifier = Some(v1::Verifier { how: Some(how) }));
    log.turns = vec![v1::samples::Turn { token_ids: vec![7], ..Default::default() }];
    log.run_to_the_end();
    let findings = audit_records(log.records()).unwrap().findings;
    let text = format!("{findings:?}");
    assert!(text.contains("has other tokens than its turns"), "{text}");
}

#[test]
fn gates_limit_what_a_training_drops_and_how_far_it_goes() {
    let gate = |margin, then: Then| Some(Gate { margin, then: then.into(), ..Default::default() });
    let mut log = log(3, |raft| {
        raft.gates = Some(v1::Gates {
            dropped_tokens: gate(0.25, Then::Tell),
            divergence: gate(0.5, Then::Stop),
            ..Default::default()
        });
    });
    let weighting = |dropped, divergence| v1::checkpoint::Weighting {
        tokens: 100,
        dropped,
        divergence: Some(divergence),
        ..Default::default()
    };
    log.perplexities = [(1, 9.0), (2, 8.0)].into();
    log.weighting = [(1, weighting(26, 0.5)), (2, weighting(25, 0.51))].into();
    log.drawn = [(encode_logprobs(&[-0.5, -0.25]), Vec::new())].into();
    log.run_to_the_end();
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
    let run = log.run();
    let found = |cycle: u32| -> Vec<String> {
        let done = run.cycles[&cycle].done.as_ref().unwrap();
        done.findings.iter().map(|finding| finding.gate.clone()).collect()
    };
    assert_eq!(found(1), ["dropped tokens"]);
    assert_eq!(found(2), ["divergence"]);
    assert_eq!(run.cycles[&2].done.as_ref().unwrap().best, 1);
    assert!(!run.cycles.contains_key(&3), "the run has ended");
}
