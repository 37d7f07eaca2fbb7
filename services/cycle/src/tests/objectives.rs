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
