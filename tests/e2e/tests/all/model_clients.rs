//! Programs that call served models by OpenAI's API: lm_eval, and the calls of Open WebUI.

use std::{collections::BTreeMap, path::Path};

use e2e::{PythonEnv, find_llama_cpp};
use serde_json::{Value, json};

use crate::serving::{ServingFleet, with_llama_cpp, without_llama_cpp};

const QUESTIONS: [&str; 4] = ["12+1=", "34+1=", "5+1=", "77+1="];

/// Tasks of lm_eval without their names and files.
const CHOICES: &str = "\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ''
metric_list: [{ metric: acc }]
";
const ANSWERS: &str = "\
output_type: generate_until
doc_to_target: answer
generation_kwargs: { until: [\"\\n\\n\"], max_gen_toks: 8 }
metric_list: [{ metric: exact_match }]
";

#[test]
fn lm_eval_and_open_webui_get_the_answers_of_the_embedded_engine() {
    let (Some(clients), Some(python)) =
        (PythonEnv::with_model_clients(), PythonEnv::with_client_packages())
    else {
        return;
    };
    let serving = start_serving(without_llama_cpp());
    assert_open_webui_gets_answers(&serving, &clients, &python);
    let model = serving.fleet.path().join("exported").display().to_string();
    let checkpoint = format!("{}/0/20", serving.run);
    serving.fleet.run(&["checkpoint", "export", &checkpoint, "--out", &model]).assert_success();
    assert_lm_eval_scores_choices(&serving, &clients, &model);
    assert_lm_eval_reads_answers(&serving, &clients, &model);
}

#[test]
fn open_webui_gets_the_answers_of_llama_cpp() {
    let (Some(clients), Some(python), Some(llama)) =
        (PythonEnv::with_model_clients(), PythonEnv::with_client_packages(), find_llama_cpp())
    else {
        return;
    };
    let serving = start_serving(with_llama_cpp(llama));
    assert_open_webui_gets_answers(&serving, &clients, &python);
}

fn start_serving(environment: Vec<(String, String)>) -> ServingFleet {
    let serving = ServingFleet::start(environment);
    serving.serve("stable", 20);
    serving.await_serving("stable", 2);
    serving
}

/// Checks that Open WebUI would show the same answer as OpenAI's client gets for the conversation's
/// text.
fn assert_open_webui_gets_answers(serving: &ServingFleet, clients: &PythonEnv, python: &PythonEnv) {
    let [question, ..] = QUESTIONS;
    let called = [&*serving.url, "stable", question];
    let found: Value =
        serde_json::from_str(&clients.run_script("open_webui_calls.py", &called)).expect("JSON");
    let prompt = write_prompt(question);
    let asked = [&*serving.url, "stable", question, &prompt];
    let expected: Value =
        serde_json::from_str(&python.run_script("ask_chat.py", &asked)).expect("JSON");
    assert_eq!(found["models"], json!(["stable"]), "{found}");
    let message = &found["message"];
    assert_eq!(message["text"], expected["completion"]["text"], "{found}");
    assert!(message["done"] == true && message["finish"].is_string(), "{found}");
    assert_eq!(message["usage"]["prompt_tokens"], prompt.len(), "{found}");
    assert!(message["usage"]["completion_tokens"].as_u64() > Some(0), "{found}");
    assert!(found["title"].is_string(), "{found}");
    assert_eq!(found["refused"][0], 404, "{found}");
    let reason = found["refused"][1].as_str().expect("a reason");
    assert!(reason.contains("no served model \"gone\""), "{found}");
}

/// Returns a conversation as the served model's template writes it.
fn write_prompt(question: &str) -> String {
    format!("<user>{question}\n<assistant>")
}

/// A question with possible answers, and the log-probabilities that the sampler reported of them.
struct ScoredQuestion {
    text: &'static str,
    choices: Vec<(String, f64)>,
    /// The text of the two likeliest tokens, one after the other.
    greedy: String,
}

impl ScoredQuestion {
    /// Draws answers of two printable characters, which are two tokens.
    fn draw(serving: &ServingFleet, model: &str, text: &'static str) -> Self {
        let two_tokens = |settings: &[&str]| {
            let settings = [settings, &["--max-new-tokens", "2"]].concat();
            generate(serving, model, text, &settings)
        };
        let mut drawn: BTreeMap<String, f64> = BTreeMap::new();
        for sample in two_tokens(&["--n", "64", "--temperature", "1"]) {
            let text = sample["text"].as_str().expect("a text");
            let is_printable = text.len() == 2 && text.bytes().all(|it| it.is_ascii_graphic());
            if is_printable && sample["finish"] == "length" {
                drawn.insert(text.to_owned(), sample["logprob"].as_f64().expect("a number"));
            }
        }
        assert!(drawn.len() > 2, "{text}: {drawn:?}");
        let greedy =
            two_tokens(&["--temperature", "0"])[0]["text"].as_str().expect("a text").into();
        Self { text, choices: drawn.into_iter().take(4).collect(), greedy }
    }

    fn likeliest_choice(&self) -> usize {
        let choices = self.choices.iter().enumerate();
        let best = choices.max_by(|(_, a), (_, b)| a.1.total_cmp(&b.1));
        best.expect("it has choices").0
    }
}

/// Generates without the fleet.
fn generate(serving: &ServingFleet, model: &str, prompt: &str, settings: &[&str]) -> Vec<Value> {
    let command = [&["generate", "--model", model, "--prompt", prompt][..], settings].concat();
    let found = serving.fleet.run_json(&command).expect("samples");
    found["samples"].as_array().expect("a list").clone()
}

/// Checks that lm_eval computes the log-probabilities of the model's own sampler, and the accuracy
/// that follows from them.
fn assert_lm_eval_scores_choices(serving: &ServingFleet, clients: &PythonEnv, model: &str) {
    let questions = QUESTIONS.map(|text| ScoredQuestion::draw(serving, model, text));
    let docs = questions.iter().enumerate().map(|(number, question)| {
        // The model is wrong about the first one.
        let gold =
            (question.likeliest_choice() + usize::from(number == 0)) % question.choices.len();
        let choices: Vec<&str> = question.choices.iter().map(|(text, _)| text.as_str()).collect();
        json!({ "question": question.text, "choices": choices, "gold": gold })
    });
    let docs: Vec<Value> = docs.collect();
    let arguments = format!("model=stable,base_url={}/completions,tokenizer={model}", serving.url);
    let arguments =
        [["--model", "local-completions"], ["--batch_size", "16"], ["--model_args", &arguments]];
    let task = EvaluatedTask { name: "served_choices", settings: CHOICES, docs: &docs };
    let (results, samples) = task.evaluate(clients, serving.fleet.path(), &arguments.concat());
    assert_eq!(results["acc,none"], 0.75, "{results}");
    assert_eq!(samples.len(), questions.len());
    for (sample, question) in samples.iter().zip(&questions) {
        assert_eq!(sample["doc"]["question"], question.text, "{sample}");
        let answers = sample["filtered_resps"].as_array().expect("a list");
        assert_eq!(answers.len(), question.choices.len(), "{sample}");
        for (answer, (choice, logprob)) in answers.iter().zip(&question.choices) {
            let found: f64 = answer[0].as_str().expect("a number").parse().expect("a number");
            assert!((found - logprob).abs() < 1e-4, "{choice}: {found} {logprob}");
            assert_eq!(answer[1] == "True", *choice == question.greedy, "{choice}: {sample}");
        }
    }
}

/// Checks that lm_eval reads the model's greedy answers to conversations.
fn assert_lm_eval_reads_answers(serving: &ServingFleet, clients: &PythonEnv, model: &str) {
    let answers = QUESTIONS.map(|question| {
        let settings = ["--temperature", "0", "--max-new-tokens", "8"];
        let samples = generate(serving, model, &write_prompt(question), &settings);
        let text = samples[0]["text"].as_str().expect("a text");
        text.split("\n\n").next().unwrap_or_default().to_owned()
    });
    let docs = QUESTIONS.iter().zip(&answers).enumerate().map(|(number, (question, answer))| {
        let expected = if number == 0 { format!("not {answer}") } else { answer.clone() };
        json!({ "question": question, "answer": expected })
    });
    let docs: Vec<Value> = docs.collect();
    let arguments =
        format!("model=stable,base_url={}/chat/completions,num_concurrent=2", serving.url);
    let arguments =
        ["--model", "local-chat-completions", "--apply_chat_template", "--model_args", &arguments];
    let task = EvaluatedTask { name: "served_answers", settings: ANSWERS, docs: &docs };
    let (results, samples) = task.evaluate(clients, serving.fleet.path(), &arguments);
    assert_eq!(results["exact_match,none"], 0.75, "{results}");
    let found: Vec<&Value> = samples.iter().map(|sample| &sample["filtered_resps"][0]).collect();
    assert_eq!(found, answers.iter().collect::<Vec<_>>());
}

/// A task of lm_eval with its documents.
struct EvaluatedTask<'a> {
    name: &'static str,
    settings: &'static str,
    docs: &'a [Value],
}

impl EvaluatedTask<'_> {
    /// Runs lm_eval without a hub, and returns the task's results and one sample per document.
    fn evaluate(
        &self,
        clients: &PythonEnv,
        directory: &Path,
        arguments: &[&str],
    ) -> (Value, Vec<Value>) {
        let name = self.name;
        let (data, out) = (directory.join(format!("{name}.jsonl")), directory.join(name));
        let lines: String = self.docs.iter().map(|doc| format!("{doc}\n")).collect();
        std::fs::write(&data, lines).expect("a file");
        let task = directory.join(format!("{name}.yaml"));
        let text = format!(
            "task: {name}\n\
             dataset_path: json\n\
             dataset_kwargs: {{ data_files: {{ test: {} }} }}\n\
             test_split: test\n\
             doc_to_text: '{{{{question}}}}'\n\
             {}",
            data.display(),
            self.settings
        );
        std::fs::write(&task, text).expect("a file");
        let mut command = clients.command("lm_eval");
        command.args(arguments).arg("--tasks").arg(&task);
        command.arg("--log_samples").arg("--output_path").arg(&out);
        command.envs([("HF_HUB_OFFLINE", "1"), ("HF_DATASETS_OFFLINE", "1")]);
        let output = command.env("HF_HOME", directory.join("hf")).output().expect("lm_eval starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let results: Value = serde_json::from_str(&read_output(&out, "results_")).expect("JSON");
        let samples = read_output(&out, &format!("samples_{name}_"));
        let samples =
            samples.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        (results["results"][name].clone(), samples.collect())
    }
}

/// Reads the file whose name begins so, of those that lm_eval wrote for the model.
fn read_output(directory: &Path, beginning: &str) -> String {
    let entries = std::fs::read_dir(directory.join("stable")).expect("a directory").flatten();
    let is_this = |path: &Path| {
        path.file_name().is_some_and(|it| it.to_string_lossy().starts_with(beginning))
    };
    let path = entries.map(|entry| entry.path()).find(|path| is_this(path));
    std::fs::read_to_string(path.expect(beginning)).expect("a file")
}
