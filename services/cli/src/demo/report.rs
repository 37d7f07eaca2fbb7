//! The demo's report: tables, or one JSON document.

use std::{path::Path, time::Instant};

use control::{FleetControl, run_to_proto};
use serde_json::{Value, json};
use wire::{RunId, v1};

use super::feedback_loop::LoopReport;
use crate::{
    commands::{cycles_table, perplexities_table},
    fleet::FleetFile,
    output,
};

pub(super) struct DemoReport {
    pub runs: [RunId; 2],
    pub json: Value,
    pub tables: String,
}

pub(super) async fn gather_report(
    control: &FleetControl,
    runs: &[RunId; 2],
    seed: u64,
    began: Instant,
) -> anyhow::Result<DemoReport> {
    let base = run_to_proto(&control.get_run(&runs[0]).await?);
    let raft = run_to_proto(&control.get_run(&runs[1]).await?);
    let wall_s = began.elapsed().as_secs_f64();
    let json = json!({
        "seed": seed,
        "wall_s": wall_s,
        "runs": runs,
        "checkpoints": base.evals.iter().chain(&raft.evals).map(eval_json).collect::<Vec<_>>(),
        "cycles": raft.cycles_done.iter().map(|done| cycle_json(&raft, done)).collect::<Vec<_>>(),
    });
    let tables = format!(
        "\n{}: held-out perplexity of the base during training\n{}\n\n{}: reward-ranked fine-tuning\n{}\n\n{wall_s:.0} s in total",
        runs[0],
        perplexities_table(&base, output::stdout_width()),
        runs[1],
        cycles_table(&raft, output::stdout_width())
    );
    Ok(DemoReport { runs: runs.clone(), json, tables })
}

pub(super) async fn gather_loop_report(
    control: &FleetControl,
    base: RunId,
    done: &LoopReport,
    seed: u64,
    began: Instant,
) -> anyhow::Result<DemoReport> {
    let learned = run_to_proto(&control.get_run(&done.run).await?);
    let wall_s = began.elapsed().as_secs_f64();
    let [before, after] = [done.before, done.after].map(|share| 100.0 * share);
    let last = done.moves.last().and_then(|it| it.r#move.as_ref());
    let evidence = last.and_then(|it| it.evidence.as_ref());
    let cycles: Vec<Value> =
        learned.cycles_done.iter().map(|cycle| cycle_json(&learned, cycle)).collect();
    let json = json!({
        "seed": seed, "wall_s": wall_s, "runs": [base, done.run], "right_before": done.before,
        "right_after": done.after, "cycles": cycles, "evidence": evidence,
    });
    let compared = evidence.map_or_else(String::new, |it| {
        let points = 100.0 * it.difference;
        format!(" ({points:+.1} points on {} held-out prompts, p = {:.1e})", it.pairs, it.p)
    });
    let tables = format!(
        "\n{}: learned from the feedback of its users\n{}\n\nthe channel moved from {base} to \
         {}{compared}\nright answers to new questions: {before:.0} % before, {after:.0} % after\n\n\
         {wall_s:.0} s in total",
        done.run,
        cycles_table(&learned, output::stdout_width()),
        done.run,
    );
    Ok(DemoReport { runs: [base, done.run.clone()], json, tables })
}

fn eval_json(eval: &v1::Eval) -> Value {
    json!({
        "run": eval.run,
        "cycle": eval.cycle,
        "step": eval.step,
        "perplexity": eval.perplexity,
        "stderr": eval.stderr,
        "bits_per_byte": eval.bits_per_byte,
    })
}

fn cycle_json(raft: &v1::Run, done: &v1::CycleDone) -> Value {
    let last = raft.evals.iter().filter(|eval| eval.cycle == done.cycle).max_by_key(|e| e.step);
    let rate = done.heldout.unwrap_or_default();
    json!({
        "cycle": done.cycle,
        "heldout_pass_rate": rate.mean,
        "heldout_stderr": rate.stderr,
        "heldout_perplexity": last.map(|eval| eval.perplexity),
        "sampled": done.sampled,
        "kept": done.kept,
        "generate_s": done.generate_s,
        "verify_s": done.verify_s,
        "train_s": done.train_s,
        "eval_s": done.eval_s,
        "samples_by_agent": done.samples_by_agent,
    })
}

pub(super) fn next_steps(path: &Path, runs: &[RunId; 2], up: bool, kept: bool) -> String {
    let directory = path.display();
    let raft = &runs[1];
    if !kept {
        return "the fleet is down and its files are gone; look further with \
                `flotilla demo --keep --dir demo-fleet`"
            .to_owned();
    }
    if !up {
        return format!(
            "the fleet is down; its files are in {directory}. Start it again with\n  \
             flotilla up --dir {directory}"
        );
    }
    let file = FleetFile::read(path).ok().flatten();
    let closed = file.as_ref().is_some_and(|file| file.identity.is_some());
    let page = file.as_ref().map_or_else(String::new, |file| file.describe_page(path));
    let (nats, gateway) = file.map_or_else(Default::default, |file| (file.nats, file.gateway));
    let (nats_as, grpc_as) = if closed {
        let keys = "$FLOTILLA_DIR/keys";
        (
            format!("--tlsca {keys}/ca.pem --creds {keys}/admin/nats.creds"),
            format!(
                "-cacert {keys}/ca.pem -H \"authorization: Bearer $(cat {keys}/admin/bearer.jwt)\""
            ),
        )
    } else {
        (String::new(), "-plaintext".to_owned())
    };
    format!(
        "\
the fleet is running; its web page is {page}. Next:
  export FLOTILLA_DIR={directory}
  flotilla open
  flotilla status
  flotilla watch
  flotilla run show {raft}
  flotilla eval history {raft}
  flotilla checkpoint list {raft}
  flotilla audit {raft}
  flotilla agents list
  nats -s {nats} {nats_as} stream view FLOTILLA
  nats -s {nats} {nats_as} sub 'flotilla.*.eval.>'
  grpcurl {grpc_as} {gateway} list
  grpcurl {grpc_as} -d '{{\"run\": \"{raft}\"}}' {gateway} flotilla.v1.Runs/Get
  flotilla down"
    )
}
