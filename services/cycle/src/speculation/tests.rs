use super::*;
use crate::state::JobNeeds;

const NEEDS: JobNeeds = JobNeeds { verdicts: true, scores: false };

const TIMEOUTS: ReissueTimeouts = ReissueTimeouts { unclaimed_ms: 10, overdue_ms: 100 };

fn ordered(orders_in_round: u32) -> OrderHistory {
    OrderHistory { orders_in_round, ..Default::default() }
}

fn member(tokens_per_s: f64) -> FleetMember {
    FleetMember { tokens_per_s, ..Default::default() }
}

fn fleet(rates: &[f64]) -> FleetSnapshot {
    let generators = rates.iter().map(|rate| member(*rate)).collect();
    FleetSnapshot { generators, ..Default::default() }
}

#[test]
fn each_order_doubles_the_wait_for_the_next_and_the_eighth_is_the_last() {
    let lost = |orders, unheld| is_lost(&ordered(orders), unheld, &TIMEOUTS);
    for (orders, limit) in [(0, 10), (1, 10), (2, 20), (3, 40), (7, 640)] {
        assert!(lost(orders, limit) && !lost(orders, limit - 1), "{orders} orders");
    }
    assert!(!lost(8, u64::MAX));
    let overdue =
        |orders, expected, waited| is_overdue(&ordered(orders), waited, expected, &TIMEOUTS);
    // 100 ms, or 8 times the expected duration.
    for (orders, expected, limit) in
        [(0, 1.0, 100), (1, 1.0, 100), (2, 1.0, 200), (1, 50.0, 400), (7, 50.0, 25_600)]
    {
        assert!(overdue(orders, expected, limit + 1) && !overdue(orders, expected, limit));
    }
    assert!(!overdue(8, 1.0, u64::MAX));
}

#[test]
fn a_slowdown_compares_with_the_mean_of_the_known_speeds() {
    let known = fleet(&[10.0, 30.0, 0.0]);
    let factors: Vec<f64> =
        known.generators.iter().map(|member| slowdown_factor(&known, member)).collect();
    assert_eq!(factors, [2.0, 1.0, 1.0]);
    assert_eq!(slowdown_factor(&fleet(&[]), &member(1.0)), 1.0);
}

#[test]
fn an_agent_finishes_after_its_tokens_and_not_before_half_a_sample() {
    let agent = FleetMember { remaining_samples: 4, seconds_per_sample: 2.0, ..member(8.0) };
    assert_eq!([4.0, 8.0, 16.0].map(|tokens| agent.duration_s(tokens)), [1.0, 1.0, 2.0]);
    assert_eq!(agent.remaining_s(10.0), Some(5.0));
    assert_eq!(member(0.0).remaining_s(10.0), None);
}

/// Assigns jobs of one sample of 10 tokens with these seconds left to these idle generators.
/// Returns the name of each assigned job and its generator's speed.
fn assigned(rates: &[f64], left_s: &[f64]) -> Vec<(String, f64)> {
    let draws = vec![v1::plan::Draw { prompt: 0, first: 0, count: 1 }];
    let job = PlannedJob::new(v1::Purpose::Train, String::new(), draws, NEEDS);
    let ids: Vec<JobId> = (0..left_s.len()).map(|n| format!("t{n}").parse().unwrap()).collect();
    let slow = left_s.iter().zip(&ids).map(|(left_s, id)| (*left_s, id, &job)).collect();
    let idle = fleet(rates);
    let orders = IdleGenerators::from_fleet(&idle).assign_stragglers(slow, 10.0);
    let rate = |agent: Option<&FleetMember>| agent.map_or(0.0, |agent| agent.tokens_per_s);
    orders.into_iter().map(|order| (order.id.to_string(), rate(order.agent))).collect()
}

#[test]
fn a_straggler_goes_to_the_fastest_idle_generator_that_gains_by_it() {
    let one = |job: &str, rate| vec![(job.to_owned(), rate)];
    // 1 s on the fast generator: the gain must be a second; 10 s on a slow one: half of it.
    assert_eq!(assigned(&[10.0], &[2.0]), []);
    assert_eq!(assigned(&[5.0, 10.0], &[2.1]), one("t0", 10.0));
    assert_eq!(assigned(&[1.0], &[15.0]), []);
    assert_eq!(assigned(&[1.0], &[15.1]), one("t0", 1.0));
    // The second job starts after the first: 2 s.
    assert_eq!(assigned(&[10.0], &[3.0, 9.0]), one("t1", 10.0));
    let both = [("t1".to_owned(), 10.0), ("t0".to_owned(), 10.0)];
    assert_eq!(assigned(&[10.0], &[3.1, 9.0]), both);
}

#[test]
fn a_stuck_job_goes_to_a_generator_without_another_or_of_unknown_speed() {
    let stuck = f64::INFINITY;
    let all = assigned(&[0.0, 2.0, 10.0], &[stuck; 4]);
    let expected = [("t0", 10.0), ("t1", 2.0), ("t2", 0.0)];
    assert_eq!(all, expected.map(|(job, rate)| (job.to_owned(), rate)));
    assert_eq!(assigned(&[0.0], &[99.0]), [], "the gain is unknown");
    let busy = HeldJob { run: "r1".parse().unwrap(), cycle: 1, job: "t9".into() };
    let mut fleet = fleet(&[0.0, 2.0, 10.0]);
    fleet.generators[2].held_jobs = [busy.clone()].into();
    assert_eq!(IdleGenerators::from_fleet(&fleet).generator_count(), 2);
    assert_eq!(index_holders(&fleet)[&busy].tokens_per_s, 10.0);
}
