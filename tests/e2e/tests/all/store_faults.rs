//! A store that is down, returns errors, truncates objects or flips their bits.

use std::time::{Duration, Instant};

use e2e::{Fleet, ReferenceResults, Sampling, wait_until};
use s3_server::{Faults, S3Server};

const LIMIT: Duration = Duration::from_secs(240);

/// The duration of the outage. `STORE_AWAY_S` overrides it.
const OUTAGE: Duration = Duration::from_secs(20);

const SAMPLING: Sampling = Sampling { prompts: 96, per_prompt: 8, max_new_tokens: 320, cycles: 2 };

const SMALL: Sampling = Sampling { prompts: 24, per_prompt: 4, max_new_tokens: 64, cycles: 2 };

const AGENTS: &str = "trainer,generator=2,verifier,evaluator";

#[test]
fn a_store_outage_costs_nothing_but_time() {
    let outage = std::env::var("STORE_AWAY_S").ok().and_then(|text| text.parse().ok());
    let outage = outage.map_or(OUTAGE, Duration::from_secs);
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let mut server = S3Server::start().unwrap();
    let fleet = Fleet::start_with(AGENTS, &["--store", &server.url()], server.env());
    let run = fleet.submit(&reference.write_spec(&fleet, fleet.path()));
    fleet.await_samples(&run, 64, LIMIT);
    server.kill();
    // These processes need the store, and restart while it is down.
    fleet.kill("trainer-1");
    fleet.kill("coordinator");
    std::thread::sleep(outage);
    assert!(fleet.ended_run(&run).is_none(), "nothing can be trained without a store");
    server.restart().unwrap();
    let restarted = Instant::now();
    reference.assert_same_results(&fleet, &run, LIMIT);
    println!("away for {outage:?}; the run ended {:.1} s after", restarted.elapsed().as_secs_f64());
}

#[test]
fn a_store_with_errors_truncated_objects_and_flipped_bits_changes_no_result() {
    let reference = ReferenceResults::for_sampling(SMALL);
    let server = S3Server::start().unwrap();
    let fleet = Fleet::start_with(AGENTS, &["--store", &server.url()], server.env());
    let spec = reference.write_spec(&fleet, fleet.path());
    let delay = Duration::from_millis(20);
    server.set_faults(Faults { seed: 3, refused: 0.15, cut: 0.15, flipped: 0.15, delay });
    let run = fleet.submit(&spec);
    wait_until("the run ends", LIMIT, || fleet.ended_run(&run));
    // An audit with a damaged listing of the store could not check anything.
    server.set_faults(Faults::default());
    reference.assert_same_results(&fleet, &run, LIMIT);
    let counts = server.fault_counts();
    println!("{counts:?}");
    assert!(counts.refused > 0 && counts.cut > 0 && counts.flipped > 0, "{counts:?}");
}
