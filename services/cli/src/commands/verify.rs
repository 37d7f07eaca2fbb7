//! `flotilla verify`: verdicts on completions in a file, without a fleet.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use spec::VerifierSpec;
use verifier::{OfflineVerifier, OwnerGrants, TimedVerdict, Toolchain, VerifierTools, VerifyItem};
use wire::{
    PromptEntry,
    v1::{self, verdicts::Outcome},
};

use crate::{
    args::{VerifierToolArgs, VerifyArgs},
    output,
    this_machine::{cpu_cores, this_program},
};

const BATCH_SIZE: usize = 1024;

const LINE_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug, Deserialize)]
struct CompletionLine {
    prompt_id: String,
    completion: String,
    #[serde(default)]
    index: u32,
}

#[derive(Debug, Default)]
struct VerdictTally {
    pass: usize,
    fail: usize,
    error: usize,
    reward: f64,
}

pub(crate) fn verify_completions(args: &VerifyArgs, json: bool) -> anyhow::Result<ExitCode> {
    let settings = parse_verifier(&args.verifier)?;
    let prompts = read_prompts(&args.prompts)?;
    let mut lines = open_completions(&args.completions)?;
    let jobs = args.jobs.map_or_else(cpu_cores, |jobs| jobs as usize);
    let once = OfflineVerifier::new(settings, find_toolchain(&args.tools, Vec::new())?, jobs)
        .context("--verifier")?;
    let began = std::time::Instant::now();
    let (mut tally, mut number) = (VerdictTally::default(), 0);
    loop {
        let items = read_batch(&mut lines, &prompts, &mut number)
            .with_context(|| args.completions.display().to_string())?;
        if items.is_empty() {
            break;
        }
        if let [first, ..] = &*once.missing_needs(&items) {
            bail!("this box lacks {first} (E117)");
        }
        for judged in once.judge_items(&items) {
            tally.add_verdict(&judged.verdict);
            print_verdict(&judged, json)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    output::print_message(&format!("{}, in {seconds:.1} s", tally.summary_text()));
    Ok(if tally.error > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Programs cannot see the `hidden` paths.
pub(crate) fn find_toolchain(
    args: &VerifierToolArgs,
    hidden: Vec<PathBuf>,
) -> anyhow::Result<Toolchain> {
    if let Some(python) = &args.verifier_python
        && !python.is_file()
    {
        bail!("--verifier-python {}: no such file (A104)", python.display());
    }
    let hidden = sandbox::find_outermost(hidden);
    let grants = OwnerGrants::from_flags(&args.verifier_path, &args.allow_command, &hidden)?;
    let tools = VerifierTools::detect_tools(args.verifier_python.as_deref());
    Ok(Toolchain {
        tools,
        cell_launch: worker_launch("cell")?,
        masked_launch: worker_launch("masked")?,
        hidden,
        grants,
        contains: true,
    })
}

pub(crate) fn worker_launch(worker: &str) -> anyhow::Result<sandbox::CellLaunch> {
    let program = this_program()?;
    Ok(sandbox::CellLaunch { program, arguments: ["worker", worker].map(Into::into).to_vec() })
}

fn parse_verifier(text: &str) -> anyhow::Result<v1::Verifier> {
    let yaml = if VerifierSpec::NAMES.contains(&text) {
        format!("{text}: {{}}")
    } else if text.contains([':', '{']) {
        text.to_owned()
    } else if Path::new(text).is_file() {
        std::fs::read_to_string(text).with_context(|| format!("--verifier {text}"))?
    } else {
        let names = VerifierSpec::NAMES.join(", ");
        bail!("--verifier {text}: neither a file nor a built-in verifier ({names}) (V103)");
    };
    let spec: VerifierSpec = spec::parse_yaml(&yaml)
        .context("--verifier cannot be read; docs/VERIFIERS.md has examples (V103)")?;
    Ok(spec.to_checked_proto("verifier")?)
}

fn read_prompts(path: &Path) -> anyhow::Result<BTreeMap<String, PromptEntry>> {
    let at = || format!("--prompts {}", path.display());
    let text = control::read_named_file(path).with_context(at)?;
    let prompts = PromptEntry::parse_all(&text).with_context(at)?;
    Ok(prompts.into_iter().map(|prompt| (prompt.id.clone(), prompt)).collect())
}

fn open_completions(path: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock()));
    }
    let at = || format!("--completions {}", path.display());
    control::require_named_file(path).with_context(at)?;
    Ok(Box::new(BufReader::new(File::open(path).with_context(at)?)))
}

/// Empty at the end. `number` is the line number, for errors.
fn read_batch(
    lines: &mut dyn BufRead,
    prompts: &BTreeMap<String, PromptEntry>,
    number: &mut usize,
) -> anyhow::Result<Vec<VerifyItem>> {
    let mut items = Vec::new();
    let mut text = Vec::new();
    while items.len() < BATCH_SIZE {
        text.clear();
        *number += 1;
        if (&mut *lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut text)? == 0 {
            break;
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let line: CompletionLine = serde_json::from_slice(&text).with_context(|| {
            format!("line {number}: expected an object such as {{\"prompt_id\": \"p1\", \"completion\": \"4\"}} (D101)")
        })?;
        let prompt = prompts.get(&line.prompt_id).with_context(|| {
            format!("line {number}: no prompt has the id {:?} (D101)", line.prompt_id)
        })?;
        items.push(VerifyItem::from_prompt(prompt, line.index, line.completion));
    }
    Ok(items)
}

fn print_verdict(TimedVerdict { verdict, took }: &TimedVerdict, json: bool) -> anyhow::Result<()> {
    let (status, ms) = (outcome_word(verdict.outcome()), took.as_secs_f64() * 1e3);
    let v1::verdicts::Verdict { prompt_id, index, reward, detail, .. } = verdict;
    if json {
        return output::print_json(&json!({
            "prompt_id": prompt_id,
            "index": index,
            "reward": reward,
            "status": status,
            "detail": detail,
            "ms": Value::from((ms * 1e3).round() / 1e3),
        }));
    }
    let detail = if detail.is_empty() { String::new() } else { format!("  {detail}") };
    output::print_line(&format!("{status:<5} {reward:>5.2} {ms:>8.1} ms  {prompt_id}{detail}"));
    Ok(())
}

fn outcome_word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "fail",
        Outcome::Error | Outcome::Unspecified => "error",
    }
}

impl VerdictTally {
    fn add_verdict(&mut self, verdict: &v1::verdicts::Verdict) {
        match verdict.outcome() {
            Outcome::Pass => self.pass += 1,
            Outcome::Fail => self.fail += 1,
            Outcome::Error | Outcome::Unspecified => self.error += 1,
        }
        self.reward += verdict.reward;
    }

    /// Errors have no reward and are excluded from the mean.
    fn summary_text(&self) -> String {
        let Self { pass, fail, error, reward } = self;
        let judged = pass + fail;
        let mean = reward / (judged.max(1) as f64);
        format!("{pass} pass, {fail} fail, {error} error; mean reward {mean:.3} of {judged}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verifier_is_a_name_or_settings_and_mistakes_say_what_is_possible() {
        assert!(parse_verifier("python").is_ok());
        assert_eq!(
            parse_verifier("numeric: {tolerance: 0.5}").unwrap(),
            parse_verifier("{numeric: {tolerance: 0.5}}").unwrap()
        );
        for (text, expected) in [
            ("pyton", "built-in verifier (exact"),
            ("{python: {timeout: 3}}", "cannot be read"),
            ("{regex: {pattern: '('}}", "verifier.regex"),
            ("chain", "cannot be read"),
        ] {
            let error = format!("{:#}", parse_verifier(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn completions_are_read_in_batches_and_mistakes_name_their_line() {
        let prompt =
            PromptEntry::parse_all(b"{\"id\": \"a\", \"prompt\": \"x\"}").unwrap().remove(0);
        let prompts = BTreeMap::from([("a".to_owned(), prompt)]);
        let line = "{\"prompt_id\": \"a\", \"completion\": \"1\"}\n";
        let text = line.repeat(BATCH_SIZE) + "\n" + line;
        let (mut lines, mut number) = (text.as_bytes(), 0);
        let mut next = || read_batch(&mut lines, &prompts, &mut number).unwrap().len();
        assert_eq!([next(), next(), next()], [BATCH_SIZE, 1, 0]);
        for (text, expected) in [
            ("\n{}", "line 2: expected"),
            ("{\"prompt_id\": \"b\", \"completion\": \"\"}", "line 1: no prompt"),
        ] {
            let error = read_batch(&mut text.as_bytes(), &prompts, &mut 0).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
