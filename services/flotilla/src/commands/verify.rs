//! `flotilla verify`: verdicts on completions in a file, without a fleet.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use control::VerifierSpec;
use serde::Deserialize;
use serde_json::{Value, json};
use verifier::{Item, Judgement, Kit, Once, Tools};
use wire::{
    Prompt,
    v1::{self, verdicts::Outcome},
};

use crate::{
    cli::{ToolArgs, VerifyArgs},
    output,
};

/// Completions held at a time.
const BATCH: usize = 1024;

/// Longest line of completions.
const LINE_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug, Deserialize)]
struct Line {
    prompt_id: String,
    completion: String,
    #[serde(default)]
    index: u32,
}

/// How many of each there were.
#[derive(Debug, Default)]
struct Tally {
    pass: usize,
    fail: usize,
    error: usize,
    reward: f64,
}

pub(crate) fn verify(args: &VerifyArgs, json: bool) -> anyhow::Result<ExitCode> {
    let settings = settings(&args.verifier)?;
    let prompts = read_prompts(&args.prompts)?;
    let mut lines = open(&args.completions)?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let jobs = args.jobs.map_or(cores, |jobs| jobs as usize);
    let once = Once::new(settings, kit(&args.tools, Vec::new())?, jobs).context("--verifier")?;
    let began = std::time::Instant::now();
    let (mut tally, mut number) = (Tally::default(), 0);
    loop {
        let items = batch(&mut lines, &prompts, &mut number)
            .with_context(|| args.completions.display().to_string())?;
        if items.is_empty() {
            break;
        }
        if let [first, ..] = &*once.lacking(&items) {
            bail!("this box lacks {first} (E117)");
        }
        for judgement in once.judge(&items) {
            tally.count(&judgement.verdict);
            print(&judgement, json)?;
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    output::say(&format!("{}, in {seconds:.1} s", tally.told()));
    Ok(if tally.error > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What this box has to judge with, and how it contains programs.
pub(crate) fn kit(args: &ToolArgs, hidden: Vec<PathBuf>) -> anyhow::Result<Kit> {
    if let Some(python) = &args.verifier_python
        && !python.is_file()
    {
        bail!("--verifier-python {}: there is no such file (A104)", python.display());
    }
    Ok(Kit { tools: Tools::find(args.verifier_python.as_deref()), cell: cell()?, hidden })
}

/// How a process is started that contains programs.
pub(crate) fn cell() -> anyhow::Result<sandbox::Launch> {
    let program = std::env::current_exe().context("find this program")?;
    let arguments = ["worker", "cell"].map(Into::into).to_vec();
    Ok(sandbox::Launch { program, arguments })
}

fn settings(text: &str) -> anyhow::Result<v1::Verifier> {
    let yaml = if VerifierSpec::NAMES.contains(&text) {
        format!("{text}: {{}}")
    } else if text.contains([':', '{']) {
        text.to_owned()
    } else if Path::new(text).is_file() {
        std::fs::read_to_string(text).with_context(|| format!("--verifier {text}"))?
    } else {
        let names = VerifierSpec::NAMES.join(", ");
        bail!("--verifier {text}: there is no such file, and the verifiers are {names} (V103)");
    };
    let spec: VerifierSpec = serde_saphyr::from_str(&yaml)
        .map_err(|error| anyhow::anyhow!("{error}"))
        .context("--verifier cannot be read; docs/VERIFIERS.md has examples (V103)")?;
    Ok(spec.verifier("verifier")?)
}

fn read_prompts(path: &Path) -> anyhow::Result<BTreeMap<String, Prompt>> {
    let at = || format!("--prompts {}", path.display());
    let text = std::fs::read(path).with_context(at)?;
    let prompts = Prompt::parse_all(&text).with_context(at)?;
    Ok(prompts.into_iter().map(|prompt| (prompt.id.clone(), prompt)).collect())
}

fn open(path: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin().lock()));
    }
    let file = File::open(path).with_context(|| format!("--completions {}", path.display()))?;
    Ok(Box::new(BufReader::new(file)))
}

/// The next completions with what their prompts say; none at the end.
fn batch(
    lines: &mut dyn BufRead,
    prompts: &BTreeMap<String, Prompt>,
    number: &mut usize,
) -> anyhow::Result<Vec<Item>> {
    let mut items = Vec::new();
    let mut text = Vec::new();
    while items.len() < BATCH {
        text.clear();
        *number += 1;
        if (&mut *lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut text)? == 0 {
            break;
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_slice(&text).with_context(|| {
            format!("line {number}: expected an object such as {{\"prompt_id\": \"p1\", \"completion\": \"4\"}}")
        })?;
        let prompt = prompts
            .get(&line.prompt_id)
            .with_context(|| format!("line {number}: no prompt has the id {:?}", line.prompt_id))?;
        items.push(Item::of(prompt, line.index, line.completion));
    }
    Ok(items)
}

fn print(Judgement { verdict, took }: &Judgement, json: bool) -> anyhow::Result<()> {
    let (status, ms) = (status(verdict.outcome()), took.as_secs_f64() * 1e3);
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
    output::print(&format!("{status:<5} {reward:>5.2} {ms:>8.1} ms  {prompt_id}{detail}"));
    Ok(())
}

fn status(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "fail",
        Outcome::Error | Outcome::Unspecified => "error",
    }
}

impl Tally {
    fn count(&mut self, verdict: &v1::verdicts::Verdict) {
        match verdict.outcome() {
            Outcome::Pass => self.pass += 1,
            Outcome::Fail => self.fail += 1,
            Outcome::Error | Outcome::Unspecified => self.error += 1,
        }
        self.reward += verdict.reward;
    }

    /// Errors are no samples: they count in no mean.
    fn told(&self) -> String {
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
        assert!(settings("python").is_ok());
        assert_eq!(
            settings("numeric: {tolerance: 0.5}").unwrap(),
            settings("{numeric: {tolerance: 0.5}}").unwrap()
        );
        for (text, expected) in [
            ("pyton", "the verifiers are exact"),
            ("{python: {timeout: 3}}", "cannot be read"),
            ("{regex: {pattern: '('}}", "verifier.regex"),
            ("chain", "cannot be read"),
        ] {
            let error = format!("{:#}", settings(text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn completions_are_read_in_batches_and_mistakes_name_their_line() {
        let prompt = Prompt::parse_all(b"{\"id\": \"a\", \"prompt\": \"x\"}").unwrap().remove(0);
        let prompts = BTreeMap::from([("a".to_owned(), prompt)]);
        let line = "{\"prompt_id\": \"a\", \"completion\": \"1\"}\n";
        let text = line.repeat(BATCH) + "\n" + line;
        let (mut lines, mut number) = (text.as_bytes(), 0);
        let mut next = || batch(&mut lines, &prompts, &mut number).unwrap().len();
        assert_eq!([next(), next(), next()], [BATCH, 1, 0]);
        for (text, expected) in [
            ("\n{}", "line 2: expected"),
            ("{\"prompt_id\": \"b\", \"completion\": \"\"}", "line 1: no prompt"),
        ] {
            let error = batch(&mut text.as_bytes(), &prompts, &mut 0).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
