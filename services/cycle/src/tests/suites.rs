//! Prompt suites with verifiers of their own, and the entropy of the samples.

use std::collections::{BTreeMap, BTreeSet};

use wire::{
    FactBody, Record,
    v1::{
        self,
        gates::{Gate, Then},
    },
};

use super::log::{Log, prompts, suites};
use crate::{RunAuditor, audit_records};

fn log(cycles: u32, change: impl FnOnce(&mut v1::spec::Raft)) -> Log {
    let suite = |name: &str, count, samples_per_prompt, pass_at: &[u32]| v1::PromptSuite {
        name: name.into(),
        count,
        samples_per_prompt,
        verifier: Some(v1::Verifier::default()),
        sampling: Some(v1::Sampling { temperature: 0.3, max_new_tokens: 16, ..Default::default() }),
        pass_at: pass_at.into(),
        ..Default::default()
    };
    Log::start_raft(cycles, |raft| {
        raft.pass_at = vec![1, 2];
        raft.prompt_suites = vec![suite("sums", 5, 4, &[1, 4]), suite("code", 3, 1, &[1])];
        change(raft);
    })
}

fn findings(log: &Log, records: &[Record]) -> Vec<String> {
    let mut auditor = RunAuditor::default();
    auditor.add_prompts(v1::Purpose::Train, "", prompts("p", 20));
    auditor.add_prompts(v1::Purpose::Heldout, "", prompts("h", 10));
    for (name, prompts) in suites(&log.run()) {
        auditor.add_prompts(v1::Purpose::Heldout, &name, prompts);
    }
    records.iter().for_each(|record| auditor.audit_record(record));
    auditor
        .finish_audit()
        .unwrap()
        .findings
        .into_iter()
        .map(|finding| finding.description)
        .collect()
}

#[test]
fn each_suite_is_sampled_and_measured_by_itself_in_every_cycle() {
    let mut log = log(2, |_| {});
    log.run_to_the_end();
    assert_eq!(findings(&log, log.records()), Vec::<String>::new());
    let run = log.run();
    for done in run.cycles.values().map(|cycle| cycle.done.as_ref().unwrap()) {
        let rate = |rate: Option<v1::cycle_done::Rate>| {
            rate.map(|rate| (rate.mean, rate.prompts, rate.samples))
        };
        assert_eq!(rate(done.heldout), Some((0.5, 10, 20)));
        let of: BTreeMap<&str, _> =
            done.suites.iter().map(|suite| (suite.suite.as_str(), rate(suite.rate))).collect();
        // Of each prompt's four samples the second passes; a prompt with one sample has none that
        // passes.
        assert_eq!(of, [("sums", Some((0.25, 5, 20))), ("code", Some((0.0, 3, 3)))].into());
        let at: Vec<(u32, f64)> = done.suites[0].pass_at.iter().map(|at| (at.k, at.mean)).collect();
        assert_eq!(at, [(1, 0.25), (4, 1.0)]);
        let sure = &done.suites[0].pass_at[1];
        assert!(sure.low < 0.6 && sure.high == 1.0, "five prompts say little: {sure:?}");
    }
}

#[test]
fn equal_ids_of_two_suites_are_two_samples_drawn_alike_in_every_cycle() {
    let mut log = log(2, |_| {});
    log.run_to_the_end();
    let mut seeds: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for order in log.generate_orders().filter(|order| order.purpose() == v1::Purpose::Heldout) {
        assert!(order.requests.iter().all(|request| request.prompt_id.starts_with('h')));
        seeds.entry(order.suite.clone()).or_default().insert(order.seed);
        let hot = if order.suite.is_empty() { 0.0 } else { 0.3 };
        assert_eq!(order.sampling.unwrap().temperature, hot, "{}", order.suite);
    }
    assert_eq!(seeds.keys().collect::<Vec<_>>(), ["", "code", "sums"]);
    assert!(seeds.values().all(|of| of.len() == 1), "{seeds:?}");
    assert_eq!(seeds.values().flatten().collect::<BTreeSet<_>>().len(), 3, "{seeds:?}");
}

#[test]
fn a_suite_that_gets_worse_turns_the_run_though_the_others_hold() {
    let gate =
        |suite: &str, then: Then| Gate { suite: suite.into(), margin: 0.1, then: then.into() };
    let mut log = log(3, |raft| {
        let pass_rates = vec![gate("code", Then::Tell), gate("sums", Then::RollBack)];
        raft.gates = Some(v1::Gates { pass_rates, ..Default::default() });
    });
    log.forgotten.insert((2, "sums".into()));
    log.run_to_the_end();
    assert_eq!(findings(&log, log.records()), Vec::<String>::new());
    let run = log.run();
    let done = run.cycles[&2].done.as_ref().unwrap();
    assert_eq!(done.findings.len(), 1, "{:?}", done.findings);
    assert_eq!(done.findings[0].gate, "pass rate of sums");
    assert_eq!((done.findings[0].value, done.findings[0].best), (0.0, 0.25));
    assert_eq!((done.best, done.then()), (0, Then::RollBack));
    let parent = run.parent_checkpoint(3).unwrap();
    assert_eq!(parent.cycle, 0, "equal cycles: the oldest is the best");
}

#[test]
fn a_suite_that_nobody_can_sample_has_no_rate_and_ends_no_run() {
    let mut log = log(1, |_| {});
    log.coordinate();
    log.generate_all_but(&["s02_00000"]);
    log.fail("generate", "0-s02_00000", "too long for every box");
    log.run_to_the_end();
    assert_eq!(findings(&log, log.records()), Vec::<String>::new());
    let run = log.run();
    assert_eq!(run.done.as_ref().unwrap().status(), v1::done::Status::Succeeded);
    let rates = |cycle: u32| -> Vec<bool> {
        let done = run.cycles[&cycle].done.as_ref().unwrap();
        done.suites.iter().map(|suite| suite.rate.is_some()).collect()
    };
    assert_eq!([rates(0), rates(1)], [[true, false], [true, true]]);
    assert_eq!(run.cycles[&0].done.as_ref().unwrap().set_aside, 3);
}

#[test]
fn no_job_of_a_plan_is_called_as_if_it_were_drawn_again() {
    let mut log = log(1, |_| {});
    log.run_to_the_end();
    let plans = log.records().iter().filter_map(|record| match &record.fact.body {
        FactBody::Plan(plan) => Some(plan),
        _ => None,
    });
    let names: Vec<&str> =
        plans.flat_map(|plan| plan.jobs.iter().map(|job| job.job.as_str())).collect();
    assert!(names.iter().any(|name| name.starts_with("s01_")), "{names:?}");
    assert!(names.iter().all(|name| !name.contains('-')), "{names:?}");
}

#[test]
fn what_is_said_to_be_of_another_suite_counts_for_none() {
    let mut log = log(1, |_| {});
    log.run_to_the_end();
    let of_sums = |record: &&mut Record| record.fact.subject.to_string().contains(".s01_");
    let tampered = |change: fn(&mut FactBody)| {
        let mut records = log.records().to_vec();
        records.iter_mut().filter(of_sums).for_each(|record| change(&mut record.fact.body));
        findings(&log, &records)
    };
    let samples = tampered(|body| {
        if let FactBody::Samples(samples) = body {
            samples.suite = "code".into();
        }
    });
    assert!(samples.iter().any(|what| what.contains("void: its suite is not")), "{samples:#?}");
    assert!(samples.iter().any(|what| what.contains("its counts do not")), "{samples:#?}");
    let verdicts = tampered(|body| {
        if let FactBody::Verdicts(verdicts) = body {
            verdicts.suite = String::new();
        }
    });
    assert!(verdicts.iter().all(|what| what == "its suite is not its job's"), "{verdicts:#?}");
    assert!(!verdicts.is_empty());
    let mut records = log.records().to_vec();
    for record in &mut records {
        if let FactBody::Plan(plan) = &mut record.fact.body {
            plan.jobs.iter_mut().for_each(|job| job.suite = job.suite.replace("sums", "sams"));
        }
    }
    let plans = findings(&log, &records);
    assert!(plans.iter().any(|what| what.contains(r#"suite "sams", which the"#)), "{plans:#?}");
    assert!(plans.iter().any(|what| what.contains("draws from 0 heldout (sums)")), "{plans:#?}");
}

#[test]
fn a_cycle_s_entropy_is_that_of_its_samples_tokens_where_they_tell_it() {
    let mut log = log(3, |raft| {
        let gate = Gate { margin: 0.5, then: Then::Stop.into(), ..Default::default() };
        raft.gates = Some(v1::Gates { entropy: Some(gate), ..Default::default() });
        raft.entropy = true;
    });
    log.surprise = [(0, 0.1), (1, 1.25), (3, 0.25)].into();
    log.run_to_the_end();
    assert_eq!(audit_records(log.records()).unwrap().findings, []);
    let run = log.run();
    let entropy = |cycle: u32| {
        let selected = run.cycles[&cycle].selected.as_ref().unwrap();
        (selected.entropy, selected.entropy_samples)
    };
    assert_eq!(entropy(1), (Some(1.25), 160));
    assert_eq!(entropy(2), (None, 0), "nobody told: not 0");
    assert_eq!(entropy(3), (Some(0.25), 160));
    let gates = |cycle: u32| -> Vec<String> {
        let done = run.cycles[&cycle].done.as_ref().unwrap();
        done.findings.iter().map(|finding| finding.gate.clone()).collect()
    };
    assert_eq!([gates(1), gates(2)], [Vec::<String>::new(), Vec::new()]);
    assert_eq!(gates(3), ["entropy"]);
    let said = run.done.unwrap().message;
    assert!(said.contains("its entropy of 0.2500 is past 0.5000"), "{said}");
    let asked = |purpose| {
        log.generate_orders().filter(|o| o.purpose() == purpose).all(|order| order.logprobs)
    };
    assert!(asked(v1::Purpose::Train));
    assert!(!asked(v1::Purpose::Heldout), "those are measured by their verdicts");
}

#[test]
fn a_logprob_that_can_be_none_is_not_counted() {
    for nonsense in [f64::NAN, f64::NEG_INFINITY, -1.0] {
        let mut log = log(1, |_| {});
        log.surprise = [(1, nonsense)].into();
        log.run_to_the_end();
        let selected = log.run().cycles[&1].selected.clone().unwrap();
        assert_eq!((selected.entropy, selected.entropy_samples), (None, 0), "{nonsense}");
        assert_eq!(audit_records(log.records()).unwrap().findings, []);
    }
}
