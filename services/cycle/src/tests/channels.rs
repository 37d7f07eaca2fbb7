//! Channels: what their keeper decides, and the audit of their moves.

use std::collections::BTreeSet;

use wire::{Fact, FactBody, FactKey, Record, RunId, Subject, v1};

use v1::{channel_move::Evidence, done::Status};

use super::log::{Log, tree};
use crate::{
    ChannelSet, LearnedFeedback, OutdatedMove, audit_channel, best_checkpoint, move_to_base,
    move_to_checkpoint, move_to_model, promotion_move, require_move, roll_back_target,
    unchanged_move,
};

/// Facts in log order.
#[derive(Default, Clone)]
struct Facts(Vec<Record>);

fn channel() -> RunId {
    "stable".parse().unwrap()
}

fn model(name: &str) -> v1::ChannelMove {
    v1::ChannelMove { base: tree(name), ..v1::ChannelMove::default() }
}

fn promotion(feedback: u64, learning: u64) -> v1::spec::Promotion {
    v1::spec::Promotion { channel: "stable".into(), alpha: 0.05, feedback, learning }
}

impl Facts {
    fn add(&mut self, run: &str, key: FactKey, body: FactBody) {
        let sequence = self.0.last().map_or(0, |last| last.sequence) + 1;
        let subject = Subject::new(&run.parse().unwrap(), key);
        let fact = Fact { subject, body };
        self.0.push(Record { sequence, time_ms: sequence, author: None, fact });
    }

    fn add_move(&mut self, number: u64, named: v1::ChannelMove) {
        self.add("stable", FactKey::Channel { number }, FactBody::Channel(named));
    }

    fn add_spec(&mut self, run: &str, promotion: v1::spec::Promotion) {
        let base = Some(v1::Base { tree: tree("m"), ..v1::Base::default() });
        let promotion = Some(promotion);
        let spec = v1::Spec { run: run.into(), base, promotion, ..v1::Spec::default() };
        self.add(run, FactKey::Spec, FactBody::Spec(spec));
    }

    fn add_done(&mut self, run: &str, status: Status) {
        let done = v1::Done { status: status.into(), ..v1::Done::default() };
        self.add(run, FactKey::Done, FactBody::Done(done));
    }

    fn add_checkpoint(&mut self, run: &str) -> v1::ChannelMove {
        let checkpoint = v1::Checkpoint {
            run: run.into(),
            step: 4,
            tree: tree(run),
            base: tree("m"),
            content: v1::checkpoint::Content::Adapter.into(),
            ..v1::Checkpoint::default()
        };
        let model = move_to_checkpoint(&checkpoint);
        let key = FactKey::Checkpoint { cycle: 0, step: 4 };
        self.add(run, key, FactBody::Checkpoint(checkpoint));
        model
    }

    fn channels(&self) -> ChannelSet {
        let mut channels = ChannelSet::default();
        self.0.iter().for_each(|record| channels.fold_record(record));
        channels
    }

    fn findings(&self) -> Vec<String> {
        audit_channel(&channel(), &self.0).into_iter().map(|found| found.description).collect()
    }

    /// Returns the findings if another move follows.
    fn findings_after(&self, number: u64, named: v1::ChannelMove) -> Vec<String> {
        let mut facts = self.clone();
        facts.add_move(number, named);
        facts.findings()
    }
}

/// A comparison with the base that a run starts from.
fn evidence(run: &str) -> Evidence {
    Evidence {
        run: run.into(),
        cycle: 0,
        pairs: 40,
        p: 0.01,
        difference: 0.2,
        interval: vec![0.05, 0.4],
        live: false,
    }
}

/// A channel that names the base `m`, and then the checkpoint of run `r-1`, which promotes it.
fn promoted() -> (Facts, v1::ChannelMove) {
    let mut facts = Facts::default();
    facts.add_move(1, model("m"));
    facts.add_spec("r-1", promotion(0, 0));
    let best = facts.add_checkpoint("r-1");
    facts.add_done("r-1", Status::Succeeded);
    let moved = promotion_move(&model("m"), &"r-1".parse().unwrap(), best, evidence("r-1"));
    facts.add_move(2, moved.clone());
    (facts, moved)
}

fn assert_finds(found: &[String], expected: &[&str]) {
    let names = |(found, expected): (&String, &&str)| found.contains(*expected);
    let all = found.len() == expected.len() && found.iter().zip(expected).all(names);
    assert!(all, "{found:?} are not {expected:?}");
}

#[test]
fn a_model_is_named_since_the_first_of_its_last_moves() {
    let moves = |models: &[&str]| {
        let mut facts = Facts::default();
        (1..).zip(models).for_each(|(number, name)| facts.add_move(number, model(name)));
        facts.channels().model_moves(&channel()).unwrap()
    };
    assert_eq!(moves(&["m", "n", "n"]), [[2, 3].into(), [1].into()]);
    assert_eq!(moves(&["m", "m"]), [[1, 2].into(), [].into()]);
    // Ratings of an earlier time do not count when a model returns.
    assert_eq!(moves(&["m", "n", "m"]), [[3].into(), [2].into()]);
}

#[test]
fn the_first_of_two_moves_with_one_number_counts() {
    let mut facts = Facts::default();
    facts.add_move(1, model("m"));
    facts.add_move(1, model("n"));
    let channels = facts.channels();
    assert!(channels.last_move(&channel()).unwrap().fact.has_model_of(&model("m")));
    assert_finds(&facts.findings(), &["move 1, where move 2 belongs"]);
}

#[test]
fn a_run_is_compared_once_and_only_if_the_channel_was_not_moved_after_it() {
    let mut facts = Facts::default();
    for run in ["old-1", "new-1", "bad-1", "open-1"] {
        facts.add_spec(run, promotion(0, 0));
    }
    facts.add_done("old-1", Status::Succeeded);
    facts.add_move(1, model("m"));
    facts.add_done("new-1", Status::Succeeded);
    facts.add_done("bad-1", Status::Failed);
    facts.add_move(2, model("m"));
    let due = |facts: &Facts, decided: &[&str]| {
        let decided: BTreeSet<RunId> = decided.iter().map(|run| run.parse().unwrap()).collect();
        let due = facts.channels().due_promotions(&decided).into_iter();
        due.map(|due| (due.run.to_string(), due.move_number)).collect::<Vec<_>>()
    };
    assert_eq!(due(&facts, &[]), [("new-1".to_owned(), 2)]);
    assert!(due(&facts, &["new-1"]).is_empty());
    facts.add_move(3, model("n"));
    assert!(due(&facts, &[]).is_empty(), "another model was named on purpose");
}

#[test]
fn the_feedback_of_a_failed_run_is_used_again_once_some_is_new() {
    let mut facts = Facts::default();
    facts.add_spec("new-1", promotion(7, 1));
    facts.add_done("new-1", Status::Succeeded);
    facts.add_spec("bad-1", promotion(9, 1));
    facts.add_done("bad-1", Status::Failed);
    facts.add_spec("plain-1", promotion(0, 0));
    let learned = facts.channels().learned_feedback(&channel());
    assert_eq!(learned, LearnedFeedback { used: 7, tried: 9, is_open: false });
    facts.add_spec("open-1", promotion(11, 1));
    let learned = facts.channels().learned_feedback(&channel());
    assert_eq!(learned, LearnedFeedback { used: 11, tried: 11, is_open: true });

    let due = |used, tried, count: u64| {
        let positions: Vec<u64> = (1..=count).collect();
        LearnedFeedback { used, tried, is_open: false }.count_due(&positions, 50)
    };
    assert_eq!((due(0, 0, 49), due(0, 0, 50)), (None, Some(50)));
    assert_eq!((due(50, 50, 99), due(50, 50, 100)), (None, Some(50)), "it was used");
    assert_eq!(due(0, 50, 50), None, "the same again would fail again");
    assert_eq!((due(0, 50, 59), due(0, 50, 60)), (None, Some(60)));
    let open = LearnedFeedback { is_open: true, ..LearnedFeedback::default() };
    assert_eq!(open.count_due(&[1; 99], 50), None);
}

#[test]
fn a_decision_holds_while_no_other_move_comes_first() {
    let (named, forgotten) = (model("m"), v1::ChannelMove::default());
    assert_eq!(require_move(Some((2, &named)), 2), Ok(&named));
    assert_eq!(require_move(Some((3, &named)), 2), Err(OutdatedMove::Moved));
    assert_eq!(require_move(Some((2, &forgotten)), 2), Err(OutdatedMove::Forgotten));
    assert_eq!(require_move(None, 2), Err(OutdatedMove::Forgotten));
}

#[test]
fn a_channel_returns_to_no_model_before_a_forgetting() {
    let target = |models: &[&str]| {
        let name = |it: &&str| if it.is_empty() { v1::ChannelMove::default() } else { model(it) };
        let moves: Vec<v1::ChannelMove> = models.iter().map(name).collect();
        roll_back_target((1..).zip(&moves).collect::<Vec<_>>().into_iter().rev())
    };
    assert_eq!(target(&["a", "b"]), Some(1));
    assert_eq!(target(&["a", "b", ""]), None);
    assert_eq!(target(&["a", "", "b"]), None);
    assert_eq!(target(&["a", "", "a", "b", "b"]), Some(3));
    assert_eq!(target(&["", "b"]), None);
}

#[test]
fn a_move_keeps_the_settings_and_not_the_reasons_of_the_one_before() {
    let (_, moved) = promoted();
    let before = v1::ChannelMove { roll_back: true, user: "ann".into(), ..moved };
    let next = move_to_model(&before, model("n"));
    assert_eq!(next, v1::ChannelMove { roll_back: true, ..model("n") });
    assert_eq!(unchanged_move(&before).promotion, "");
}

#[test]
fn a_sound_history_of_a_channel_has_no_findings() {
    let (mut facts, moved) = promoted();
    assert_eq!(facts.findings(), Vec::<String>::new());
    facts.add_move(3, v1::ChannelMove { roll_back: true, ..unchanged_move(&moved) });
    let live = Evidence { live: true, ..evidence("r-1") };
    let returned = v1::ChannelMove { evidence: Some(live), roll_back: true, ..model("m") };
    facts.add_move(4, returned);
    facts.add_move(5, v1::ChannelMove::default());
    facts.add_move(6, move_to_checkpoint(&v1::Checkpoint { step: 4, ..checkpoint(&moved) }));
    assert_eq!(facts.findings(), Vec::<String>::new());
}

fn checkpoint(moved: &v1::ChannelMove) -> v1::Checkpoint {
    v1::Checkpoint {
        run: moved.run.clone(),
        tree: moved.adapter.clone(),
        base: moved.base.clone(),
        content: v1::checkpoint::Content::Adapter.into(),
        ..v1::Checkpoint::default()
    }
}

#[test]
fn a_move_names_a_model_that_existed() {
    let (facts, moved) = promoted();
    let named = |change: fn(&mut v1::ChannelMove)| {
        let mut named = unchanged_move(&moved);
        change(&mut named);
        facts.findings_after(3, named)
    };
    assert_finds(&named(|it| it.run = "r-9".into()), &["run r-9, which did not exist"]);
    assert_finds(&named(|it| it.step = 5), &["r-1/0/5, which did not exist"]);
    assert_finds(&named(|it| it.adapter = tree("x")), &["not those of r-1/0/4"]);
    let spec = v1::Spec {
        base: Some(v1::Base { tree: tree("m"), ..v1::Base::default() }),
        ..v1::Spec::default()
    };
    assert_finds(&facts.findings_after(3, move_to_base("r-1", &spec)), &[]);
    assert_finds(&facts.findings_after(4, moved), &["move 4, where move 3 belongs"]);
}

#[test]
fn evidence_decides_for_the_move_that_it_is_of() {
    let (facts, moved) = promoted();
    let changed = |change: fn(&mut Evidence)| {
        let mut evidence = Evidence { run: "r-1".into(), ..evidence("r-1") };
        change(&mut evidence);
        facts.findings_after(
            3,
            v1::ChannelMove { evidence: Some(evidence), ..unchanged_move(&moved) },
        )
    };
    assert_finds(&changed(|_| ()), &[]);
    assert_finds(&changed(|it| it.p = 0.2), &["p is 0.2"]);
    assert_finds(&changed(|it| it.difference = -0.1), &["no improvement"]);
    assert_finds(&changed(|it| it.cycle = 3), &["r-1/3, which the channel did not name"]);
    let expected = ["returns to another model", "does not roll back by itself"];
    assert_finds(&changed(|it| it.live = true), &expected);
}

#[test]
fn a_run_moves_its_channel_once_and_after_its_success() {
    let (facts, moved) = promoted();
    let again = facts.findings_after(3, moved.clone());
    assert_finds(&again, &["has moved the channel before", "had moved since run r-1 ended"]);
    let stranger = v1::ChannelMove { promotion: "r-2".into(), ..moved.clone() };
    assert_finds(&facts.findings_after(3, stranger), &["r-2 does not promote"]);

    let mut early = Facts::default();
    early.add_move(1, model("m"));
    early.add_spec("r-1", promotion(0, 0));
    early.add_checkpoint("r-1");
    let unproven = v1::ChannelMove { evidence: None, ..moved.clone() };
    assert_finds(&early.findings_after(2, moved.clone()), &["had not succeeded"]);
    let found = early.findings_after(2, unproven);
    assert_finds(&found, &["had not succeeded", "it has no evidence"]);
    early.add_move(2, v1::ChannelMove::default());
    early.add_done("r-1", Status::Succeeded);
    let found = early.findings_after(3, moved);
    assert_finds(&found, &["compared with a channel without a model"]);
    let found = early.findings_after(3, v1::ChannelMove::default());
    assert_finds(&found, &["forgets a channel that names no model"]);
}

#[test]
fn a_run_moves_its_channel_to_its_best_checkpoint() {
    let mut log = Log::start_raft(2, |_| ());
    log.perplexities = [(1, 9.0), (2, 8.0)].into();
    log.run_to_the_end();
    let run = log.run();
    let mut facts = Facts::default();
    let base = move_to_base("", &run.spec);
    facts.add_move(1, base.clone());
    let kept = log.records().iter().filter(|record| !record.fact.subject.key.is_bulky());
    for record in kept {
        let mut body = record.fact.body.clone();
        if let FactBody::Spec(spec) = &mut body {
            spec.promotion = Some(promotion(0, 0));
        }
        facts.add("r1", record.fact.subject.key.clone(), body);
    }
    let best = best_checkpoint(&run).unwrap();
    let other = run.cycles[&if best.cycle == 1 { 2 } else { 1 }].final_checkpoint().unwrap();
    let moved = |to| promotion_move(&base, &run.id, move_to_checkpoint(to), evidence("r1"));
    assert_finds(&facts.findings_after(2, moved(best)), &[]);
    assert_finds(&facts.findings_after(2, moved(other)), &["not the best checkpoint of run r1"]);
}

#[test]
fn one_run_learns_at_a_time_and_from_new_feedback() {
    let mut facts = Facts::default();
    let learning = Some(v1::channel_move::Learning { at_least: 10, ..Default::default() });
    facts.add_move(1, v1::ChannelMove { learning, ..model("m") });
    facts.add_spec("learned-1", promotion(20, 1));
    let with = |facts: &Facts, feedback, learning| {
        let mut facts = facts.clone();
        facts.add_spec("learned-2", promotion(feedback, learning));
        facts.findings()
    };
    assert_finds(&with(&facts, 30, 0), &[]);
    assert_finds(
        &with(&facts, 30, 1),
        &["run learned-1 learned from the channel at the same time"],
    );
    facts.add_done("learned-1", Status::Failed);
    assert_finds(&with(&facts, 30, 1), &[]);
    assert_finds(&with(&facts, 20, 1), &["its feedback is that of run learned-1"]);
    assert_finds(&with(&facts, 30, 4), &["move 4 of the channel does not learn"]);
}
