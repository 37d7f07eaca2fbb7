//! `flotilla run samples`: the texts that a cycle drew, with their rewards and outcomes.

use control::FleetControl;
use run_view::{describe_sample, describe_samples_page};
use wire::{
    RunId,
    v1::{self, samples_page::Sample, samples_request::Which},
};

use crate::{args::SamplesArgs, output};

pub(super) async fn print_samples(
    control: &FleetControl,
    args: SamplesArgs,
    json: bool,
) -> anyhow::Result<()> {
    let run = RunId::new(args.run)?;
    let cycle = match args.cycle {
        Some(cycle) => cycle,
        None => newest_sampled_cycle(&control.get_run(&run).await?),
    };
    let which = if args.heldout || !args.suite.is_empty() {
        Which::HeldoutSamples
    } else {
        Which::TrainSamples
    };
    let request = v1::SamplesRequest {
        run: run.to_string(),
        cycle,
        which: which.into(),
        suite: args.suite,
        fate: args.outcome,
        text: args.text,
        offset: args.skip,
        limit: args.limit,
    };
    let page = control.get_samples_page(&run, &request).await?;
    output::print_json_or(json, &page, || print_page(&page, &request))
}

/// Returns the last cycle with judged or drawn samples, or else the active one.
fn newest_sampled_cycle(run: &cycle::Run) -> u32 {
    let has_samples = |cycle: &cycle::Cycle| cycle.jobs.values().any(|job| job.samples.is_some());
    let newest = run.cycles.iter().rev().find(|(_, cycle)| has_samples(cycle));
    newest.map_or(run.active_cycle(), |(number, _)| *number)
}

fn print_page(page: &v1::SamplesPage, request: &v1::SamplesRequest) {
    for prompt in &page.prompts {
        output::print_line(&format!("prompt {}", prompt.prompt_id));
        prompt.text.lines().for_each(|line| output::print_line(&format!("  {line}")));
        for sample in &prompt.samples {
            output::print_line(&format!("  {}", describe_sample(sample)));
            print_turns(sample);
        }
        output::print_line("");
    }
    output::print_message(&describe_samples_page(page, request));
}

/// Prints an episode turn by turn, with the environment's answers behind `>`.
fn print_turns(sample: &Sample) {
    let print = |text: &str, mark: &str| {
        text.lines().for_each(|line| output::print_line(&format!("    {mark}{line}")));
    };
    if sample.turns.is_empty() {
        print(&sample.text, "");
    }
    for turn in &sample.turns {
        print(&turn.text, "");
        print(&turn.observation, "> ");
    }
}
