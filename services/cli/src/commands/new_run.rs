//! `flotilla run new`: the spec of a user's own RAFT run, from a few answers.

use std::{
    fs,
    io::{BufRead, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use control::{FleetControl, SpecFiles, SubmittedRun};
use doctor::estimate::{PlannedTraining, TrainingMethod};
use serde_json::json;
use spec::VerifierSpec;
use wire::{Pool, PromptEntry, RunId, v1};

use crate::{
    args::{GlobalArgs, NewRunArgs},
    local_models, output,
    run_submission::{read_spec, submit_run},
};

use super::{
    data,
    doctor::{format_gb, read_model_shape},
    run::{follow_run, report_missing_roles},
};

/// The fewest prompts that tell a pass rate.
const HELDOUT_PROMPTS_MIN: usize = 20;
/// With less than this many times as many prompts, none are held out.
const TRAINED_PER_HELDOUT_MIN: usize = 3;
/// Of the LoRA adapter.
const RANK: u64 = 16;
const TRAINED_TOKENS: u64 = 1024;

pub(crate) async fn start_new_run(
    flags: &GlobalArgs,
    args: NewRunArgs,
) -> anyhow::Result<ExitCode> {
    let control = flags.fleet.connect_control().await?;
    RunId::new(args.name.as_str()).context("--name")?;
    Pool::new(args.pool.as_str()).context("--pool")?;
    let plan = ask_plan(&args)?;
    // The memory is only worth knowing.
    if let Err(error) = report_memory(&control, &plan).await {
        output::print_message(&format!("the memory that training needs is unknown: {error:#}"));
    }
    let file = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.yaml", args.name)));
    write_new_file(&file, &plan.to_yaml(&file))?;
    output::print_message(&format!("wrote {}", file.display()));
    let (yaml, files): (String, SpecFiles) = read_spec(&file).await?;
    let checked = control.check_spec(&yaml, &files).await;
    let report = checked.with_context(|| {
        format!("check {}; correct it and submit it with `flotilla run submit`", file.display())
    })?;
    data::report_lines(&report).iter().for_each(|line| output::print_message(line));
    let submits = !args.check_only && (args.yes || confirm("Submit it now?")?);
    if !submits {
        let next = format!("submit it with: flotilla run submit {}", file.display());
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

/// The settings of a new run: its base, its prompts, and how samples are judged.
#[derive(Debug, Clone, PartialEq)]
struct NewRunPlan {
    name: String,
    pool: String,
    base: NewRunBase,
    /// Absolute, or as the user wrote it.
    prompts: PathBuf,
    /// YAML of the section.
    verifier: String,
    /// The prompts that are held out.
    heldout: Option<usize>,
    /// The model has a chat template.
    is_chat: bool,
    cycles: u32,
}

#[derive(Debug, Clone, PartialEq)]
enum NewRunBase {
    /// A directory, or a hub model.
    Model(String),
    Checkpoint(String),
}

/// Asks for what the arguments lack.
fn ask_plan(args: &NewRunArgs) -> anyhow::Result<NewRunPlan> {
    let base = match (&args.checkpoint, &args.model) {
        (Some(checkpoint), _) => NewRunBase::Checkpoint(checkpoint.clone()),
        (None, Some(model)) => NewRunBase::Model(model.clone()),
        (None, None) => NewRunBase::Model(ask(
            args,
            ("Model (a directory, or org/name)", None, "--model or --checkpoint"),
            check_model,
        )?),
    };
    let prompts: PathBuf = match &args.prompts {
        Some(prompts) => prompts.clone(),
        None => {
            let question = ("File of prompts (JSON lines)", None, "--prompts");
            ask(args, question, |file| read_prompts(Path::new(file)).map(drop))?.into()
        }
    };
    let entries = read_prompts(&prompts)?;
    let verifier = match &args.verifier {
        Some(verifier) => verifier.clone(),
        None => {
            let question = format!("Verifier ({})", VerifierSpec::NAMES.join(", "));
            let question = (&*question, suggest_verifier(&entries), "--verifier");
            ask(args, question, check_verifier)?
        }
    };
    check_verifier(&verifier)?;
    let is_chat = matches!(&base, NewRunBase::Model(model) if has_chat_template(model));
    Ok(NewRunPlan {
        name: args.name.clone(),
        pool: args.pool.clone(),
        base,
        prompts,
        verifier: verifier_section(&verifier),
        heldout: count_heldout(entries.len()),
        is_chat,
        cycles: args.cycles,
    })
}

/// Returns a tenth of the prompts, but enough to tell a pass rate. `None` if few would be left.
fn count_heldout(prompts: usize) -> Option<usize> {
    let count = HELDOUT_PROMPTS_MIN.max(prompts / 10);
    (prompts >= (1 + TRAINED_PER_HELDOUT_MIN) * count).then_some(count)
}

fn read_prompts(file: &Path) -> anyhow::Result<Vec<PromptEntry>> {
    let bytes = fs::read(file).with_context(|| format!("read {} (A104)", file.display()))?;
    PromptEntry::parse_all(&bytes).with_context(|| file.display().to_string())
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
    let parsed: VerifierSpec = spec::parse_yaml(&verifier_section(given))?;
    parsed.to_checked_proto("verifier").map(drop).map_err(Into::into)
}

/// Returns the answer to a question, its default if the answer is empty or questions are not
/// wanted, and asks again after an answer that `check` refuses.
fn ask(
    args: &NewRunArgs,
    (question, default, option): (&str, Option<&str>, &str),
    check: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    if args.yes || !output::is_interactive_terminal() {
        return default.map(str::to_owned).with_context(|| format!("pass {option} (A102)"));
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
    bail!("no answer; pass {option} (A102)")
}

/// The answers to a question before it is given up.
const ANSWERS_MAX: usize = 5;

/// Without a terminal, nothing is confirmed.
fn confirm(question: &str) -> anyhow::Result<bool> {
    if !output::is_interactive_terminal() {
        return Ok(false);
    }
    let answer = read_answer(&format!("{question} [Y/n] "))?;
    let answer = answer.map(|answer| answer.to_lowercase());
    Ok(matches!(answer.as_deref(), Some("" | "y" | "yes")))
}

/// Returns `None` at the end of the input.
fn read_answer(question: &str) -> anyhow::Result<Option<String>> {
    output::print_question(question);
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).context("read the answer")?;
    Ok((read > 0).then(|| line.trim().to_owned()))
}

/// Suggests a verifier by the fields of the prompts.
fn suggest_verifier(prompts: &[PromptEntry]) -> Option<&'static str> {
    let has = |field: &str| prompts.iter().any(|prompt| prompt.fields.contains_key(field));
    let answers = || prompts.iter().map(|prompt| prompt.answer.as_deref());
    let is_number = |answer: &str| answer.trim().replace(',', "").parse::<f64>().is_ok();
    if has("schema") {
        Some("json_schema")
    } else if ["test", "tests", "test_list"].into_iter().any(has) {
        Some("python")
    } else if has("cases") {
        Some("stdio")
    } else if answers().all(|answer| answer.is_some_and(is_number)) {
        Some("numeric")
    } else if answers().all(|answer| answer.is_some()) {
        Some("exact")
    } else {
        None
    }
}

/// Returns the section of a verifier that was given by its name or as YAML.
fn verifier_section(given: &str) -> String {
    // One line, so that it stays within its section.
    let given = given.trim().replace(['\n', '\r'], " ");
    let given = given.as_str();
    match given {
        name if VerifierSpec::NAMES.contains(&name) => format!("{{ {name}: {{}} }}"),
        yaml if yaml.starts_with('{') => yaml.to_owned(),
        yaml => format!("{{ {yaml} }}"),
    }
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

impl NewRunPlan {
    /// Returns the spec, with a comment for what users change most. Paths are as seen from `file`.
    fn to_yaml(&self, file: &Path) -> String {
        let Self { verifier, cycles, .. } = self;
        let quoted = |text: &str| json!(text).to_string();
        let (name, pool) = (quoted(&self.name), quoted(&self.pool));
        let base = match &self.base {
            NewRunBase::Checkpoint(checkpoint) => {
                format!("{{ checkpoint: {} }}", quoted(checkpoint))
            }
            NewRunBase::Model(model) => {
                let path = Path::new(model);
                let model = if path.is_dir() { seen_from(file, path) } else { model.clone() };
                format!("{{ model: {} }}", quoted(&model))
            }
        };
        let prompts = quoted(&seen_from(file, &self.prompts));
        let heldout = match self.heldout {
            Some(count) => format!(
                "  heldout: {{ count: {count} }}         # measured after each cycle, never trained on\n"
            ),
            None => {
                "  # heldout: { count: 20 }       # prompts to measure by; there are too few now\n"
                    .to_owned()
            }
        };
        let chat = if self.is_chat {
            "  chat: true                     # prompts become messages of a user\n"
        } else {
            "  # chat: true                   # for a model with a chat template\n"
        };
        let shown = output::escape_line(&file.file_name().unwrap_or_default().to_string_lossy());
        format!(
            "\
# Reward-ranked fine-tuning: sample, keep what the verifier passes, train on it, again.
# Check it with `flotilla run check {shown}`, start it with `flotilla run submit {shown}`.
name: {name}
seed: 1
pool: {pool}
base: {base}
raft:
  prompts: {prompts}
{heldout}{chat}  cycles: {cycles}
  samples_per_prompt: 8          # more for hard prompts
  sampling: {{ temperature: 0.8, max_new_tokens: 512 }}
  verifier: {verifier}
  selection: {{ keep_per_prompt: 1, min_reward: 1.0 }}
  training: {{ epochs: 1, batch_size: 16, learning_rate: 0.0001, max_tokens: {TRAINED_TOKENS} }}
  lora: {{ r: {RANK}, alpha: {} }}
",
            2 * RANK
        )
    }
}

/// Returns a path relative to the directory of `file` if it is below it, else an absolute path.
fn seen_from(file: &Path, path: &Path) -> String {
    let absolute = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let (directory, path) = (absolute(parent.unwrap_or(Path::new("."))), absolute(path));
    path.strip_prefix(&directory).unwrap_or(&path).display().to_string()
}

fn write_new_file(file: &Path, text: &str) -> anyhow::Result<()> {
    let created = fs::File::create_new(file).and_then(|mut new| new.write_all(text.as_bytes()));
    created.with_context(|| {
        format!("write {}; choose another name with --name or --out (A104)", file.display())
    })
}

/// Compares the memory of the training with what the trainers of the pool have for it.
async fn report_memory(control: &FleetControl, plan: &NewRunPlan) -> anyhow::Result<()> {
    let NewRunBase::Model(model) = &plan.base else { return Ok(()) };
    let config = local_models::find_model_config(Path::new(model)).await?;
    let training = PlannedTraining {
        method: TrainingMethod::Lora { rank: RANK },
        batch: 1,
        sequence: TRAINED_TOKENS,
        bytes_per_weight: 2,
        checkpointing: true,
        eager_attention: false,
        dropout: false,
    };
    let needed = read_model_shape(&config)?.estimate_training(&training).peak_bytes;
    output::print_message(&format!("training needs at least {} of memory", format_gb(needed)));
    let agents = control.list_agents().await?;
    for agent in agents.iter().filter(|agent| is_trainer_of(agent, &plan.pool)) {
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
    use spec::RunSpec;

    use super::*;

    fn prompts(lines: &str) -> Vec<PromptEntry> {
        PromptEntry::parse_all(lines.as_bytes()).unwrap()
    }

    #[test]
    fn a_verifier_is_suggested_by_the_fields_of_the_prompts() {
        for (lines, expected) in [
            (
                "{\"prompt\": \"2+2\", \"answer\": 4}\n{\"prompt\": \"x\", \"answer\": \"1,000\"}",
                Some("numeric"),
            ),
            ("{\"prompt\": \"a\", \"answer\": \"yes\"}", Some("exact")),
            ("{\"prompt\": \"a\", \"schema\": {}}", Some("json_schema")),
            ("{\"prompt\": \"a\", \"test_list\": []}", Some("python")),
            ("{\"prompt\": \"a\"}", None),
        ] {
            assert_eq!(suggest_verifier(&prompts(lines)), expected, "{lines}");
        }
    }

    #[test]
    fn enough_prompts_are_held_out_to_tell_a_pass_rate() {
        assert_eq!([79, 80, 1000].map(count_heldout), [None, Some(20), Some(100)]);
    }

    #[test]
    fn answers_are_checked_before_a_spec_is_written() {
        let refused = |given: &str| format!("{:#}", check_verifier(given).unwrap_err());
        assert!(refused("numerc").contains("did you mean numeric?"));
        assert!(refused("exact: { extrac: a }").contains("extrac"));
        assert!(check_verifier("exact: { extract: '(a)' }").is_ok());
        assert!(check_model("zzz").unwrap_err().to_string().contains("org/name"));
        assert!(check_model("org/name").is_ok());
        let missing = format!("{:#}", read_prompts(Path::new("/no/prompts.jsonl")).unwrap_err());
        assert!(missing.contains("/no/prompts.jsonl"), "{missing}");
    }

    #[test]
    fn the_spec_of_a_plan_is_valid() {
        let directory = tempfile::tempdir().unwrap();
        let (file, prompts) =
            (directory.path().join("mine.yaml"), directory.path().join("p.jsonl"));
        fs::write(&prompts, "{}").unwrap();
        let plan = NewRunPlan {
            name: "mine".into(),
            pool: "default".into(),
            base: NewRunBase::Model("org/a model: 7B".into()),
            prompts,
            verifier: verifier_section("numeric"),
            heldout: count_heldout(100),
            is_chat: true,
            cycles: 3,
        };
        let text = plan.to_yaml(&file);
        assert!(text.contains("prompts: \"p.jsonl\""), "{text}");
        let spec = RunSpec::parse(&text).unwrap();
        let raft = spec.raft.unwrap();
        assert_eq!(spec.base.model.as_deref(), Some("org/a model: 7B"));
        assert!(raft.heldout.is_some() && raft.chat.wraps_texts() && raft.cycles == 3);
        let other = NewRunPlan {
            base: NewRunBase::Checkpoint("base-1".into()),
            verifier: verifier_section("exact: { extract: '#(\\d+)$' }"),
            heldout: count_heldout(79),
            is_chat: false,
            ..plan
        };
        let spec = RunSpec::parse(&other.to_yaml(&file)).unwrap();
        assert!(spec.raft.unwrap().heldout.is_none());
    }
}
