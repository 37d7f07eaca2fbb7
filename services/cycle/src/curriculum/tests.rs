use wire::RunId;

use super::*;
use crate::state::PromptHistory;

fn run(seen: &[(u32, u32, u32)]) -> Run {
    let spec = v1::Spec { seed: 3, ..Default::default() };
    let mut run = Run::new(RunId::new("r").unwrap(), spec, 0);
    for (line, judged, passed) in seen {
        run.prompt_histories.entry(*line).or_default().record_cycle(*judged, *passed);
    }
    run
}

fn raft(curriculum: v1::Curriculum) -> v1::spec::Raft {
    v1::spec::Raft {
        prompts_per_cycle: 5,
        samples_per_prompt: 8,
        curriculum: Some(curriculum),
        ..Default::default()
    }
}

fn lines(draws: &[(u32, u32)]) -> Vec<u32> {
    draws.iter().map(|(line, _)| *line).collect()
}

#[test]
fn a_pass_uses_every_prompt_before_any_comes_again() {
    let raft = raft(v1::Curriculum::default());
    let of = |seed: u64, cycle| {
        let mut run = run(&[]);
        run.spec.seed = seed;
        lines(&select_prompts(&run, &raft, cycle, 10))
    };
    let (first, second) = (of(1, 1), of(1, 2));
    assert_eq!((first.len(), second.len()), (5, 5));
    assert!(first.iter().all(|line| !second.contains(line)));
    assert_ne!(of(2, 1), first, "another seed, another order");
    assert_eq!(of(1, 1), first);
}

#[test]
fn a_cycle_that_crosses_passes_has_as_many_prompts_as_any() {
    let raft = v1::spec::Raft { prompts_per_cycle: 3, ..raft(v1::Curriculum::default()) };
    for seed in 0..50 {
        let mut run = run(&[]);
        run.spec.seed = seed;
        assert!(
            (1..9).all(|cycle| select_prompts(&run, &raft, cycle, 5).len() == 3),
            "seed {seed}"
        );
    }
}

#[test]
fn prompts_of_the_wanted_difficulty_come_first() {
    // Line n passed n of 10 times.
    let seen: Vec<_> = (0..=10).map(|line| (line, 10, line)).collect();
    let of = |target: f64| {
        let difficulty = v1::curriculum::Difficulty { target: vec![target], explore: 0.0 };
        let raft = raft(v1::Curriculum { difficulty: Some(difficulty), budget: None });
        lines(&select_prompts(&run(&seen), &raft, 1, 11))
    };
    assert_eq!(of(0.5), [3, 4, 5, 6, 7]);
    assert_eq!(of(0.0), [0, 1, 2, 3, 4]);
    assert_eq!(of(1.0), [6, 7, 8, 9, 10]);
}

#[test]
fn the_target_may_move_and_a_share_goes_by_turns() {
    let seen: Vec<_> = (0..=100).map(|line| (line, 100, line)).collect();
    let difficulty = v1::curriculum::Difficulty { target: vec![1.0, 0.0], explore: 0.4 };
    let raft = raft(v1::Curriculum { difficulty: Some(difficulty), budget: None });
    let easy = lines(&select_prompts(&run(&seen), &raft, 1, 101));
    let hard = lines(&select_prompts(&run(&seen), &raft, 2, 101));
    assert_eq!((easy.len(), hard.len()), (5, 5));
    assert!([98, 99, 100].iter().all(|line| easy.contains(line)), "{easy:?}");
    assert!([0, 1, 2].iter().all(|line| hard.contains(line)), "{hard:?}");
}

#[test]
fn what_is_older_counts_half_as_much() {
    let mut seen = PromptHistory::default();
    assert_eq!(seen.expected_pass_rate().to_bits(), 0.5_f64.to_bits());
    seen.record_cycle(8, 0);
    seen.record_cycle(8, 8);
    assert_eq!(seen, PromptHistory { judged: 12.0, passed: 8.0 });
}

#[test]
fn a_budget_gives_more_to_the_uncertain_and_the_same_in_all() {
    let budget = v1::curriculum::Budget { min: 2, max: 20 };
    let raft = raft(v1::Curriculum { difficulty: None, budget: Some(budget) });
    let seen = [(0, 100, 0), (1, 100, 50), (2, 100, 100), (3, 100, 10), (4, 0, 0)];
    let draws: BTreeMap<u32, u32> = select_prompts(&run(&seen), &raft, 1, 5).into_iter().collect();
    assert_eq!(draws.values().sum::<u32>(), 5 * 8);
    assert!(draws.values().all(|count| (2..=20).contains(count)), "{draws:?}");
    assert_eq!(draws[&0], draws[&2], "{draws:?}");
    assert!(draws[&1] > draws[&3] && draws[&3] > draws[&0], "{draws:?}");
    assert_eq!(draws[&1].abs_diff(draws[&4]), 0, "as uncertain as one never seen: {draws:?}");
}

#[test]
fn a_budget_too_large_to_share_out_is_shared_evenly() {
    let budget = v1::curriculum::Budget { min: 1, max: u32::MAX };
    let mut raft = raft(v1::Curriculum { difficulty: None, budget: Some(budget) });
    raft.samples_per_prompt = u32::MAX;
    let draws = select_prompts(&run(&[]), &raft, 1, 5);
    assert!(draws.iter().all(|(_, count)| *count == u32::MAX), "{draws:?}");
}
