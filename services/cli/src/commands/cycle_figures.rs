//! The results of cycles as tables.

use run_view::rate_text;
use wire::v1;

use crate::output;

pub(crate) fn perplexities_table(run: &v1::Run, width: Option<u16>) -> String {
    let rows = run.checkpoints.iter().filter_map(|info| info.checkpoint.as_ref()).map(|c| {
        let eval = run.evals.iter().find(|e| (e.cycle, e.step) == (c.cycle, c.step));
        let bits = eval.map_or("-".into(), |e| format!("{:.4}", e.bits_per_byte));
        let loss = if c.step == 0 { "-".into() } else { format!("{:.4}", c.loss) };
        let path = c.tree.as_ref().map_or(String::new(), |tree| tree.path.clone());
        [c.cycle.to_string(), c.step.to_string(), loss, perplexity_text(eval), bits, path]
    });
    let headings = [">cycle", ">step", ">loss", ">perplexity", ">~bits/byte", "~in the store"];
    output::fit_table(headings, rows, width)
}

fn perplexity_text(eval: Option<&v1::Eval>) -> String {
    eval.map_or("-".into(), |eval| format!("{:.4} ± {:.4}", eval.perplexity, eval.stderr))
}

pub(crate) fn cycles_table(run: &v1::Run, width: Option<u16>) -> String {
    let rows = run.cycles_done.iter().map(|done| {
        let last = run.evals.iter().filter(|eval| eval.cycle == done.cycle).max_by_key(|e| e.step);
        let agents: Vec<String> =
            done.samples_by_agent.iter().map(|(agent, n)| format!("{agent} {n}")).collect();
        let phases = [done.generate_s, done.verify_s, done.train_s, done.eval_s];
        // 0 if the cycle did not have the phase.
        let seconds = |s: f64| if s > 0.0 { format!("{s:.1}") } else { "-".into() };
        let [generate, verify, train, evaluate] = phases.map(seconds);
        [
            done.cycle.to_string(),
            rate_text(done.heldout.as_ref()),
            perplexity_text(last),
            match (done.kept, done.sampled) {
                (0, 0) => "-".into(),
                // A trial's samples are another run's.
                (kept, 0) => kept.to_string(),
                (kept, sampled) => format!("{kept}/{sampled}"),
            },
            generate,
            verify,
            train,
            evaluate,
            agents.join(", "),
        ]
    });
    let headings = [
        ">cycle",
        ">held-out pass rate",
        ">perplexity",
        ">kept",
        ">~generate s",
        ">~verify s",
        ">~train s",
        ">~eval s",
        "~samples by agent",
    ];
    output::fit_table(headings, rows, width)
}
