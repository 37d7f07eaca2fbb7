//! Submitting, reading and steering runs.

use tonic::Code;
use wire::v1::{self, run::State};

use crate::rig::{Rig, SPEC, submission};

#[tokio::test]
async fn a_wrong_submission_gets_an_error_that_names_the_field() {
    let rig = Rig::start().await;
    let mut no_data = submission(SPEC);
    no_data.files.remove("data.jsonl");
    let mut bad_data = submission(SPEC);
    bad_data.files.insert("data.jsonl".into(), b"{\"prompt\": 1}".to_vec());
    let on_checkpoint = |name| {
        submission(&SPEC.replace(
            "{ init: { config: config.json, tokenizer: tokenizer.json } }",
            &format!("{{ checkpoint: {name} }}"),
        ))
    };
    let cases = [
        (submission(""), vec!["spec_yaml"]),
        (
            submission("name: [unclosed"),
            vec!["a bracket of line 1 may be left open: name: ", "(R102)"],
        ),
        (submission(&SPEC.replace("sft:", "stf:")), vec!["line ", "unknown key stf"]),
        (submission(&SPEC.replace("n_ctx: 64", "n_ctx: 1")), vec!["evals[0].n_ctx", "from 8"]),
        (no_data, vec!["sft.data", "data.jsonl", "there is no file"]),
        (bad_data, vec!["sft.data", "line 1", "completion"]),
        (on_checkpoint("nope/x"), vec!["base.checkpoint", "nope/x"]),
        (on_checkpoint("nope-1"), vec!["base.checkpoint", "no run nope-1"]),
    ];
    for (request, words) in cases {
        let status = rig.runs().submit(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        for word in words {
            assert!(status.message().contains(word), "no {word:?} in: {}", status.message());
        }
    }
    let runs = rig.runs().list(v1::ListRunsRequest {}).await.unwrap().into_inner().runs;
    assert!(runs.is_empty(), "{runs:?}");
}

#[tokio::test]
async fn a_check_reports_on_a_submission_and_starts_nothing() {
    let rig = Rig::start().await;
    let request = v1::SubmitRequest { check_only: true, ..submission(SPEC) };
    let answer = rig.runs().submit(request).await.unwrap().into_inner();
    assert_eq!(answer.run, "");
    let file = &answer.data.unwrap().files[0];
    assert_eq!((file.field.as_str(), file.lines), ("sft.data", 1));
    let runs = rig.runs().list(v1::ListRunsRequest {}).await.unwrap().into_inner().runs;
    assert!(runs.is_empty(), "{runs:?}");
}

#[tokio::test]
async fn a_forecast_needs_agents_and_a_time_and_price_that_make_sense() {
    let rig = Rig::start().await;
    let ask = async |forecast| {
        let forecast = Some(forecast);
        let request = v1::SubmitRequest { check_only: true, forecast, ..submission(SPEC) };
        rig.runs().submit(request).await.unwrap_err()
    };
    let status = ask(v1::ForecastRequest::default()).await;
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert!(status.message().contains("no agents are there"), "{status}");
    let price_per_kwh = Some(-1.0);
    let status = ask(v1::ForecastRequest { price_per_kwh, by: None }).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let by = Some(wire::Timestamp { seconds: 1, nanos: 0 });
    let status = ask(v1::ForecastRequest { by, price_per_kwh: None }).await;
    assert!(status.message().contains("in the past"), "{status}");
}

#[tokio::test]
async fn a_submitted_run_is_listed_and_readable_even_with_large_files() {
    let rig = Rig::start().await;
    let mut request = submission(SPEC);
    request.files.insert("held.txt".into(), vec![b'x'; 6 << 20]);
    let run = rig.runs().submit(request).await.unwrap().into_inner().run;
    assert_eq!(run, "sums-1");
    assert_eq!(rig.submit().await, "sums-2");

    let listed = rig.runs().list(v1::ListRunsRequest {}).await.unwrap().into_inner().runs;
    let names: Vec<&str> = listed.iter().map(|run| run.run.as_str()).collect();
    assert_eq!(names, ["sums-1", "sums-2"]);
    let got = rig.runs().get(v1::GetRunRequest { run }).await.unwrap().into_inner();
    assert_eq!((got.kind.as_str(), got.state()), ("sft", State::Running));
    assert_eq!(got.phase, "plan");
    let without_phase = v1::Run { phase: String::new(), ..got };
    assert_eq!(without_phase, listed[0], "lists have no phase of a run that has not ended");
}

#[tokio::test]
async fn a_run_is_paused_resumed_and_cancelled_until_it_has_ended() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let mut runs = rig.runs();
    let request = || v1::ControlRequest { run: run.clone(), reason: "a test".into() };
    let state = async || {
        let request = v1::GetRunRequest { run: run.clone() };
        rig.runs().get(request).await.unwrap().into_inner().state()
    };
    runs.pause(request()).await.unwrap();
    runs.pause(request()).await.unwrap();
    assert_eq!(state().await, State::Paused);
    runs.resume(request()).await.unwrap();
    assert_eq!(state().await, State::Running);
    runs.cancel(request()).await.unwrap();
    let reason = "x".repeat(5000);
    let status = runs.pause(v1::ControlRequest { reason, ..request() }).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("field reason"), "{status}");

    rig.finish(&run).await;
    let status = runs.pause(request()).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_eq!(state().await, State::Succeeded);
}

#[tokio::test]
async fn unknown_names_are_not_found_and_illegal_ones_are_refused() {
    let rig = Rig::start().await;
    for (name, code) in [("nope-1", Code::NotFound), ("*", Code::InvalidArgument)] {
        let run = || name.to_owned();
        let agent = run();
        let filter = || v1::EvalFilter { run: run(), ..Default::default() };
        let reference = || v1::CheckpointRef { run: run(), ..Default::default() };
        let download =
            v1::DownloadRequest { checkpoint: Some(reference()), path: "config.json".into() };
        let watch_evals = v1::WatchEvalsRequest { filter: Some(filter()), after: 0 };
        let steer = v1::ControlRequest { run: run(), reason: String::new() };
        let statuses = [
            rig.runs().get(v1::GetRunRequest { run: run() }).await.err(),
            rig.runs().cancel(steer).await.err(),
            rig.runs().watch(v1::WatchRunRequest { run: run(), after: 0 }).await.err(),
            rig.evals().history(filter()).await.err(),
            rig.evals().watch(watch_evals).await.err(),
            rig.checkpoints().list(v1::ListCheckpointsRequest { run: run() }).await.err(),
            rig.checkpoints().get(reference()).await.err(),
            rig.checkpoints().download(download).await.err(),
            rig.fleet().drain(v1::DrainRequest { agent }).await.err(),
        ];
        for status in statuses.map(Option::unwrap) {
            assert_eq!(status.code(), code, "{status}");
            assert!(status.message().contains(name), "{status}");
        }
    }
    let reference = v1::CheckpointRef { run: "a-1".into(), ..Default::default() };
    for (checkpoint, path, field) in
        [(None, "config.json", "checkpoint"), (Some(reference), "../../passwd", "path")]
    {
        let request = v1::DownloadRequest { checkpoint, path: path.into() };
        let status = rig.checkpoints().download(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(field), "{status}");
    }
    let huge = v1::GetRunRequest { run: "é".repeat(30_000) };
    let status = rig.runs().get(huge).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
}
