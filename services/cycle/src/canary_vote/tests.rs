//! Which reports count as correct, and what follows for the others.

use super::{canary_text::TEXT_PREFIX, *};

fn votes(figures: &[(&str, f32)]) -> Vec<(String, Vec<f32>)> {
    figures.iter().map(|(who, value)| ((*who).to_owned(), vec![*value, -1.0])).collect()
}

/// The first token's log-probability of the accepted report.
fn right(figures: &[(&str, f32)]) -> Option<f32> {
    let all = votes(figures);
    let vote = |(who, canary): &'_ (String, Vec<f32>)| (who.clone(), canary.clone());
    let all: Vec<_> = all.iter().map(vote).collect();
    let votes: Vec<CanaryVote<'_>> = all
        .iter()
        .map(|(who, canary)| CanaryVote {
            voter: who.clone(),
            canary,
            is_trainer: who.starts_with("trainer"),
        })
        .collect();
    select_reference(&votes, 0.05).map(|canary| canary[0])
}

#[test]
fn more_than_half_are_right_whoever_trained_it() {
    assert_eq!(right(&[]), None);
    assert_eq!(right(&[("a", -2.0)]), Some(-2.0));
    assert_eq!(right(&[("a", -2.0), ("b", -2.01), ("c", -3.0)]), Some(-2.0));
    let outvoted = [("a", -2.0), ("b", -2.0), ("trainer of 1", -3.0)];
    assert_eq!(right(&outvoted), Some(-2.0));
}

#[test]
fn of_two_halves_the_trainers_is_right_and_without_it_nobody_knows() {
    assert_eq!(right(&[("a", -2.0), ("b", -3.0)]), None);
    assert_eq!(right(&[("a", -2.0), ("trainer of 1", -3.0)]), Some(-3.0));
    assert_eq!(right(&[("a", -2.0), ("b", -3.0), ("trainer of 1", -4.0)]), None);
    let halves = [("a", -2.0), ("b", -2.0), ("c", -3.0), ("trainer of 1", -3.0)];
    assert_eq!(right(&halves), Some(-3.0));
}

#[test]
fn a_canary_is_some_of_what_was_trained_on_and_bounded() {
    let line =
        |completion: &str| format!("{{\"prompt\":\"1+1=\",\"completion\":\"{completion}\"}}\n");
    assert_eq!(
        text_from_dataset((line("2") + &line("3")).as_bytes()),
        format!("{TEXT_PREFIX}1+1=2\n1+1=3")
    );
    let long = text_from_dataset((line(&"é".repeat(400)) + &line("3")).as_bytes());
    assert!(long.len() <= 512 && long.len() > 500 && long.ends_with('é'), "{long}");
    let many = text_from_dataset(line("2").repeat(1000).as_bytes());
    assert!(many.len() <= 512 && many.len() > 500);
    assert_eq!(text_from_dataset(b""), "");
}

#[test]
fn a_job_is_ordered_again_under_another_name() {
    let next = |name: &str| replacement_id(&JobId::new(name).unwrap()).map(|id| id.to_string());
    assert_eq!(next("t00003").as_deref(), Some("t00003-2"));
    assert_eq!(next("t00003-2").as_deref(), Some("t00003-3"));
    assert_eq!(next("t00003-100"), None);
    assert_eq!(next("s01_00107").as_deref(), Some("s01_00107-2"), "of a suite");
}
