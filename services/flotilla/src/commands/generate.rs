//! `flotilla generate`: samples of one prompt, without a fleet.

use std::process::ExitCode;

use anyhow::{Context, bail};
use engine::{Finish, Prompt, Request, Sampling};
use serde_json::json;
use wire::sample_seed;

use crate::{cli::GenerateArgs, output};

/// Sequences run at once.
const SLOTS: usize = 64;

pub(crate) fn generate(args: &GenerateArgs, json: bool) -> anyhow::Result<ExitCode> {
    check(args)?;
    let (model, tokenizer) = engine::load(&args.model, args.adapter.as_deref(), &args.device)?;
    let request = Request {
        tag: (),
        prompt: Prompt::Text(args.prompt.clone()),
        seeds: (0..args.n).map(|index| sample_seed(args.seed, "prompt", index)).collect(),
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k as usize,
            top_p: args.top_p,
            max_new_tokens: args.max_new_tokens as usize,
        },
    };
    let mut answers = engine::generate_all(&model, &tokenizer, SLOTS, vec![request], |_, _| {})?;
    let completions = answers.pop().context("the engine gave no answer")??;
    if json {
        let samples: Vec<_> = completions
            .iter()
            .map(|completion| {
                json!({
                    "index": completion.index,
                    "text": completion.text,
                    "tokens": completion.tokens.len(),
                    "finish": finish(completion.finish),
                })
            })
            .collect();
        output::print_json(
            &json!({ "prompt": args.prompt, "samples": samples, "engine": engine::ENGINE }),
        )?;
    } else {
        completions.iter().for_each(|completion| output::print(&completion.text));
    }
    Ok(ExitCode::SUCCESS)
}

fn check(args: &GenerateArgs) -> anyhow::Result<()> {
    if !(0.0..=10.0).contains(&args.temperature) {
        bail!("--temperature {}: must be from 0 to 10", args.temperature);
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        bail!("--top-p {}: must be above 0 and at most 1", args.top_p);
    }
    Ok(())
}

fn finish(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}
