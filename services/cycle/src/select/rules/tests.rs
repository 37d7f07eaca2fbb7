use super::*;

fn candidate(line: u32, index: u32, completion: &str, reward: f64) -> SampleCandidate<'_> {
    SampleCandidate {
        line,
        prompt_id: "p",
        prompt: "",
        index,
        completion,
        tokens: 4,
        logprob: None,
        token_logprobs: None,
        teacher_logprobs: None,
        token_ids: &[],
        turns: &[],
        is_finished: true,
        reward,
        is_judged: true,
        tie_break: wire::derive_seed(1, &[&line.to_string(), &index.to_string()]),
    }
}

fn rules() -> v1::Selection {
    v1::Selection { min_reward: 0.5, ..Default::default() }
}

/// Line and index of the kept samples.
fn kept(candidates: &[SampleCandidate<'_>], rules: &v1::Selection) -> Vec<(u32, u32)> {
    let chosen = choose_samples(candidates, rules);
    let dropped: u32 = chosen.count_reasons().values().sum();
    assert_eq!(chosen.kept.len() + dropped as usize, candidates.len(), "each is counted once");
    chosen.kept.iter().map(|at| (candidates[*at].line, candidates[*at].index)).collect()
}

const WORDS: [&str; 8] = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"];

/// Prompts with eight different samples each, of which the first `right(line)` pass.
fn judged(prompts: u32, right: impl Fn(u32) -> u32) -> Vec<SampleCandidate<'static>> {
    let each = |line| (0..8).map(move |index| (line, index));
    let all = (0..prompts).flat_map(each);
    all.map(|(line, index)| {
        let reward = f64::from(u8::from(index < right(line)));
        candidate(line, index, WORDS[index as usize], reward)
    })
    .collect()
}

#[test]
fn raft_keeps_the_best_of_each_prompt() {
    let candidates =
        [candidate(0, 0, "a", 0.7), candidate(0, 1, "b", 1.0), candidate(1, 0, "c", 0.5)];
    let rules = v1::Selection { keep_per_prompt: 1, ..rules() };
    assert_eq!(kept(&candidates, &rules), [(0, 1), (1, 0)]);
    assert_eq!(
        choose_samples(&candidates, &rules).count_reasons(),
        [(DropReason::Outranked, 1)].into()
    );
}

#[test]
fn with_equal_rewards_every_prompt_is_represented() {
    // A stable sort's upper half would contain only the first prompts.
    let candidates = judged(10, |_| 8);
    let rules = v1::Selection { keep_share: 0.5, ..rules() };
    let kept = kept(&candidates, &rules);
    assert_eq!(kept.len(), 40);
    let lines: BTreeSet<u32> = kept.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines.len(), 10);
}

#[test]
fn ties_are_the_seeds_matter_not_the_order_they_came_in() {
    let mut candidates = judged(5, |_| 8);
    let rules = v1::Selection { keep_per_prompt: 2, keep_share: 0.7, ..rules() };
    let first = kept(&candidates, &rules);
    candidates.reverse();
    assert_eq!(kept(&candidates, &rules), first);
    candidates.iter_mut().for_each(|c| c.tie_break = c.tie_break.rotate_left(17));
    assert_ne!(kept(&candidates, &rules), first);
}

#[test]
fn a_share_is_of_what_reached_the_least_reward_and_never_nothing() {
    let candidates = judged(4, |line| line);
    for (share, expected) in [(0.5, 3), (0.01, 1), (0.0, 6), (1.0, 6)] {
        let rules = v1::Selection { keep_share: share, ..rules() };
        assert_eq!(kept(&candidates, &rules).len(), expected, "{share}");
    }
}

#[test]
fn mixed_leaves_out_prompts_that_teach_nothing() {
    let candidates = judged(3, |line| [0, 3, 8][line as usize]);
    let rules = v1::Selection { mixed: true, ..rules() };
    let kept: BTreeSet<_> = kept(&candidates, &rules).into_iter().collect();
    assert_eq!(kept, [(1, 0), (1, 1), (1, 2)].into());
    let dropped = choose_samples(&candidates, &rules).count_reasons();
    assert_eq!(
        dropped,
        [(DropReason::Failed, 5), (DropReason::AllRight, 8), (DropReason::AllWrong, 8)].into()
    );
}

#[test]
fn a_quota_caps_each_prompt_however_many_passed() {
    let candidates = judged(3, |line| 2 + 3 * line);
    let rules = v1::Selection { keep_per_prompt: 4, ..rules() };
    let lines: Vec<u32> = kept(&candidates, &rules).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
}

#[test]
fn what_says_the_same_is_kept_once_unless_the_rules_want_it() {
    let candidates = [
        candidate(0, 0, "x is 4", 1.0),
        candidate(0, 1, "x is 4", 1.0),
        candidate(0, 2, "X  is 4", 1.0),
        candidate(1, 0, "x is 4", 1.0),
    ];
    let count = |rules: &v1::Selection| kept(&candidates, rules).len();
    assert_eq!(count(&rules()), 3, "another prompt's completion is its own");
    assert_eq!(count(&v1::Selection { similarity: 0.9, ..rules() }), 2);
    assert_eq!(count(&v1::Selection { keep_duplicates: true, ..rules() }), 4);
}

#[test]
fn length_and_an_end_of_its_own_can_be_asked_for() {
    let mut candidates = judged(1, |_| 8);
    candidates[0].tokens = 1;
    candidates[1].tokens = 90;
    candidates[2].is_finished = false;
    candidates[3].completion = "";
    (candidates[4].tokens, candidates[5].tokens) = (2, 80);
    let rules = v1::Selection { min_tokens: 2, max_tokens: 80, finished: true, ..rules() };
    let chosen = choose_samples(&candidates, &rules);
    assert_eq!(chosen.kept.len(), 4);
    let expected = [DropReason::Empty, DropReason::Unfinished, DropReason::Short, DropReason::Long]
        .map(|why| (why, 1));
    assert_eq!(chosen.count_reasons(), expected.into());
}

#[test]
fn too_few_are_made_up_from_the_best_failures_but_never_below_the_floor() {
    let rewards = [1.0, 0.4, 0.3, 0.3, 0.0];
    let candidates: Vec<_> = rewards
        .into_iter()
        .zip(WORDS)
        .zip(0..)
        .map(|((reward, word), index)| candidate(0, index, word, reward))
        .collect();
    let of =
        |at_least, floor| kept(&candidates, &v1::Selection { at_least, floor, ..rules() }).len();
    assert_eq!((of(0, 0.3), of(2, 0.3), of(9, 0.3), of(9, 0.5)), (1, 2, 4, 1));
    let of = |rules: v1::Selection| kept(&candidates, &rules).len();
    let quota = v1::Selection { at_least: 9, floor: 0.3, keep_per_prompt: 2, ..rules() };
    assert_eq!(of(quota), 2, "a prompt's quota holds all the same");
}

#[test]
fn what_the_share_left_out_fills_up_before_what_failed() {
    let candidates = judged(2, |_| 4);
    let rules = v1::Selection { keep_share: 0.25, at_least: 7, floor: 0.0, ..rules() };
    let chosen = choose_samples(&candidates, &rules);
    assert_eq!(chosen.kept.len(), 7);
    assert!(chosen.kept.iter().all(|place| candidates[*place].reward >= 0.5));
}
