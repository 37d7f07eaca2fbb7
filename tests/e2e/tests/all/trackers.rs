//! Feeds to experiment trackers. Each tracker contains every metric exactly once.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use e2e::{ChildGuard, Fleet, GroupGuard, PythonEnv, ScriptSession, SpecFiles};
use requirements::free_ports;
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

/// Values by key and step.
type Metrics = BTreeMap<String, BTreeMap<u64, f64>>;

/// Returns the training and eval metrics of a run from the log.
fn logged_metrics(fleet: &Fleet, run: &str) -> Metrics {
    let mut logged_metrics = Metrics::new();
    let mut add = |key: &str, step: &Value, value: &Value| {
        let (step, value) = (step.as_u64().expect("a step"), value.as_f64().expect("a value"));
        logged_metrics.entry(key.to_owned()).or_default().insert(step, value);
    };
    for fact in fleet.read_facts(run) {
        let subject = fact["subject"].as_str().expect("a subject");
        let fact = &fact["fact"];
        if subject.contains(".checkpoint.") && fact["step"].as_u64() > Some(0) {
            add("train/loss", &fact["step"], &fact["loss"]);
        } else if subject.contains(".eval.") {
            add("eval/heldout/perplexity", &fact["step"], &fact["perplexity"]);
        }
    }
    assert!(
        logged_metrics["train/loss"].len() >= 10
            && logged_metrics["eval/heldout/perplexity"].len() >= 10
    );
    logged_metrics
}

fn assert_same_metrics(expected: &Metrics, found: &Value) {
    for (key, points) in expected {
        let reported =
            found["figures"][key].as_array().unwrap_or_else(|| panic!("no {key}: {found}"));
        assert_eq!(reported.len(), points.len(), "{key}: {reported:?}");
        for point in reported {
            let (step, value) =
                (point[0].as_u64().expect("a step"), point[1].as_f64().expect("a value"));
            let expected = points.get(&step).unwrap_or_else(|| panic!("{key} has no step {step}"));
            // TensorBoard stores 32-bit floats.
            let rounding = f64::from(f32::EPSILON) * expected.abs().max(1.0);
            assert!((value - expected).abs() <= rounding, "{key} at {step}: {value}, {expected}");
        }
    }
}

fn run_training(fleet: &Fleet) -> String {
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(300, 30));
    fleet.await_success(&run, LIMIT);
    run
}

fn feed_command(fleet: &Fleet, arguments: &[&str]) -> Command {
    let mut feed_command = Command::new(e2e::program_path());
    feed_command.arg("feed").args(arguments).env("FLOTILLA_DIR", fleet.path());
    feed_command.stdout(Stdio::null()).stderr(Stdio::null());
    feed_command
}

fn log_file(directory: &Path, name: &str) -> Stdio {
    std::fs::File::create(directory.join(name)).expect("a log").into()
}

fn start_mlflow(python: &PythonEnv, directory: &Path, port: u16) -> GroupGuard {
    let database = format!("sqlite:///{}", directory.join("mlflow.db").display());
    let port = port.to_string();
    let mut server = python.command("mlflow");
    server
        .args(["server", "--backend-store-uri", &database, "--host", "127.0.0.1"])
        .args(["--port", &port, "--workers", "1"])
        // Else it starts seven processes that compute for long.
        .env("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
        .current_dir(directory)
        .stdout(log_file(directory, "mlflow.out"))
        .stderr(log_file(directory, "mlflow.err"));
    GroupGuard::start(&mut server)
}

#[test]
fn mlflow_has_every_metric_once_after_an_outage_and_a_killed_feed() {
    let Some(python) = PythonEnv::with_trackers() else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let run = run_training(&fleet);
    let [port] = free_ports();
    let url = format!("http://127.0.0.1:{port}");
    // The feed waits until the server starts.
    let mut feeding = ChildGuard(feed_command(&fleet, &["mlflow", &url]).spawn().unwrap());
    let _server = start_mlflow(&python, fleet.path(), port);
    let mut script = ScriptSession::start(python.script_command("trackers.py"));
    e2e::wait_until("MLflow has the run", LIMIT, || {
        // The client tries for minutes if nothing listens.
        TcpStream::connect(("127.0.0.1", port)).ok()?;
        let reported = script.ask(&["mlflow", &url, "flotilla"]).ok()?;
        reported[&run]["figures"]["train/loss"].as_array().map(drop)
    });
    feeding.0.kill().unwrap();
    feeding.0.wait().unwrap();
    // Another feed finds the first run already complete, and adds the second one.
    let second = run_training(&fleet);
    for _ in 0..2 {
        let status = feed_command(&fleet, &["mlflow", &url, "--once"]).status().unwrap();
        assert!(status.success());
        script.ask(&["forget", &url, "flotilla"]).unwrap();
    }
    let reported = script.ask(&["mlflow", &url, "flotilla"]).unwrap();
    for run in [&run, &second] {
        assert_same_metrics(&logged_metrics(&fleet, run), &reported[run]);
        assert_eq!(reported[run]["status"], "FINISHED");
        assert_eq!(reported[run]["settings"]["sft.training.batchSize"], "16", "{}", reported[run]);
    }
    assert_traced(&mut script, &fleet, &url);
}

/// MLflow also accepts traces.
fn assert_traced(script: &mut ScriptSession, fleet: &Fleet, url: &str) {
    let experiment = script.ask(&["experiment", url, "flotilla"]).expect("its id");
    let header = format!("x-mlflow-experiment-id={}", experiment.as_str().expect("a number"));
    let state = fleet.path().join("otlp.json").display().to_string();
    for _ in 0..2 {
        let otlp = ["otlp", url, "--state", &state, "--header", &header, "--once"];
        assert!(feed_command(fleet, &otlp).status().expect("a feed").success());
    }
    let traces = script.ask(&["traces", url, "flotilla"]).expect("traces");
    let traces = traces.as_array().expect("a list");
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
fn tensorboard_reads_files_of_killed_feeds() {
    let Some(python) = PythonEnv::with_trackers() else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let logs = fleet.path().join("logs");
    let logdir = logs.display().to_string();
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(300, 30));
    // Kills the feed at arbitrary points.
    for _ in 0..5 {
        let mut feeding =
            ChildGuard(feed_command(&fleet, &["tensorboard", &logdir]).spawn().unwrap());
        std::thread::sleep(Duration::from_millis(300));
        feeding.0.kill().unwrap();
    }
    fleet.await_success(&run, LIMIT);
    let status =
        feed_command(&fleet, &["tensorboard", &logdir, "--run", &run, "--once"]).status().unwrap();
    assert!(status.success());
    let [port] = free_ports().map(|port| port.to_string());
    let server = python
        .command("tensorboard")
        .args(["--logdir", &logdir, "--port", &port, "--host", "127.0.0.1"])
        .stdout(log_file(fleet.path(), "tensorboard.out"))
        .stderr(log_file(fleet.path(), "tensorboard.err"))
        .spawn();
    let _server = ChildGuard(server.expect("TensorBoard starts"));
    let url = format!("http://127.0.0.1:{port}");
    let expected = logged_metrics(&fleet, &run);
    let mut script = ScriptSession::start(python.script_command("trackers.py"));
    let reported = e2e::wait_until("TensorBoard has the run", LIMIT, || {
        let reported = script.ask(&["tensorboard", &url]).ok()?;
        let evals = reported[&run]["figures"]["eval/heldout/perplexity"].as_array()?.len();
        (evals == expected["eval/heldout/perplexity"].len()).then_some(reported)
    });
    assert_same_metrics(&expected, &reported[&run]);
}

#[test]
fn trackio_has_every_metric_once_after_repeated_feeds() {
    let Some(python) = PythonEnv::with_trackers() else { return };
    let fleet = Fleet::start_open("trainer,evaluator");
    let run = run_training(&fleet);
    let home = fleet.path().join("trackio");
    let [port] = free_ports();
    let mut server = python
        .script_command("trackers.py")
        .args(["serve-trackio", &port.to_string()])
        .env("TRACKIO_DIR", &home)
        .env("HF_HUB_OFFLINE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log_file(fleet.path(), "trackio.err"))
        .spawn()
        .expect("trackio starts");
    let mut output = BufReader::new(server.stdout.take().unwrap()).lines().map_while(Result::ok);
    let _server = ChildGuard(server);
    // trackio prints a greeting before the token.
    let token = output.find(|line| line.len() > 20 && !line.contains(' ')).expect("a token");
    let token_file = fleet.path().join("token");
    std::fs::write(&token_file, token).unwrap();
    let token_file = token_file.display().to_string();
    let url = format!("http://127.0.0.1:{port}");
    let wrong = feed_command(&fleet, &["trackio", &url, "--once"]).status().unwrap();
    assert!(!wrong.success(), "it asks for a token");
    for _ in 0..2 {
        let mut once =
            feed_command(&fleet, &["trackio", &url, "--token-file", &token_file, "--once"]);
        assert!(once.status().unwrap().success());
    }
    let mut script = python.script_command("trackers.py");
    script.env("TRACKIO_DIR", &home);
    let reported = ScriptSession::start(script).ask(&["trackio", "flotilla"]).unwrap();
    assert_same_metrics(&logged_metrics(&fleet, &run), &reported[&run]);
}

#[test]
fn files_and_webhooks_have_every_fact_once_and_in_order() {
    let fleet = Fleet::start_open("trainer,evaluator");
    let run = run_training(&fleet);
    let directory = fleet.path().join("facts");
    let to = directory.display().to_string();
    for _ in 0..2 {
        let status = feed_command(&fleet, &["files", &to, "--once"]).status().unwrap();
        assert!(status.success());
    }
    let text = std::fs::read_to_string(directory.join(format!("{run}.jsonl"))).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sequences: Vec<u64> = lines.iter().map(|it| it["sequence"].as_u64().unwrap()).collect();
    assert!(sequences.windows(2).all(|two| two[0] < two[1]), "{sequences:?}");
    let small = |fact: &&Value| !fact["subject"].as_str().unwrap().contains(".order.");
    assert_eq!(lines.len(), fleet.read_facts(&run).iter().filter(small).count());

    let unknown =
        feed_command(&fleet, &["files", &to, "--run", "nobody-1", "--once"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(1));
    let hook = start_webhook();
    let state = fleet.path().join("hook.json").display().to_string();
    let url = format!("http://127.0.0.1:{}/hook", hook.port);
    for _ in 0..2 {
        let status =
            feed_command(&fleet, &["webhook", &url, "--state", &state, "--once"]).status().unwrap();
        assert!(status.success());
    }
    let received: Vec<u64> = std::iter::from_fn(|| hook.received.try_recv().ok()).collect();
    assert_eq!(received, sequences);
}

/// A webhook receiver that is busy at the first request.
struct Webhook {
    port: u16,
    received: std::sync::mpsc::Receiver<u64>,
}

fn start_webhook() -> Webhook {
    use std::io::{Read, Write};

    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("its address").port();
    let (sender, received) = std::sync::mpsc::channel();
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
                    sender.send(fact["sequence"].as_u64().expect("a place")).expect("a listener");
                }
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n");
                stream.write_all(answer.as_bytes()).expect("an answer");
            }
        }
    });
    Webhook { port, received }
}
