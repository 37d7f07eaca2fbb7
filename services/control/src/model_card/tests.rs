use std::collections::BTreeMap;

use super::*;

fn rate(mean: f64) -> Option<v1::cycle_done::Rate> {
    Some(v1::cycle_done::Rate { mean, stderr: 0.05, prompts: 40, samples: 80 })
}

fn blob(digest: &str) -> Option<v1::Blob> {
    Some(v1::Blob { digest: digest.into(), bytes: 1 })
}

fn raft_spec(verifier: v1::verifier::How) -> v1::Spec {
    let raft = v1::spec::Raft {
        prompts: blob("b3:prompts"),
        prompt_count: 64,
        heldout: blob("b3:heldout"),
        heldout_count: 40,
        cycles: 2,
        samples_per_prompt: 8,
        sampling: Some(v1::Sampling { temperature: 0.8, top_p: 1.0, ..Default::default() }),
        verifier: Some(v1::Verifier { how: Some(verifier) }),
        training: Some(v1::Training {
            learning_rate: 0.001,
            lora: Some(v1::Lora { r: 8, alpha: 16.0, ..Default::default() }),
            ..Default::default()
        }),
        ..Default::default()
    };
    let source = |name: &str, part: &str, fields: &[&str]| v1::spec::DataSource {
        name: format!("hub:{name}:{part}"),
        pinned: format!("hub:{name}@4567def:{part}"),
        fields: fields.iter().map(|&field| field.to_owned()).collect(),
    };
    v1::Spec {
        data_sources: vec![
            source("org/sums", "main/test", &["raft.heldout", "evals[0].prompts"]),
            source("org/sums", "main/train", &["raft.prompts"]),
            source("org/texts", "default/test", &["evals[1].text"]),
        ],
        run: "raft-1".into(),
        seed: 6,
        user: "grace-h".into(),
        suites: vec![v1::Suite {
            name: "text".into(),
            text: blob("b3:text"),
            ..Default::default()
        }],
        kind: Some(v1::spec::Kind::Raft(raft)),
        ..Default::default()
    }
}

/// Returns a run with the base's figures in cycle 0, and better ones in cycle 1.
fn measured_run(spec: v1::Spec) -> (Run, v1::Checkpoint) {
    let mut run = Run::new(RunId::new("raft-1").unwrap(), spec, 0);
    let mut last = v1::Checkpoint::default();
    for (number, step, perplexity, mean) in [(0, 0, 9.0, 0.25), (1, 24, 7.5, 0.4375)] {
        last = v1::Checkpoint {
            run: "raft-1".into(),
            cycle: number,
            step,
            steps: step,
            r#final: true,
            content: v1::checkpoint::Content::Adapter.into(),
            tree: Some(v1::Tree { path: "runs/raft-1/c1".into(), manifest: "b3:adapter".into() }),
            agent: "secret-box".into(),
            engine: "candle-0.9".into(),
            ..Default::default()
        };
        let cycle = run.cycles.entry(number).or_default();
        cycle.checkpoints.insert(step, last.clone());
        let eval = v1::Eval { step, perplexity, stderr: 0.5, ..Default::default() };
        cycle.evals.insert((step, "text".parse().unwrap()), eval);
        let samples_by_agent = BTreeMap::from([("secret-box".to_owned(), 8)]);
        let heldout = rate(mean);
        cycle.done =
            Some(v1::CycleDone { cycle: number, heldout, samples_by_agent, ..Default::default() });
    }
    (run, last)
}

fn write_card(verifier: v1::verifier::How, form: &ModelForm, ancestors: &[&str]) -> String {
    let (run, checkpoint) = measured_run(raft_spec(verifier));
    let revision = ModelRevision { repo: "org/base".into(), commit: "0123abc".into() };
    let license = ModelLicense { id: "other".into(), name: Some("base-1".into()), link: None };
    let source = ModelSource::Hub { revision, license: Some(license) };
    let info = v1::CheckpointInfo { checkpoint: Some(checkpoint.clone()), ..Default::default() };
    let order = v1::TrainOrder { dataset: blob("b3:selected"), ..Default::default() };
    let training = LineageStep {
        checkpoint: checkpoint.clone(),
        order: Some(order),
        selected: Some(v1::Selected { considered: 512, kept: 120, ..Default::default() }),
        from: "the base".into(),
    };
    let origin = ModelOrigin {
        source,
        ancestors: ancestors.iter().map(|&name| name.to_owned()).collect(),
        adapter: None,
        base_manifest: "b3:base".into(),
    };
    let target: ModelId = "org/mine".parse().unwrap();
    let request = CardRequest { info: &info, target: &target, form };
    card_text(&CardFacts { request, checkpoint, run, trainings: vec![training], origin })
}

fn regex() -> v1::verifier::How {
    v1::verifier::How::Regex(v1::verifier::Regex { pattern: "[0-9]".into() })
}

#[test]
fn a_card_has_the_figures_the_lineage_and_the_use_of_a_checkpoint() {
    let card = write_card(regex(), &ModelForm::Stored, &[]);
    for words in [
        "---\nbase_model: \"org/base\"\nbase_model_relation: \"adapter\"\n",
        "license: \"other\"\nlicense_name: \"base-1\"\ndatasets: [\"org/sums\"]\nlibrary_name: \"peft\"",
        "- data set: `hub:org/sums@4567def:main/train`, for raft.prompts\n",
        "tags: [\"flotilla\",\"raft\",\"lora\"]",
        "\"value\":0.4375",
        "\"name\":\"held-out prompts\",\"revision\":\"b3:heldout\"",
        "| pass rate, held-out prompts | 25.0 % ± 5.0 | 43.8 % ± 5.0 |",
        "| perplexity, text | 9.0000 ± 0.5000 | 7.5000 ± 0.5000 |",
        "80 samples of 40 prompts",
        "| cycle 1 | the base | 120 of 512 samples | `b3:selected` | 24 |",
        "- prompts: `b3:prompts`, 64 lines",
        "- verifier: `regex`",
        "- objective: likelihood of the selected samples",
        "from_pretrained(\"org/base\", revision=\"0123abc\")",
        "base: { model: org/base@0123abc, adapter: org/mine }",
        "flotilla run reproduce raft-1/1/24",
    ] {
        assert!(card.contains(words), "{words}: {card}");
    }
    let merged = write_card(regex(), &ModelForm::Merged, &[]);
    assert!(merged.contains("base_model_relation: \"finetune\""), "{merged}");
    assert!(merged.contains("base: { model: org/mine }"), "{merged}");
    let gguf = write_card(regex(), &ModelForm::Gguf { weight_type: "q4_k_m".into() }, &[]);
    assert!(gguf.contains("llama-server -hf org/mine:Q4_K_M"), "{gguf}");
}

#[test]
fn an_adapter_of_another_run_s_checkpoint_names_no_base_on_the_hub() {
    let card = write_card(regex(), &ModelForm::Stored, &["sft-1/0/40"]);
    assert!(!card.contains("base_model"), "{card}");
    assert!(card.contains("trained from the checkpoints: `sft-1/0/40`"), "{card}");
    assert!(card.contains("flotilla checkpoint export raft-1/1/24 --format merged"), "{card}");
    let merged = write_card(regex(), &ModelForm::Merged, &["sft-1/0/40"]);
    assert!(merged.contains("base_model: \"org/base\""), "{merged}");
}

#[test]
fn a_card_leaves_out_what_is_private_to_the_fleet() {
    use v1::verifier::{Chain, Command, How, LlmJudge, chain::Stage};
    let command = Command { argv: vec!["/home/grace-h/judge".into()], ..Default::default() };
    let url = "http://10.0.0.7:8000/v1".into();
    let judge = LlmJudge { url, key_env: "JUDGE_KEY".into(), ..Default::default() };
    let stage = |how| Stage { verifier: Some(v1::Verifier { how: Some(how) }), weight: 1.0 };
    let stages = vec![stage(How::Command(command)), stage(How::LlmJudge(judge))];
    let chain = How::Chain(Chain { stages, ..Default::default() });
    let card = write_card(chain, &ModelForm::Stored, &[]);
    assert!(card.contains("`chain` of `command`, `llm_judge`"), "{card}");
    for word in ["grace-h", "10.0.0.7", "JUDGE_KEY", "secret-box"] {
        assert!(!card.contains(word), "{word}: {card}");
    }
}
