//! A cluster of three nats-servers: one dies, then two, then one freezes.

use std::time::{Duration, Instant};

use e2e::{Cluster, ReferenceResults, Sampling};
use rustix::process::Signal;

const LIMIT: Duration = Duration::from_secs(240);

const SAMPLING: Sampling = Sampling { prompts: 384, per_prompt: 8, max_new_tokens: 480, cycles: 1 };

#[test]
fn a_cluster_that_loses_nodes_and_its_quorum_continues_when_they_are_back() {
    let reference = ReferenceResults::for_sampling(SAMPLING);
    let mut cluster =
        Cluster::start(&["trainer-1", "generator-1", "generator-2", "verifier-1", "evaluator-1"]);
    let run = cluster.client.submit(&reference.write_spec(&cluster.client, cluster.path()));
    let began = Instant::now();
    let await_more = |cluster: &Cluster, what: &str| {
        let requested = Instant::now();
        cluster.client.await_samples(&run, 16, LIMIT);
        println!("{what}: samples come in after {:.1} s", requested.elapsed().as_secs_f64());
    };
    await_more(&cluster, "calm");
    cluster.kill_server(0);
    await_more(&cluster, "one node dead");
    cluster.kill_server(1);
    std::thread::sleep(Duration::from_secs(5));
    cluster.restart_server(0);
    cluster.restart_server(1);
    cluster.restart_exited();
    await_more(&cluster, "quorum lost for 5 s");
    cluster.signal_server(2, Signal::STOP);
    std::thread::sleep(Duration::from_secs(4));
    cluster.signal_server(2, Signal::CONT);
    e2e::wait_until("the run ends", LIMIT, || {
        cluster.restart_exited();
        cluster.client.ended_run(&run)
    });
    reference.assert_same_results(&cluster.client, &run, LIMIT);
    println!("in all {:.1} s", began.elapsed().as_secs_f64());
}
