//! Fleets with other engines than candle.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::time::Duration;

use e2e::{Fleet, Sampling, SpecFiles, find_llama_cpp};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(300);

mod evaluator {
    use super::*;

    const SMALL: Sampling = Sampling { prompts: 8, per_prompt: 2, max_new_tokens: 16, cycles: 1 };

    /// Evaluates an exported checkpoint with candle.
    fn evaluate_with_candle(
        fleet: &Fleet,
        files: &SpecFiles,
        model: &str,
        adapter: Option<&str>,
    ) -> Value {
        let export = |checkpoint: &str| {
            let out = fleet.path().join(checkpoint.replace('/', "-"));
            let out = out.to_str().unwrap().to_owned();
            let exported = fleet.run(&["checkpoint", "export", checkpoint, "--out", &out]);
            assert_eq!(exported.code, 0, "{}", exported.stderr);
            out
        };
        let (model, adapter) = (export(model), adapter.map(export));
        let text = files.path("heldout.txt");
        let mut arguments =
            vec!["eval", "local", "--engine", "candle", "--n-ctx", "64", "--model", &model];
        arguments.extend(["--text", text.to_str().unwrap()]);
        arguments.extend(adapter.iter().flat_map(|adapter| ["--adapter", adapter]));
        fleet.run_json(&arguments).unwrap()
    }

    fn assert_agree(eval: &Value, candle: &Value) {
        let engine = eval["engine"].as_str().unwrap();
        assert!(engine.starts_with("llama.cpp ") && engine.contains(" CPU "), "{eval:#}");
        for key in ["perplexity", "meanNll", "bitsPerByte"] {
            let snake = match key {
                "meanNll" => "mean_nll",
                "bitsPerByte" => "bits_per_byte",
                same => same,
            };
            let (there, here) = (eval[key].as_f64().unwrap(), candle[snake].as_f64().unwrap());
            assert!((there / here - 1.0).abs() < 1e-3, "{key}: {there} {here}\n{eval:#}");
        }
        // JSON contains 64-bit counts as strings.
        assert_eq!(eval["tokens"], candle["tokens"].to_string(), "{eval:#}");
        let same = ["chunks", "protocol", "tokenizer", "text"];
        assert!(same.iter().all(|key| eval[key] == candle[key]), "{eval:#}\n{candle:#}");
        assert_eq!((eval["protocol"].as_str(), eval["nCtx"].as_u64()), (Some("llama"), Some(64)));
        let process = &eval["process"];
        assert!(process["cpuS"].as_f64().unwrap() > 0.0, "{process:#}");
    }

    #[test]
    fn llama_cpp_and_candle_measure_the_same_perplexities() {
        let Some(programs) = find_llama_cpp() else { return };
        let environment = [
            ("FLOTILLA_EVALUATOR_ENGINE".to_owned(), "llama.cpp".to_owned()),
            ("FLOTILLA_LLAMA_CPP".to_owned(), programs),
            // llama.cpp must not read this option from the environment: its text would be too
            // short.
            ("LLAMA_ARG_CTX_SIZE".to_owned(), "77".to_owned()),
        ];
        let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &[], environment);
        let files = SpecFiles::create(fleet.path());
        let base = fleet.submit(&files.write_sft_spec(20, 10));
        let ended = fleet.await_success(&base, LIMIT);
        let evals = ended["evals"].as_array().cloned().unwrap_or_default();
        assert_eq!(evals.len(), 2, "{ended:#}");
        for eval in &evals {
            let checkpoint = format!("{base}/0/{}", eval["step"]);
            assert_agree(eval, &evaluate_with_candle(&fleet, &files, &checkpoint, None));
        }
        let run = fleet.submit(&files.write_raft_spec(&base, SMALL));
        let ended = fleet.await_success(&run, LIMIT);
        let evals = ended["evals"].as_array().unwrap();
        let adapted = evals.iter().find(|eval| eval["cycle"] == 1).expect("an adapter's eval");
        let candle = evaluate_with_candle(
            &fleet,
            &files,
            &format!("{base}/0/20"),
            Some(&format!("{run}/1")),
        );
        assert_agree(adapted, &candle);

        let history = fleet.path().join("agents/evaluator-1/eval_history.jsonl");
        let history = std::fs::read_to_string(history).unwrap();
        for line in history.lines() {
            let entry: Value = serde_json::from_str(line).unwrap();
            assert!(entry["tokenizer"].as_str().unwrap().starts_with("b3:"), "{line}");
            assert!(entry["text"].as_str().unwrap().starts_with("b3:"), "{line}");
        }
        fleet.assert_clean_audit(&run);
    }
}
