//! Feeds, to the trackers people have: as their own programs tell it, nothing is missing and
//! nothing is there twice.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{Ended, Files, Fleet, Python, nats};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

/// By key: value by step.
type Figures = BTreeMap<String, BTreeMap<u64, f64>>;

/// What the log has of a run's training and evals.
fn figures(fleet: &Fleet, run: &str) -> Figures {
    let mut figures = Figures::new();
    let mut add = |key: &str, step: &Value, value: &Value| {
        let (step, value) = (step.as_u64().expect("a step"), value.as_f64().expect("a value"));
        figures.entry(key.to_owned()).or_default().insert(step, value);
    };
    for fact in fleet.facts(run) {
        let subject = fact["subject"].as_str().expect("a subject");
        let fact = &fact["fact"];
        if subject.contains(".checkpoint.") && fact["step"].as_u64() > Some(0) {
            add("train/loss", &fact["step"], &fact["loss"]);
        } else if subject.contains(".eval.") {
            add("eval/heldout/perplexity", &fact["step"], &fact["perplexity"]);
        }
    }
    assert!(figures["train/loss"].len() >= 10 && figures["eval/heldout/perplexity"].len() >= 10);
    figures
}

fn assert_same(expected: &Figures, found: &Value) {
    for (key, points) in expected {
        let told = found["figures"][key].as_array().unwrap_or_else(|| panic!("no {key}: {found}"));
        assert_eq!(told.len(), points.len(), "{key}: {told:?}");
        for point in told {
            let (step, value) =
                (point[0].as_u64().expect("a step"), point[1].as_f64().expect("a value"));
            let expected = points.get(&step).unwrap_or_else(|| panic!("{key} has no step {step}"));
            // TensorBoard has no other numbers.
            let rounding = f64::from(f32::EPSILON) * expected.abs().max(1.0);
            assert!((value - expected).abs() <= rounding, "{key} at {step}: {value}, {expected}");
        }
    }
}

fn trained(fleet: &Fleet) -> String {
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(300, 30));
    fleet.finish(&run, LIMIT);
    run
}

fn feed(fleet: &Fleet, arguments: &[&str]) -> Command {
    let mut feed = Command::new(e2e::binary());
    feed.arg("feed").args(arguments).env("FLOTILLA_DIR", fleet.path());
    feed.stdout(Stdio::null()).stderr(Stdio::null());
    feed
}

fn free_port() -> u16 {
    let [port] = nats::free_ports();
    port
}

fn log(directory: &Path, name: &str) -> Stdio {
    std::fs::File::create(directory.join(name)).expect("a log").into()
}

fn mlflow(python: &Python, directory: &Path, port: u16) -> Ended {
    let database = format!("sqlite:///{}", directory.join("mlflow.db").display());
    let port = port.to_string();
    let server = python
        .program("mlflow")
        .args(["server", "--backend-store-uri", &database, "--host", "127.0.0.1"])
        .args(["--port", &port, "--workers", "1"])
        .current_dir(directory)
        .stdout(log(directory, "mlflow.out"))
        .stderr(log(directory, "mlflow.err"))
        .spawn();
    Ended(server.expect("MLflow starts"))
}

#[test]
fn mlflow_has_every_figure_once_though_it_was_away_and_its_feed_was_killed() {
    let Some(python) = Python::with_trackers() else { return };
    let fleet = Fleet::open("trainer,evaluator");
    let run = trained(&fleet);
    let port = free_port();
    let url = format!("http://127.0.0.1:{port}");
    // It waits for a server that is not there yet.
    let mut feeding = Ended(feed(&fleet, &["mlflow", &url]).spawn().unwrap());
    let _server = mlflow(&python, fleet.path(), port);
    let tell = || {
        let script = python.script("trackers.py").args(["mlflow", &url, "flotilla"]).output();
        serde_json::from_slice::<Value>(&script.unwrap().stdout).ok()
    };
    e2e::until("MLflow has the run", LIMIT, || {
        tell()?[&run]["figures"]["train/loss"].as_array().map(drop)
    });
    feeding.0.kill().unwrap();
    feeding.0.wait().unwrap();
    // Another run, told by another feed, which finds the first one told.
    let second = trained(&fleet);
    for _ in 0..2 {
        let told = feed(&fleet, &["mlflow", &url, "--once"]).status().unwrap();
        assert!(told.success());
        let forgotten = python.script("trackers.py").args(["forget", &url, "flotilla"]).status();
        assert!(forgotten.unwrap().success());
    }
    let told = tell().expect("MLflow answers");
    for run in [&run, &second] {
        assert_same(&figures(&fleet, run), &told[run]);
        assert_eq!(told[run]["status"], "FINISHED");
        assert_eq!(told[run]["settings"]["sft.training.batchSize"], "16", "{}", told[run]);
    }
    assert_traced(&python, &fleet, &url);
}

/// MLflow takes traces as well.
fn assert_traced(python: &Python, fleet: &Fleet, url: &str) {
    let ask = |what: &str| {
        let output = python
            .script("trackers.py")
            .args([what, url, "flotilla"])
            .output()
            .expect("Python starts");
        let said = String::from_utf8_lossy(&output.stderr);
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| panic!("{what}: {said}"))
    };
    let experiment = ask("experiment");
    let header = format!("x-mlflow-experiment-id={}", experiment.as_str().expect("a number"));
    let state = fleet.path().join("otlp.json").display().to_string();
    for _ in 0..2 {
        let otlp = ["otlp", url, "--state", &state, "--header", &header, "--once"];
        assert!(feed(fleet, &otlp).status().expect("a feed").success());
    }
    let traces = ask("traces");
    let traces = traces.as_array().expect("traces");
    assert_eq!(traces.len(), 2, "one of each run: {traces:?}");
    for trace in traces {
        let spans = trace.as_array().expect("spans");
        let count = |name: &str, parent: &str| {
            spans.iter().filter(|span| span[0] == name && span[1] == parent).count()
        };
        assert_eq!(count("train", "cycle 0"), 1, "{spans:?}");
        assert_eq!((count("checkpoint", "train"), count("eval", "cycle 0")), (10, 10), "{spans:?}");
    }
}

#[test]
fn tensorboard_reads_what_was_written_in_two_parts() {
    let Some(python) = Python::with_trackers() else { return };
    let fleet = Fleet::open("trainer,evaluator");
    let logs = fleet.path().join("logs");
    let logdir = logs.display().to_string();
    let files = Files::create(fleet.path());
    let run = fleet.submit(&files.sft(300, 30));
    // Killed wherever it is just then.
    for _ in 0..5 {
        let mut feeding = Ended(feed(&fleet, &["tensorboard", &logdir]).spawn().unwrap());
        std::thread::sleep(Duration::from_millis(300));
        feeding.0.kill().unwrap();
    }
    fleet.finish(&run, LIMIT);
    let told = feed(&fleet, &["tensorboard", &logdir, "--run", &run, "--once"]).status().unwrap();
    assert!(told.success());
    let port = free_port().to_string();
    let server = python
        .program("tensorboard")
        .args(["--logdir", &logdir, "--port", &port, "--host", "127.0.0.1"])
        .stdout(log(fleet.path(), "tensorboard.out"))
        .stderr(log(fleet.path(), "tensorboard.err"))
        .spawn();
    let _server = Ended(server.expect("TensorBoard starts"));
    let url = format!("http://127.0.0.1:{port}");
    let expected = figures(&fleet, &run);
    let told = e2e::until("TensorBoard has the run", LIMIT, || {
        let script = python.script("trackers.py").args(["tensorboard", &url]).output().unwrap();
        let told: Value = serde_json::from_slice(&script.stdout).ok()?;
        let evals = told[&run]["figures"]["eval/heldout/perplexity"].as_array()?.len();
        (evals == expected["eval/heldout/perplexity"].len()).then_some(told)
    });
    assert_same(&expected, &told[&run]);
}

#[test]
fn trackio_has_every_figure_once_however_often_it_is_told() {
    let Some(python) = Python::with_trackers() else { return };
    let fleet = Fleet::open("trainer,evaluator");
    let run = trained(&fleet);
    let home = fleet.path().join("trackio");
    let port = free_port();
    let mut server = python
        .script("trackers.py")
        .args(["serve-trackio", &port.to_string()])
        .env("TRACKIO_DIR", &home)
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log(fleet.path(), "trackio.err"))
        .spawn()
        .expect("trackio starts");
    let mut said = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let _server = Ended(server);
    // It greets before it says what was asked for.
    let token = said.find(|line| line.len() > 20 && !line.contains(' ')).expect("a token");
    let token_file = fleet.path().join("token");
    std::fs::write(&token_file, token).unwrap();
    let token_file = token_file.display().to_string();
    let url = format!("http://127.0.0.1:{port}");
    let wrong = feed(&fleet, &["trackio", &url, "--once"]).status().unwrap();
    assert!(!wrong.success(), "it asks for a token");
    for _ in 0..2 {
        let told = feed(&fleet, &["trackio", &url, "--token-file", &token_file, "--once"]);
        assert!({ told }.status().unwrap().success());
    }
    let script = python
        .script("trackers.py")
        .args(["trackio", "flotilla"])
        .env("TRACKIO_DIR", &home)
        .output()
        .unwrap();
    let told: Value = serde_json::from_slice(&script.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&script.stderr)));
    assert_same(&figures(&fleet, &run), &told[&run]);
}

#[test]
fn files_and_webhooks_have_every_fact_once_and_in_order() {
    let fleet = Fleet::open("trainer,evaluator");
    let run = trained(&fleet);
    let directory = fleet.path().join("facts");
    let to = directory.display().to_string();
    for _ in 0..2 {
        let told = feed(&fleet, &["files", &to, "--once"]).status().unwrap();
        assert!(told.success());
    }
    let text = std::fs::read_to_string(directory.join(format!("{run}.jsonl"))).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sequences: Vec<u64> = lines.iter().map(|it| it["sequence"].as_u64().unwrap()).collect();
    assert!(sequences.windows(2).all(|two| two[0] < two[1]), "{sequences:?}");
    let small = |fact: &&Value| !fact["subject"].as_str().unwrap().contains(".order.");
    assert_eq!(lines.len(), fleet.facts(&run).iter().filter(small).count());

    let unknown = feed(&fleet, &["files", &to, "--run", "nobody-1", "--once"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    let hook = hook();
    let state = fleet.path().join("hook.json").display().to_string();
    let url = format!("http://127.0.0.1:{}/hook", hook.port);
    for _ in 0..2 {
        let told = feed(&fleet, &["webhook", &url, "--state", &state, "--once"]).status().unwrap();
        assert!(told.success());
    }
    let heard: Vec<u64> = std::iter::from_fn(|| hook.heard.try_recv().ok()).collect();
    assert_eq!(heard, sequences);
}

/// Takes what is posted; the first time it is busy.
struct Hook {
    port: u16,
    heard: std::sync::mpsc::Receiver<u64>,
}

fn hook() -> Hook {
    use std::io::{Read, Write};

    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its address").port();
    let (tell, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut busy = true;
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut reader = BufReader::new(stream.try_clone().expect("a reader"));
            loop {
                let mut length = 0;
                let mut line = String::new();
                while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 0) && line != "\r\n" {
                    if let Some(bytes) = line.to_lowercase().strip_prefix("content-length: ") {
                        length = bytes.trim().parse().expect("a length");
                    }
                    line.clear();
                }
                if line.is_empty() {
                    break;
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).expect("a body");
                let status = if std::mem::take(&mut busy) { "503 Busy" } else { "200 OK" };
                if status == "200 OK" {
                    let fact: Value = serde_json::from_slice(&body).expect("JSON");
                    tell.send(fact["sequence"].as_u64().expect("a place")).expect("a listener");
                }
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).expect("an answer");
            }
        }
    });
    Hook { port, heard }
}
