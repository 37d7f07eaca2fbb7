//! Three nats-servers: one dies, then two, then one freezes.

use std::time::{Duration, Instant};

use e2e::{Cluster, Sampling, Undisturbed};
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 512, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

#[test]
fn a_cluster_that_loses_nodes_and_its_quorum_goes_on_when_they_are_back() {
    let undisturbed = Undisturbed::of(SAMPLING);
    let mut cluster =
        Cluster::up(&["trainer-1", "generator-1", "generator-2", "verifier-1", "evaluator-1"]);
    let run = cluster.client.submit(&undisturbed.spec(&cluster.client, cluster.path()));
    let began = Instant::now();
    let samples = |cluster: &Cluster, what: &str| {
        let asked = Instant::now();
        cluster.client.await_samples(&run, 16, LIMIT);
        println!("{what}: samples come in after {:.1} s", asked.elapsed().as_secs_f64());
    };
    samples(&cluster, "calm");
    cluster.kill(0);
    samples(&cluster, "one node dead");
    cluster.kill(1);
    std::thread::sleep(Duration::from_secs(5));
    cluster.restart(0);
    cluster.restart(1);
    cluster.revive();
    samples(&cluster, "quorum lost for 5 s");
    cluster.signal(2, Signal::STOP);
    std::thread::sleep(Duration::from_secs(4));
    cluster.signal(2, Signal::CONT);
    e2e::until("the run ends", LIMIT, || {
        cluster.revive();
        cluster.client.outcome(&run)
    });
    undisturbed.assert_same(&cluster.client, &run, LIMIT);
    println!("in all {:.1} s", began.elapsed().as_secs_f64());
}
