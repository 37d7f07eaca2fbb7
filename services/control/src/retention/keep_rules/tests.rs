use proptest::prelude::*;

use super::*;

const NOW_MS: u64 = 100 * DAY_MS;

fn tree(path: &str) -> v1::Tree {
    v1::Tree { path: path.to_owned(), manifest: String::new() }
}

fn path(run: usize, cycle: u32) -> String {
    format!("runs/r-{run}/checkpoints/c{cycle}")
}

/// A run that has ended, with a checkpoint and samples in each cycle but the first, which has only
/// samples. Each cycle is a day older than the next.
fn ended_run(number: usize, cycles: u32) -> RunTrees {
    let checkpoint = |cycle| CheckpointTree {
        cycle,
        step: 4,
        tree: tree(&path(number, cycle)),
        resume: None,
        base: None,
        is_best: cycle == 2,
        published_ms: NOW_MS - u64::from(cycles - cycle + 1) * DAY_MS,
    };
    RunTrees {
        run: RunId::new(format!("r-{number}")).unwrap(),
        has_ended: true,
        is_selected: true,
        spec_trees: Vec::new(),
        adopted: Vec::new(),
        checkpoints: (1..=cycles).map(checkpoint).collect(),
        archives: (0..=cycles).map(|cycle| (cycle, tree(&format!("a{number}-{cycle}")))).collect(),
    }
}

fn policy(rules: &str) -> KeepPolicy {
    KeepPolicy { rules: rules.parse().unwrap(), keep_newest: true, now_ms: NOW_MS }
}

fn channel(name: &str, present: &str, before: &str, ever: &[&str]) -> ChannelTrees {
    ChannelTrees {
        name: name.to_owned(),
        present: vec![present.to_owned()],
        before: vec![before.to_owned()],
        ever: ever.iter().map(|path| (*path).to_owned()).collect(),
    }
}

/// Lists `run/cycle: reason` of the checkpoints that are kept.
fn kept(runs: &[RunTrees], channels: &[ChannelTrees], policy: &KeepPolicy) -> Vec<String> {
    let decisions = decide_trees(runs, channels, policy);
    let kept = decisions.iter().filter(|it| it.content != TreeContent::Samples);
    let text = |it: &TreeDecision| {
        let reason = it.kept.as_ref()?;
        Some(format!("{}/{}: {reason}", it.run, it.cycle))
    };
    kept.filter_map(text).collect()
}

#[test]
fn rules_are_read_and_written_as_a_list() {
    for text in ["best", "last=3", "best,last=3,promoted,days=30"] {
        assert_eq!(text.parse::<KeepRules>().unwrap().to_string(), text);
    }
    assert_eq!("days=2, best".parse::<KeepRules>().unwrap().to_string(), "best,days=2");
    for wrong in ["", "all", "last", "last=x", "last=-1", "days=", "best=1", "best;last=3"] {
        assert!(wrong.parse::<KeepRules>().is_err(), "{wrong:?} was accepted");
    }
}

#[test]
fn each_rule_keeps_what_it_names() {
    let runs = [ended_run(1, 5)];
    let promoted = [channel("stable", "models/x", "models/y", &[&path(1, 1)])];
    let newest = "r-1/5: newest of its run";
    for (rules, expected) in [
        ("last=0", vec![newest]),
        ("best", vec!["r-1/2: rule best", newest]),
        ("last=2", vec!["r-1/4: rule last=2", newest]),
        ("days=3", vec!["r-1/4: rule days=3", newest]),
        ("promoted", vec!["r-1/1: rule promoted", newest]),
        ("best,last=2", vec!["r-1/2: rule best", "r-1/4: rule last=2", newest]),
    ] {
        assert_eq!(kept(&runs, &promoted, &policy(rules)), expected, "{rules}");
    }
    let all = KeepPolicy { keep_newest: false, ..policy("last=0") };
    assert!(kept(&runs, &[], &all).is_empty());
}

#[test]
fn what_is_needed_is_kept_whatever_the_rules_are() {
    let rules = &KeepPolicy { keep_newest: false, ..policy("last=0") };
    let open = |run: RunTrees| RunTrees { has_ended: false, ..run };
    let channels = [channel("stable", &path(1, 1), &path(1, 2), &[])];
    let expected = ["r-1/1: channel stable names it", "r-1/2: channel stable rolls back to it"];
    assert_eq!(kept(&[ended_run(1, 3)], &channels, rules), expected);

    let mut next = open(ended_run(2, 1));
    next.spec_trees.push(path(1, 3));
    let expected = ["r-1/3: r-2 needs it", "r-2/1: the run has not ended"];
    assert_eq!(kept(&[ended_run(1, 3), next.clone()], &[], rules), expected);
    next.has_ended = true;
    assert!(kept(&[ended_run(1, 3), next], &[], rules).is_empty());
}

#[test]
fn what_the_rules_choose_for_a_fork_is_kept_in_the_run_that_made_it() {
    let parent = ended_run(1, 5);
    let mut fork = ended_run(2, 4);
    fork.checkpoints.retain(|it| it.cycle == 4);
    let adopt = |cycle| AdoptedCheckpoint { path: path(1, cycle), is_best: cycle == 1 };
    fork.adopted = (1..=3).map(adopt).collect();
    let newest = ["r-1/5: newest of its run", "r-2/4: newest of its run"];
    for (rules, expected) in [
        ("last=0", vec![]),
        ("best", vec!["r-1/1: r-2 uses it: rule best", "r-1/2: rule best"]),
        ("last=2", vec!["r-1/3: r-2 uses it: rule last=2", "r-1/4: rule last=2"]),
    ] {
        let runs = [parent.clone(), fork.clone()];
        let expected = [expected, newest.to_vec()].concat();
        assert_eq!(kept(&runs, &[], &policy(rules)), expected, "{rules}");
    }
    // Also if the user asks only about the run that made them.
    let unasked = RunTrees { is_selected: false, ..fork.clone() };
    let expected = ["r-1/1: r-2 uses it: rule best", "r-1/2: rule best", newest[0]];
    assert_eq!(kept(&[parent.clone(), unasked], &[], &policy("best")), expected);
    // It was cancelled before it made any.
    fork.checkpoints.clear();
    let expected = ["r-1/3: r-2 uses it: newest of its run", newest[0]];
    assert_eq!(kept(&[parent, fork], &[], &policy("last=0")), expected);
}

#[test]
fn the_base_of_a_kept_adapter_is_kept_also_in_another_run() {
    let mut adapters = ended_run(2, 3);
    adapters.checkpoints[0].base = Some(path(1, 1));
    adapters.checkpoints[1].base = Some(path(1, 2));
    let mut models = ended_run(1, 3);
    models.checkpoints[1].base = Some(path(1, 3));
    let channels = [channel("stable", &path(2, 2), "", &[])];
    let rules = KeepPolicy { keep_newest: false, ..policy("last=0") };
    let expected =
        ["r-1/2: base of r-2/2/4", "r-1/3: base of r-1/2/4", "r-2/2: channel stable names it"];
    assert_eq!(kept(&[models.clone(), adapters.clone()], &channels, &rules), expected);
    // All trees of a run that the user does not ask about stay, with their bases.
    adapters.is_selected = false;
    let expected = ["r-1/1: base of r-2/1/4", "r-1/2: base of r-2/2/4", "r-1/3: base of r-1/2/4"];
    assert_eq!(kept(&[models, adapters], &channels, &rules), expected);
}

#[test]
fn samples_are_kept_with_the_checkpoint_of_their_cycle() {
    let decisions = decide_trees(&[ended_run(1, 3)], &[], &policy("best"));
    let samples = decisions.iter().filter(|it| it.content == TreeContent::Samples);
    let kept: Vec<(u32, bool)> = samples.map(|it| (it.cycle, it.kept.is_some())).collect();
    assert_eq!(kept, [(0, true), (1, false), (2, true), (3, true)]);
}

prop_compose! {
    fn any_run(number: usize)(
        has_ended: bool,
        is_selected: bool,
        named in prop::collection::vec((0..4_usize, 1..5_u32), 0..3),
        adopted in prop::collection::vec((0..4_usize, 1..5_u32, any::<bool>()), 0..3),
        bases in prop::collection::vec(prop::option::of((0..4_usize, 1..5_u32)), 4),
    ) -> RunTrees {
        let mut run = RunTrees { has_ended, is_selected, ..ended_run(number, 4) };
        let adopt = |(run, cycle, is_best)| AdoptedCheckpoint { path: path(run, cycle), is_best };
        run.adopted = adopted.into_iter().map(adopt).collect();
        run.spec_trees = named.into_iter().map(|(run, cycle)| path(run, cycle)).collect();
        for (checkpoint, base) in run.checkpoints.iter_mut().zip(bases) {
            checkpoint.base = base.map(|(run, cycle)| path(run, cycle));
        }
        run
    }
}

prop_compose! {
    fn any_channel()(
        named in prop::collection::vec((0..4_usize, 1..5_u32), 3),
    ) -> ChannelTrees {
        let paths: Vec<String> =
            named.into_iter().map(|(run, cycle)| path(run, cycle)).collect();
        channel("c", &paths[0], &paths[1], &[&paths[2]])
    }
}

fn any_policy() -> impl Strategy<Value = KeepPolicy> {
    let rules = (any::<bool>(), 0..4_usize, any::<bool>(), 0..6_u64);
    (rules, any::<bool>()).prop_map(|((best, last, promoted, days), keep_newest)| {
        let rules = KeepRules { best, last, promoted, days };
        KeepPolicy { rules, keep_newest, now_ms: NOW_MS }
    })
}

proptest! {
    #[test]
    fn nothing_that_is_needed_is_ever_removed(
        runs in (any_run(0), any_run(1), any_run(2), any_run(3)),
        channels in prop::collection::vec(any_channel(), 0..3),
        policy in any_policy(),
    ) {
        let runs = [runs.0, runs.1, runs.2, runs.3];
        let decisions = decide_trees(&runs, &channels, &policy);
        let removed: BTreeSet<&str> = decisions
            .iter()
            .filter(|it| it.kept.is_none())
            .map(|it| it.tree.path.as_str())
            .collect();
        let is_there = |path: &str| !removed.contains(path);
        for channel in &channels {
            prop_assert!(channel.present.iter().chain(&channel.before).all(|it| is_there(it)));
        }
        for run in &runs {
            let trees = run.checkpoints.iter().map(|it| &it.tree).chain(run.archives.values());
            if !run.has_ended || !run.is_selected {
                prop_assert!(trees.clone().all(|it| is_there(&it.path)));
            }
            if !run.has_ended {
                prop_assert!(run.spec_trees.iter().all(|it| is_there(it)));
            }
            for checkpoint in run.checkpoints.iter().filter(|it| is_there(&it.tree.path)) {
                prop_assert!(checkpoint.base.iter().all(|base| is_there(base)));
                let samples = &run.archives[&checkpoint.cycle];
                prop_assert!(is_there(&samples.path));
            }
            let mut best = run.adopted.iter().filter(|it| it.is_best);
            let keeps_best = policy.rules.best && run.has_ended;
            prop_assert!(!keeps_best || best.all(|it| is_there(&it.path)));
            let newest = run.checkpoints.last().map(|it| it.tree.path.as_str());
            prop_assert!(!policy.keep_newest || newest.is_none_or(is_there));
        }
    }
}
