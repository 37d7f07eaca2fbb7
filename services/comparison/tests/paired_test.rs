//! Error rate, power and intervals of the paired test, on simulated pairs with fixed seeds.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use comparison::{Comparison, Decision, Pair, PairedTest, read_pair_line};

const ALPHA: f64 = 0.05;
const PAIRS: usize = 1500;

/// Draws a pair of pass marks: `b` wins alone, `a` wins alone, or both score the same.
fn draw_pair(random: &mut fastrand::Rng, b_alone: f64, a_alone: f64) -> Pair {
    let at = random.f64();
    let [a, b] = if at < b_alone {
        [0.0, 1.0]
    } else if at < b_alone + a_alone {
        [1.0, 0.0]
    } else {
        let same = f64::from(random.bool());
        [same, same]
    };
    Pair { a, b }
}

/// Looks after every pair and stops at a decision.
fn decide(mut draw: impl FnMut() -> Pair) -> Decision {
    let mut test = PairedTest::new(ALPHA).unwrap();
    (0..PAIRS)
        .map(|_| test.add_pair(draw()))
        .find(|it| *it != Decision::Undecided)
        .unwrap_or(Decision::Undecided)
}

fn compare(pairs: impl IntoIterator<Item = Pair>) -> Comparison {
    let mut test = PairedTest::new(ALPHA).unwrap();
    for pair in pairs {
        test.add_pair(pair);
    }
    test.comparison()
}

#[test]
fn equal_models_are_told_apart_in_at_most_five_percent_of_10_000_comparisons() {
    // A fifth of the pairs differ; all of them; scores between 0 and 1.
    let mut random = fastrand::Rng::with_seed(1);
    let wrong = |draw: &mut dyn FnMut() -> Pair| {
        (0..10_000).filter(|_| decide(&mut *draw) != Decision::Undecided).count()
    };
    let fifth = wrong(&mut || draw_pair(&mut random, 0.1, 0.1));
    let mut random = fastrand::Rng::with_seed(2);
    let all = wrong(&mut || draw_pair(&mut random, 0.5, 0.5));
    let mut random = fastrand::Rng::with_seed(3);
    let graded = wrong(&mut || Pair { a: random.f64(), b: random.f64() });
    println!("false decisions of 10 000: a fifth differ {fifth}, all {all}, graded {graded}");
    for count in [fifth, all, graded] {
        assert!((1..=500).contains(&count), "{count}");
    }
}

#[test]
fn five_points_are_found_within_1500_pairs_in_four_of_five_comparisons() {
    let mut random = fastrand::Rng::with_seed(4);
    let decisions: Vec<Decision> =
        (0..2000).map(|_| decide(|| draw_pair(&mut random, 0.125, 0.075))).collect();
    let count = |which: Decision| decisions.iter().filter(|it| **it == which).count();
    println!("of 2 000: b {}, a {}", count(Decision::B), count(Decision::A));
    assert!(count(Decision::B) >= 1600, "{}", count(Decision::B));
    assert!(count(Decision::A) <= 50, "{}", count(Decision::A));
}

#[test]
fn intervals_contain_the_true_difference_at_every_moment() {
    let mut random = fastrand::Rng::with_seed(5);
    let covered = (0..200).filter(|_| {
        let pairs: Vec<Pair> = (0..400).map(|_| draw_pair(&mut random, 0.3, 0.2)).collect();
        let Comparison { interval: [low, high], .. } = compare(pairs);
        low <= 0.1 && 0.1 <= high
    });
    let covered = covered.count();
    assert!(covered >= 190, "{covered} of 200");
}

#[test]
fn interval_p_and_decision_agree_and_name_the_pair_that_decided() {
    let better = compare((0..1000).map(|_| Pair { a: 0.0, b: 1.0 }));
    assert_eq!(better.decision, Decision::B);
    assert!(better.at < 20, "{}", better.at);
    assert!(better.p <= ALPHA && better.interval[0] > 0.0, "{better:?}");
    assert_eq!((better.difference, better.interval[1]), (1.0, 1.0));

    let worse = compare((0..1000).map(|_| Pair { a: 1.0, b: 0.0 }));
    assert_eq!((worse.decision, worse.at, worse.p), (Decision::A, better.at, better.p));
    assert!(worse.interval[1] < 0.0, "{worse:?}");

    let mut test = PairedTest::new(ALPHA).unwrap();
    for _ in 0..1000 {
        test.add_pair(Pair { a: 0.0, b: 1.0 });
    }
    let (first, all) = (test.comparison(), test.overall());
    assert_eq!((first.at, all.at, all.decision), (better.at, better.at, Decision::B));
    assert!(all.interval[0] > 0.95 && first.interval[0] < 0.5, "{first:?} {all:?}");
    assert!(all.p < first.p);

    let same = compare((0..1000).map(|_| Pair { a: 0.5, b: 0.5 }));
    assert_eq!((same.decision, same.at, same.p), (Decision::Undecided, 1000, 1.0));
    assert!(same.interval[0] > -0.02 && same.interval[1] < 0.02, "{same:?}");
    assert_eq!(compare([]).interval, [-1.0, 1.0]);
}

#[test]
fn an_interval_has_its_ends_in_order_although_the_models_change() {
    let pair = |a, b| Pair { a, b };
    let first = std::iter::repeat_n(pair(0.0, 1.0), 100);
    let changed = first.chain(std::iter::repeat_n(pair(1.0, 0.0), 150));
    let mut test = PairedTest::new(ALPHA).unwrap();
    changed.for_each(|pair| {
        test.add_pair(pair);
    });
    let Comparison { interval: [low, high], difference, .. } = test.overall();
    assert!(low <= difference && difference <= high, "{low} {difference} {high}");
}

#[test]
fn a_longer_series_gives_a_narrower_interval() {
    let mut random = fastrand::Rng::with_seed(6);
    let pairs: Vec<Pair> = (0..1000).map(|_| draw_pair(&mut random, 0.1, 0.1)).collect();
    let width = |count: usize| {
        let Comparison { interval: [low, high], .. } = compare(pairs[..count].iter().copied());
        high - low
    };
    assert!(width(1000) < width(100) && width(100) < width(10));
}

#[test]
fn lines_that_are_no_pairs_are_refused_with_the_field() {
    let pair = read_pair_line(r#"{"a": 0.25, "b": 1, "prompt": "p1"}"#).unwrap();
    assert_eq!(pair, Pair { a: 0.25, b: 1.0 });
    for (line, message) in [
        (r#"{"a": 1}"#, "missing field `b`"),
        (r#"{"a": 1.5, "b": 0}"#, "a is 1.5; scores lie between 0 and 1 (D101)"),
        (r#"{"a": 1, "b": -0.1}"#, "b is -0.1"),
        (r#"{"a": "1", "b": 0}"#, "not a pair of scores"),
    ] {
        let error = read_pair_line(line).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    assert!(PairedTest::new(0.0).is_err() && PairedTest::new(0.6).is_err());
    assert!(PairedTest::new(f64::NAN).is_err());
}
