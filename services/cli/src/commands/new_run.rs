//! `flotilla run new`: the spec of a user's own RAFT run, from a few answers.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use control::{FleetControl, SpecFiles, SubmittedRun};
use doctor::{
    estimate::{PlannedTraining, TrainingMethod},
    format_gb,
};
use serde_json::json;
use spec::{DraftBase, RunDraft};
use spec_questions::RaftAnswers;
use wire::{Pool, v1};

use crate::{
    args::{GlobalArgs, NewRunArgs},
    local_models, output,
    run_submission::{submit_run, write_spec},
};

use super::{data, doctor::read_model_shape, run::finish_submission};

pub(crate) async fn start_new_run(
    flags: &GlobalArgs,
    args: NewRunArgs,
) -> anyhow::Result<ExitCode> {
    let control = flags.fleet.connect_control().await?;
    spec::check_run_name(&args.name)
        .map_err(|error| anyhow::anyhow!("--name {:?} {} (R115)", args.name, error.remedy))?;
    Pool::new(args.pool.as_str()).context("--pool")?;
    let file = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.yaml", args.name)));
    anyhow::ensure!(
        args.force || !file.try_exists()?,
        "{} exists; choose another name with --name or --out, or overwrite it with --force (A104)",
        file.display()
    );
    let draft = known_answers(&args).ask_draft(&file)?;
    // The memory is only worth knowing.
    if let Err(error) = report_memory(&control, &draft, &file).await {
        output::print_message(&format!("the memory that training needs is unknown: {error:#}"));
    }
    let shown = file.file_name().unwrap_or_default().to_string_lossy();
    let yaml = draft.to_yaml(&output::escape_line(&shown));
    let files = SpecFiles::Local(file.parent().unwrap_or(Path::new("")).to_owned());
    // A spec that is refused is not written, so that the same command can be tried again.
    let refused = || format!("{shown} was not written; lines are those that it would have");
    let report = control.check_spec(&yaml, &files).await.with_context(refused)?;
    data::report_lines(&report).iter().for_each(|line| output::print_message(line));
    write_spec(&file, &yaml)?;
    output::print_message(&format!("wrote {} and {}", file.display(), spec::SCHEMA_FILE));
    if args.check_only || !(args.yes || output::confirm_question("Submit it now?")?) {
        let next = format!("submit it: flotilla run submit {} (next time: --yes)", file.display());
        output::print_json_or(flags.json, &json!({ "spec": file }), || {
            output::print_message(&next);
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    let SubmittedRun { run, .. } = submit_run(&control, &file).await?;
    output::print_json_or(flags.json, &json!({ "run": run, "spec": file }), || {
        output::print_line(run.as_str());
    })?;
    finish_submission(&control, &run, args.watch).await
}

fn known_answers(args: &NewRunArgs) -> RaftAnswers {
    let model = args.model.clone().map(DraftBase::Model);
    RaftAnswers {
        name: args.name.clone(),
        pool: args.pool.clone(),
        cycles: args.cycles,
        base: args.checkpoint.clone().map(DraftBase::Checkpoint).or(model),
        prompts: args.prompts.clone(),
        verifier: args.verifier.clone(),
        may_ask: !args.yes && output::is_interactive_terminal(),
    }
}

/// Compares the memory of the training with what the trainers of the pool have for it.
async fn report_memory(
    control: &FleetControl,
    draft: &RunDraft,
    file: &Path,
) -> anyhow::Result<()> {
    let DraftBase::Model(model) = &draft.base else { return Ok(()) };
    let local = file.parent().unwrap_or(Path::new("")).join(model);
    let named = if local.is_dir() { &local } else { Path::new(model) };
    let config = local_models::find_model_config(named).await?;
    let training = PlannedTraining {
        method: TrainingMethod::Lora { rank: RunDraft::RANK },
        batch: 1,
        sequence: RunDraft::MAX_TOKENS,
        bytes_per_weight: 2,
        checkpointing: true,
        eager_attention: false,
        dropout: false,
        quantized: false,
    };
    let needed = read_model_shape(&config)?.estimate_training(&training).peak_bytes;
    output::print_message(&format!(
        "training needs at least {} of memory; `flotilla doctor --run SPEC` on a box says how much \
         it takes there",
        format_gb(needed)
    ));
    let agents = control.list_agents().await?;
    for agent in agents.iter().filter(|agent| is_trainer_of(agent, &draft.pool)) {
        let has = agent.training_bytes;
        let fits =
            if needed <= has { "enough" } else { "NOT enough; see `flotilla doctor estimate`" };
        output::print_message(&format!("  {} has {}: {fits}", agent.agent, format_gb(has)));
    }
    Ok(())
}

/// An agent that does not know its memory is not compared.
fn is_trainer_of(agent: &v1::AgentStatus, pool: &str) -> bool {
    agent.pool == pool
        && agent.roles.iter().any(|role| role == "trainer")
        && agent.training_bytes > 0
}
