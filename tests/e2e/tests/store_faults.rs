//! A store that is away, that errs, that cuts answers short and flips their bits.

use std::time::{Duration, Instant};

use e2e::{Fleet, Sampling, Undisturbed, until};
use s3_server::{Faults, S3Server};

const LIMIT: Duration = Duration::from_secs(240);

/// `STORE_AWAY_S` makes it longer.
const AWAY: Duration = Duration::from_secs(20);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

const SMALL: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 64, cycles: 2 };

const AGENTS: &str = "trainer,generator=2,verifier,evaluator";

#[test]
fn a_store_that_is_away_for_a_while_costs_nothing_but_time() {
    let away = std::env::var("STORE_AWAY_S").ok().and_then(|text| text.parse().ok());
    let away = away.map_or(AWAY, Duration::from_secs);
    let undisturbed = Undisturbed::of(SAMPLING);
    let mut server = S3Server::start().unwrap();
    let fleet = Fleet::up_with(AGENTS, &["--store", &server.url()], server.env());
    let run = fleet.submit(&undisturbed.spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 64, LIMIT);
    server.kill();
    // Somebody needs the store soon, and is started anew while it is away.
    fleet.kill("trainer-1");
    fleet.kill("coordinator");
    std::thread::sleep(away);
    assert!(fleet.outcome(&run).is_none(), "nothing can be trained without a store");
    server.restart().unwrap();
    let back = Instant::now();
    undisturbed.assert_same(&fleet, &run, LIMIT);
    println!("away for {away:?}; the run ended {:.1} s after", back.elapsed().as_secs_f64());
}

#[test]
fn a_store_that_errs_cuts_short_and_flips_bits_changes_no_result() {
    let undisturbed = Undisturbed::of(SMALL);
    let server = S3Server::start().unwrap();
    let fleet = Fleet::up_with(AGENTS, &["--store", &server.url()], server.env());
    let spec = undisturbed.spec(&fleet, fleet.path());
    let delay = Duration::from_millis(20);
    server.set_faults(Faults { seed: 3, refused: 0.15, cut: 0.1, flipped: 0.1, delay });
    let run = fleet.submit(&spec);
    until("the run ends", LIMIT, || fleet.outcome(&run));
    // An audit whose listing of the store came garbled says so, and is none.
    server.set_faults(Faults::default());
    undisturbed.assert_same(&fleet, &run, LIMIT);
    let counts = server.fault_counts();
    println!("{counts:?}");
    assert!(counts.refused > 0 && counts.cut > 0 && counts.flipped > 0, "{counts:?}");
}
