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
            let exported =
                fleet.run(&["checkpoint", "export", checkpoint, "--out", &out, "--force"]);
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

/// The Vulkan backend on Mesa's driver for CPUs stands for a GPU.
mod vulkan {
    use std::collections::BTreeMap;

    use super::*;
    use e2e::{find_llama_cpp_with_vulkan, run_flotilla, wait_until};

    fn golden_model() -> String {
        golden::small_set().model_path("qwen2-tiny").display().to_string()
    }

    fn owned(environment: &[(&str, &str)]) -> Vec<(String, String)> {
        environment.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    /// Returns the figures of `flotilla doctor speed` by engine.
    fn measured_engines(environment: &[(&str, &str)]) -> (BTreeMap<String, Value>, String) {
        let model = golden_model();
        let arguments = ["doctor", "speed", "--model", &model, "--tolerance", "0.5", "--json"];
        let output = run_flotilla(&arguments, owned(environment));
        assert_eq!(output.code, 0, "{output:?}");
        let report: Value = serde_json::from_str(&output.stdout).unwrap();
        let engines = report["engines"].as_array().unwrap().iter();
        let by_name = engines.map(|it| (it["engine"].as_str().unwrap().to_owned(), it.clone()));
        (by_name.collect(), report["chosen"].as_str().unwrap_or_default().to_owned())
    }

    #[test]
    fn a_box_times_its_engines_and_devices_and_compares_their_results() {
        let Some(programs) = find_llama_cpp_with_vulkan() else { return };
        let (engines, chosen) = measured_engines(&[("FLOTILLA_LLAMA_CPP", &programs)]);
        let count = |part: &str| engines.keys().filter(|name| name.contains(part)).count();
        let counts = ["candle", " q8_0", " CPU ", " Vulkan0 "].map(count);
        assert_eq!(counts, [3, 1, 1, 1], "{engines:#?}");
        for (name, engine) in &engines {
            let rates = &engine["rates"];
            for rate in ["prefill_tokens_per_s", "decode_tokens_per_s"] {
                assert!(rates[rate].as_f64().is_some_and(|rate| rate > 0.0), "{name}: {engine:#}");
            }
            // Half types differ from f32, a wrong device from all.
            assert!(rates["distance"].as_f64().is_some_and(|it| it < 0.1), "{name}: {engine:#}");
        }
        let seconds = |engine: &Value| {
            let rate = |name: &str| engine["rates"][name].as_f64().unwrap();
            128.0 / rate("prefill_tokens_per_s") + 2048.0 / rate("decode_tokens_per_s")
        };
        let fastest = engines.iter().min_by(|(_, a), (_, b)| seconds(a).total_cmp(&seconds(b)));
        assert_eq!(fastest.unwrap().0, &chosen, "{engines:#?}");
    }

    #[test]
    fn a_broken_driver_is_noticed() {
        let Some(programs) = find_llama_cpp_with_vulkan() else { return };
        let broken =
            [("FLOTILLA_LLAMA_CPP", programs.as_str()), ("VK_DRIVER_FILES", "/no/driver.json")];
        let (engines, chosen) = measured_engines(&broken);
        assert!(engines.keys().all(|name| !name.contains("Vulkan")), "{engines:#?}");
        assert!(!chosen.is_empty(), "the CPU works without the driver");
        let model = golden_model();
        let mut arguments = vec!["generate", "--model", &model, "--prompt", "a", "--engine"];
        arguments.extend(["llama.cpp", "--profile", "gfx1151", "--max-new-tokens", "4", "--json"]);
        let refused = run_flotilla(&arguments, owned(&broken));
        assert_eq!(refused.code, 1, "{refused:?}");
        for words in ["no Vulkan or ROCm device", "(E102)"] {
            assert!(refused.stderr.contains(words), "{refused:?}");
        }
        let drawn = run_flotilla(&arguments, owned(&broken[..1]));
        assert_eq!(drawn.code, 0, "{drawn:?}");
        let drawn: Value = serde_json::from_str(&drawn.stdout).unwrap();
        assert!(drawn["engine"].as_str().unwrap().contains(" Vulkan0 f16"), "{drawn:#}");
    }

    #[test]
    fn an_agent_generates_with_the_fastest_engine_of_its_box() {
        let Some(programs) = find_llama_cpp_with_vulkan() else { return };
        let environment = [
            ("FLOTILLA_CALIBRATE".to_owned(), "true".to_owned()),
            ("FLOTILLA_LLAMA_CPP".to_owned(), programs),
        ];
        let fleet = Fleet::start_with("trainer,generator,verifier,evaluator", &[], environment);
        let files = SpecFiles::create(fleet.path());
        let base = fleet.submit(&files.write_sft_spec(20, 10));
        fleet.await_success(&base, LIMIT);
        let sampling = Sampling { prompts: 4, per_prompt: 2, max_new_tokens: 8, cycles: 1 };
        let run = fleet.submit(&files.write_raft_spec(&base, sampling));
        fleet.await_success(&run, LIMIT);
        let file = fleet.path().join("agents/generator-1/engine-speeds.json");
        let kept: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        let bases = kept["bases"].as_object().unwrap();
        assert_eq!(bases.len(), 1, "{kept:#}");
        let timed = bases.values().next().unwrap().as_array().unwrap();
        assert!(timed.iter().any(|it| it["engine"].as_str().unwrap().contains("Vulkan0")));
        let words = format!("tokens/s, the fastest of {}", timed.len());
        // With the agent's next status.
        let await_engine = |what: &str, is_it: &dyn Fn(&str) -> bool| {
            wait_until(what, LIMIT, || {
                let agents = fleet.run_json(&["agents", "list"]).ok()?;
                let engines =
                    |agent: &Value| agent["engines"].as_array().cloned().unwrap_or_default();
                let mut all = agents.as_array()?.iter().flat_map(engines);
                all.any(|engine| is_it(engine.as_str().unwrap())).then_some(())
            });
        };
        await_engine("the list of agents has the figures", &|engine| engine.ends_with(&words));

        let spec = files.write_raft_spec(&base, sampling);
        let strict = std::fs::read_to_string(&spec).unwrap();
        let strict = strict.replace("raft:\n", "raft:\n  proof: { tolerance: 0.000001 }\n");
        std::fs::write(&spec, strict).unwrap();
        let run = fleet.submit(&spec);
        fleet.await_success(&run, LIMIT);
        await_engine("a strict run is drawn by the most exact engine", &|engine| {
            engine.starts_with("generator: candle-") && engine.contains(" f32: prefill ")
        });
    }
}
