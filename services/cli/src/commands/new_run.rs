//! `flotilla run new`: the spec of a user's own RAFT run, from a few answers.

use std::{
    fs,
    io::BufRead,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use control::{FleetControl, SpecFiles, SubmittedRun};
use doctor::estimate::{PlannedTraining, TrainingMethod};
use serde_json::json;
use spec::{DraftBase, RunDraft, VerifierSpec};
use wire::{Pool, PromptEntry, v1};

use crate::{
    args::{GlobalArgs, NewRunArgs},
    local_models, output,
    run_submission::submit_run,
};

use super::{
    data,
    doctor::{format_gb, read_model_shape},
    run::{follow_run, report_missing_roles},
};

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
    let draft = ask_draft(&args, &file)?;
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
    fs::write(&file, yaml).with_context(|| format!("write {} (A104)", file.display()))?;
    output::print_message(&format!("wrote {}", file.display()));
    if args.check_only || !(args.yes || confirm("Submit it now?")?) {
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
    report_missing_roles(&control, &run).await?;
    if args.watch {
        return follow_run(&control, &run, 0).await;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks for what the arguments lack.
fn ask_draft(args: &NewRunArgs, file: &Path) -> anyhow::Result<RunDraft> {
    let base = match (&args.checkpoint, &args.model) {
        (Some(checkpoint), _) => DraftBase::Checkpoint(checkpoint.clone()),
        (None, Some(model)) => DraftBase::Model(model.clone()),
        (None, None) => DraftBase::Model(ask(
            args,
            ("Model (a directory, or org/name)", None, "pass --model or --checkpoint"),
            check_model,
        )?),
    };
    let prompts: PathBuf = match &args.prompts {
        Some(prompts) => prompts.clone(),
        None => {
            let question = ("File of prompts (JSON lines)", None, "pass --prompts");
            ask(args, question, |file| read_prompts(Path::new(file)).map(drop))?.into()
        }
    };
    let entries = read_prompts(&prompts)?;
    let verifier = match &args.verifier {
        Some(verifier) => verifier.clone(),
        None => {
            let question = format!("Verifier ({})", VerifierSpec::NAMES.join(", "));
            let suggested = RunDraft::suggest_verifier(&entries);
            ask(args, (&question, suggested, &verifier_remedy(&prompts)), check_verifier)?
        }
    };
    check_verifier(&verifier)?;
    let heldout = RunDraft::count_heldout(entries.len());
    if heldout.is_none() {
        output::print_message(&format!(
            "no pass rate will be measured: of {} prompts none are held out; with {} there would \
             be, or set raft.heldout in the spec",
            entries.len(),
            RunDraft::HELDOUT_FROM
        ));
    }
    let is_chat = matches!(&base, DraftBase::Model(model) if has_chat_template(model));
    let base = match base {
        DraftBase::Model(model) if Path::new(&model).is_dir() => {
            DraftBase::Model(seen_from(file, Path::new(&model)))
        }
        other => other,
    };
    Ok(RunDraft {
        name: args.name.clone(),
        pool: args.pool.clone(),
        base,
        prompts: seen_from(file, &prompts),
        verifier,
        heldout,
        is_chat,
        cycles: args.cycles,
    })
}

/// Returns the remedy for prompts that suggest no verifier.
fn verifier_remedy(prompts: &Path) -> String {
    format!(
        "not every prompt of {} has `answer`, so no verifier can be chosen; pass --verifier NAME \
         (one of {})",
        prompts.display(),
        VerifierSpec::NAMES.join(", ")
    )
}

fn read_prompts(file: &Path) -> anyhow::Result<Vec<PromptEntry>> {
    PromptEntry::parse_all(&control::read_named_file(file)?)
        .with_context(|| file.display().to_string())
}

fn check_model(model: &str) -> anyhow::Result<()> {
    if !Path::new(model).exists() && model.parse::<hub::ModelId>().is_err() {
        bail!("{model}: neither a file or directory here nor a name such as org/name (A104)");
    }
    Ok(())
}

/// Checks that it is a built-in verifier or the YAML of one.
fn check_verifier(given: &str) -> anyhow::Result<()> {
    if !given.contains([':', '{']) && !VerifierSpec::NAMES.contains(&given) {
        let similar = spec::find_similar(given, VerifierSpec::NAMES.iter().copied());
        let similar = similar.map_or(String::new(), |name| format!(", did you mean {name}?"));
        bail!(
            "{given}: no such verifier{similar}; the built-in ones are {} (V103)",
            VerifierSpec::NAMES.join(", ")
        );
    }
    let parsed: VerifierSpec = spec::parse_yaml(&RunDraft::verifier_section(given))?;
    parsed.to_checked_proto("verifier").map(drop).map_err(Into::into)
}

/// Returns the answer to a question, its default if the answer is empty or questions are not
/// wanted, and asks again after an answer that `check` refuses.
fn ask(
    args: &NewRunArgs,
    (question, default, remedy): (&str, Option<&str>, &str),
    check: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    if args.yes || !output::is_interactive_terminal() {
        return default.map(str::to_owned).with_context(|| format!("{remedy} (A102)"));
    }
    let shown = default.map_or(String::new(), |default| format!(" [{default}]"));
    for _ in 0..ANSWERS_MAX {
        let answer = match (read_answer(&format!("{question}{shown}: "))?, default) {
            (Some(answer), _) if !answer.is_empty() => answer,
            (Some(_), Some(default)) => return Ok(default.to_owned()),
            _ => break,
        };
        match check(&answer) {
            Ok(()) => return Ok(answer),
            Err(error) => output::print_message(&format!("{error:#}")),
        }
    }
    bail!("no answer: {remedy} (A102)")
}

/// The answers to a question before it is given up.
const ANSWERS_MAX: usize = 5;

/// Without a terminal, nothing is confirmed.
fn confirm(question: &str) -> anyhow::Result<bool> {
    if !output::is_interactive_terminal() {
        return Ok(false);
    }
    for _ in 0..ANSWERS_MAX {
        let answer = read_answer(&format!("{question} [Y/n] "))?;
        match answer.map(|answer| answer.to_lowercase()).as_deref() {
            Some("" | "y" | "yes") => return Ok(true),
            None | Some("n" | "no") => return Ok(false),
            Some(_) => output::print_message("answer y or n"),
        }
    }
    Ok(false)
}

/// Returns `None` at the end of the input.
fn read_answer(question: &str) -> anyhow::Result<Option<String>> {
    output::print_question(question);
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).context("read the answer")?;
    Ok((read > 0).then(|| line.trim().to_owned()))
}

/// A hub model that is not on this machine is judged by its name.
fn has_chat_template(model: &str) -> bool {
    let Ok(directory) = local_models::find_local_model(Path::new(model)) else {
        let name = model.to_lowercase();
        return ["instruct", "chat"].iter().any(|word| name.contains(word))
            || name.ends_with("-it");
    };
    let settings = fs::read_to_string(directory.join("tokenizer_config.json")).unwrap_or_default();
    directory.join("chat_template.jinja").is_file() || settings.contains("\"chat_template\"")
}

/// Returns a path relative to the directory of `file` if it is below it, else an absolute path.
fn seen_from(file: &Path, path: &Path) -> String {
    let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let (directory, path) = (absolute(parent.unwrap_or(Path::new("."))), absolute(path));
    path.strip_prefix(&directory).unwrap_or(&path).display().to_string()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_checked_before_a_spec_is_written() {
        let refused = |given: &str| format!("{:#}", check_verifier(given).unwrap_err());
        assert!(refused("numerc").contains("did you mean numeric?"));
        assert!(refused("exact: { extrac: a }").contains("extrac"));
        assert!(check_verifier("exact: { extract: '(a)' }").is_ok());
        assert!(check_model("zzz").unwrap_err().to_string().contains("org/name"));
        assert!(check_model("org/name").is_ok());
        let remedy = verifier_remedy(Path::new("sft.jsonl"));
        assert!(remedy.starts_with("not every prompt of sft.jsonl has `answer`"), "{remedy}");
        assert!(remedy.contains("pass --verifier NAME (one of exact, "), "{remedy}");
        let missing = format!("{:#}", read_prompts(Path::new("/no/prompts.jsonl")).unwrap_err());
        assert!(missing.contains("/no/prompts.jsonl"), "{missing}");
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("prompts.jsonl"), "{}").unwrap();
        let wrong = directory.path().join("prompt.jsonl");
        let missing = format!("{:#}", read_prompts(&wrong).unwrap_err());
        assert!(missing.contains("did you mean prompts.jsonl? (F101)"), "{missing}");
    }

    #[test]
    fn files_beside_the_spec_are_named_as_seen_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let prompts = directory.path().join("p.jsonl");
        fs::write(&prompts, "{}").unwrap();
        assert_eq!(seen_from(&directory.path().join("mine.yaml"), &prompts), "p.jsonl");
        let elsewhere = seen_from(Path::new("/mine.yaml"), Path::new("/proc/version"));
        assert_eq!(elsewhere, "proc/version");
    }
}
