//! Data as people have it: tables, the shapes of other tools, and data sets of the hub.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::Path};

use e2e::{Fleet, SpecFiles, run_flotilla};
use hub_server::{CONVERTED_COMMIT, HubServer};
use serde_json::{Value, json};
use tempfile::TempDir;

const SUMS: &str = "question,solution,category\n\"1+1\n=\",2,add\n2+2=,4,add\n3-1=,2,subtract\n";

fn write(directory: &Path, name: &str, content: impl AsRef<[u8]>) {
    let path = directory.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn golden_rows(name: &str) -> Vec<u8> {
    fs::read(golden::small_set().root.join("rows").join(name)).unwrap()
}

/// Returns the environment of a user whose hub is at `url`.
fn environment(home: &TempDir, url: &str) -> Vec<(String, String)> {
    let path = |name: &str| home.path().join(name).display().to_string();
    let pairs =
        [("HF_HOME", path("hf")), ("XDG_CACHE_HOME", path("cache")), ("HF_ENDPOINT", url.into())];
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[test]
fn tables_and_other_shapes_are_the_data_of_a_run() {
    let fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model().display().to_string();
    let directory = files.path("mine.yaml").parent().unwrap().to_owned();
    write(&directory, "sums.csv", SUMS);
    write(&directory, "held.tsv", SUMS.replace(',', "\t").replace('+', "*").replace('-', "/"));
    let pairs = r#"[{"prompt": "2+2=", "chosen": "4", "rejected": "5"},
                    {"instruction": "3+3=", "input": "", "output": "6"}]"#;
    write(&directory, "pairs.json", pairs);
    write(&directory, "talks.parquet", golden_rows("conversations.parquet"));
    let check = |spec: &str| {
        write(&directory, "mine.yaml", spec);
        fleet.run(&["run", "check", &files.path("mine.yaml").display().to_string(), "--json"])
    };
    let raft = format!(
        "base: {{ model: '{model}' }}\nraft:\n  prompts: sums.csv\n  heldout: held.tsv\n  columns: \
         {{ prompt: question, answer: solution }}\n  verifier: {{ numeric: {{}} }}\n"
    );
    let checked = check(&raft);
    assert_eq!(checked.code, 0, "{checked:?}");
    let report: Value = serde_json::from_str(&checked.stdout).unwrap();
    let prompts = &report["files"][0];
    assert_eq!((&prompts["lines"], &prompts["fields"]["answer"]), (&json!("3"), &json!("3")));
    let unknown = check(&raft.replace("answer: solution", "answer: result"));
    unknown.assert_refused(&[
        "raft.prompts",
        "sums.csv",
        "no row has a column \"result\"",
        "the columns are \"category\", \"question\", \"solution\"",
    ]);
    let sft = format!("base: {{ model: '{model}' }}\nsft: {{ data: pairs.json }}\n");
    let checked = check(&sft);
    assert_eq!(checked.code, 0, "{checked:?}");
    let report: Value = serde_json::from_str(&checked.stdout).unwrap();
    assert_eq!(report["files"][0]["shapes"], json!(["alpaca", "prompt/chosen/rejected"]));
    let warnings = report["warnings"].to_string();
    for words in ["1 rows are pairs", "rejected ones are not used", "several shapes"] {
        assert!(warnings.contains(words), "{warnings}");
    }
    // Conversations need a chat template, which this base does not have.
    check(&sft.replace("pairs.json", "talks.parquet")).assert_refused(&[
        "sft.data",
        "talks.parquet",
        "no chat template",
    ]);
    write(&directory, "cut.parquet", &golden_rows("types.parquet")[..900]);
    check(&sft.replace("pairs.json", "cut.parquet")).assert_refused(&[
        "sft.data",
        "cut.parquet",
        "cannot be read as parquet",
        "D111",
    ]);

    write(&directory, "mine.yaml", &raft);
    let run = fleet.submit(&files.path("mine.yaml"));
    let shown = fleet.run_json(&["run", "show", &run]).unwrap();
    assert_eq!(shown["dataSources"], Value::Null);
}

#[test]
fn a_model_on_this_machine_is_measured_on_rows_of_any_format() {
    let home = tempfile::tempdir().unwrap();
    let model = SpecFiles::create(home.path()).write_model().display().to_string();
    let lines = "{\"prompt\": \"1+1=\", \"completion\": \"2\"}\n\
                 {\"prompt\": \"2+2=\", \"completion\": \"4\"}\n";
    write(home.path(), "rows.jsonl", lines);
    write(home.path(), "rows.json", format!("[{}]", lines.trim().replace('\n', ",")));
    write(home.path(), "rows.csv", "question,reply\n1+1=,2\n2+2=,4\n");
    write(home.path(), "talks.parquet", golden_rows("conversations.parquet"));
    let measure = |name: &str, more: &[&str]| {
        let text = home.path().join(name).display().to_string();
        let fixed =
            ["eval", "local", "--json", "--n-ctx", "64", "--model", &model, "--text", &text];
        run_flotilla(&[&fixed[..], more].concat(), environment(&home, "http://127.0.0.1:9"))
    };
    let figures = |name: &str, more: &[&str]| {
        let output = measure(name, more);
        assert_eq!(output.code, 0, "{name}: {output:?}");
        let figures: Value = serde_json::from_str(&output.stdout).unwrap();
        (figures["mean_nll"].clone(), figures["tokens"].clone(), figures["protocol"].clone())
    };
    let expected = figures("rows.jsonl", &[]);
    assert_eq!(expected.2, "documents");
    assert_eq!(figures("rows.json", &[]), expected);
    let columns = ["--column", "prompt=question", "--column", "completion=reply"];
    assert_eq!(figures("rows.csv", &columns), expected);
    measure("rows.csv", &[]).assert_refused(&["--text", "rows.csv", "D101"]);
    measure("talks.parquet", &[]).assert_refused(&["talks.parquet", "no chat template"]);
}

#[test]
fn a_data_set_of_the_hub_is_named_by_its_commit_and_needs_no_hub_later() {
    let home = tempfile::tempdir().unwrap();
    let hub = home.path().join("hub");
    let talks = golden_rows("conversations.parquet");
    write(&hub, "datasets/org/talks/README.md", "# Talks");
    write(&hub, "datasets/org/talks.parquet/default/train/0000.parquet", &talks);
    write(&hub, "datasets/org/talks.parquet/default/train/0001.parquet", &talks);
    write(&hub, "datasets/org/private-sums/train.csv", SUMS);
    let server = HubServer::start(&hub).unwrap();
    let online = environment(&home, &server.url());
    let show = |name: &str, options: &[&str], environment: &[(String, String)]| {
        let arguments = [&["data", "show", name, "--json"][..], options].concat();
        run_flotilla(&arguments, environment.to_vec())
    };
    let shown = show("hub:org/talks", &["--rows", "4"], &online);
    assert_eq!(shown.code, 0, "{shown:?}");
    let preview: Value = serde_json::from_str(&shown.stdout).unwrap();
    let pinned = format!("hub:org/talks@{CONVERTED_COMMIT}:default/train");
    assert_eq!(preview["pinned"], json!(pinned));
    assert_eq!(preview["categories"], json!({"sums": 4, "talk": 2}));
    assert_eq!(preview["file"]["shapes"], json!(["sharegpt"]));
    assert_eq!(
        (&preview["rows"][3]["place"], preview["rows"].as_array().unwrap().len()),
        (&json!("row 4"), 4)
    );
    show("hub:org/talks:dev", &[], &online).assert_refused(&["no split", "has train", "H113"]);
    show("hub:org/private-sums", &[], &online)
        .assert_refused(&["hub:org/private-sums", "HF_TOKEN"]);
    let columns = ["--column", "prompt=question", "--column", "answer=solution"];
    let mut with_token = online;
    with_token.push(("HF_TOKEN".to_owned(), "hf_secret".to_owned()));
    let sums = show("hub:org/private-sums", &columns, &with_token);
    assert_eq!(sums.code, 0, "{sums:?}");
    let away = environment(&home, "http://127.0.0.1:9");
    assert!(show(&pinned, &["--rows", "4"], &away).stdout.contains("row 4"));

    let fleet = Fleet::start_with("evaluator", &[], with_token);
    let files = SpecFiles::create(fleet.path());
    let model = files.write_model().display().to_string();
    let spec = format!(
        "base: {{ model: '{model}' }}\nraft:\n  prompts: hub:org/private-sums\n  heldout: {{ count: 1 \
         }}\n  columns: {{ prompt: question, answer: solution }}\n  verifier: {{ numeric: {{}} }}\n"
    );
    let directory = files.path("mine.yaml").parent().unwrap().to_owned();
    write(&directory, "mine.yaml", &spec);
    let path = files.path("mine.yaml").display().to_string();
    let dir = fleet.path().display().to_string();
    let submitted = run_flotilla(&["run", "submit", &path, "--dir", &dir], away);
    assert_eq!(submitted.code, 0, "{submitted:?}");
    let shown = fleet.run_json(&["run", "show", submitted.stdout.trim()]).unwrap();
    let source = &shown["dataSources"][0];
    assert_eq!(source["name"], "hub:org/private-sums");
    let pinned = source["pinned"].as_str().unwrap();
    assert!(pinned.starts_with("hub:org/private-sums@0123456789abcdef"), "{pinned}");
}

/// Downloads a data set with the hub's own library, and looks for one that flotilla downloaded.
const LIBRARY: &str = "
import sys, huggingface_hub as hub
own, other, revision = sys.argv[1:]
hub.snapshot_download(own, repo_type='dataset', revision=revision)
found = hub.snapshot_download(other, repo_type='dataset', revision=revision, local_files_only=True)
print(open(found + '/default/train/0000.parquet', 'rb').read(4).decode())
cache = hub.scan_cache_dir()
assert len(cache.repos) == 2 and not cache.warnings, cache
";

#[test]
fn the_hub_s_own_library_and_flotilla_share_a_cache() {
    let Some(python) = requirements::require_torch_python() else { return };
    let home = tempfile::tempdir().unwrap();
    let hub = home.path().join("hub");
    for name in ["one", "two"] {
        let path = format!("datasets/org/{name}.parquet/default/train/0000.parquet");
        write(&hub, &path, golden_rows("conversations.parquet"));
        write(&hub, &format!("datasets/org/{name}/README.md"), "# Talks");
    }
    let server = HubServer::start(&hub).unwrap();
    let online = environment(&home, &server.url());
    let show = |name: &str, environment: Vec<(String, String)>| {
        let shown = run_flotilla(&["data", "show", name, "--json"], environment);
        assert_eq!(shown.code, 0, "{shown:?}");
        serde_json::from_str::<Value>(&shown.stdout).unwrap()
    };
    show("hub:org/two", online.clone());
    let output = std::process::Command::new(python)
        .args(["-c", LIBRARY, "org/one", "org/two", "refs/convert/parquet"])
        .envs(online)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), "PAR1");
    drop(server);
    let mut offline = environment(&home, "http://127.0.0.1:9");
    offline.push(("HF_HUB_OFFLINE".to_owned(), "1".to_owned()));
    let preview = show("hub:org/one", offline);
    let pinned = format!("hub:org/one@{CONVERTED_COMMIT}:default/train");
    assert_eq!((&preview["pinned"], &preview["file"]["lines"]), (&json!(pinned), &json!("3")));
}
