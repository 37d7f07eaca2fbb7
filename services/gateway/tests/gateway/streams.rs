//! Watching runs and evals, and downloading.

use std::time::Duration;

use tonic::{Code, Request};
use wire::{
    FactBody,
    v1::{self, eval_event::Result as EvalResult},
};

use crate::rig::{Rig, next};

fn eval_step(event: &v1::EvalEvent) -> u32 {
    match &event.result {
        Some(EvalResult::Eval(eval)) => eval.step,
        other => panic!("not a perplexity: {other:?}"),
    }
}

#[tokio::test]
async fn a_watched_run_is_resumed_from_its_cursor_and_ends_with_the_run() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let watch = |after| v1::WatchRunRequest { run: run.clone(), after };
    let mut stream = rig.runs().watch(watch(0)).await.unwrap().into_inner();
    let spec = next(&mut stream).await.unwrap().unwrap();
    assert_eq!(spec.subject, format!("flotilla.{run}.spec"));
    assert!(spec.json.contains("\"sums\"") && spec.at.is_some(), "{spec:?}");
    let mut seen = vec![spec.cursor];
    for step in 1..=3 {
        rig.publish_eval(&run, step).await;
        seen.push(next(&mut stream).await.unwrap().unwrap().cursor);
    }
    drop(stream);

    let missed = rig.publish_eval(&run, 4).await;
    let last = *seen.last().unwrap();
    let mut stream = rig.runs().watch(watch(last)).await.unwrap().into_inner();
    assert_eq!(next(&mut stream).await.unwrap().unwrap().cursor, missed);
    let done = rig.finish(&run).await;
    assert_eq!(next(&mut stream).await.unwrap().unwrap().cursor, done);
    assert!(next(&mut stream).await.unwrap().is_none());
    seen.extend([missed, done]);

    let mut again = rig.runs().watch(watch(0)).await.unwrap().into_inner();
    let mut all = Vec::new();
    while let Some(event) = next(&mut again).await.unwrap() {
        all.push(event.cursor);
    }
    assert_eq!(all, seen);
    let mut over = rig.runs().watch(watch(done)).await.unwrap().into_inner();
    assert!(next(&mut over).await.unwrap().is_none());
}

#[tokio::test]
async fn evals_come_as_they_are_measured_and_from_a_cursor() {
    let rig = Rig::start().await;
    let (ours, other) = (rig.submit().await, rig.submit().await);
    let filter = v1::EvalFilter { run: ours.clone(), suite: "held".into() };
    let watch = |after| v1::WatchEvalsRequest { filter: Some(filter.clone()), after };
    rig.publish_eval(&ours, 1).await;
    let mut stream = rig.evals().watch(watch(0)).await.unwrap().into_inner();
    let first = next(&mut stream).await.unwrap().unwrap();
    rig.publish_eval(&other, 1).await;
    rig.publish_eval(&ours, 2).await;
    let second = next(&mut stream).await.unwrap().unwrap();
    assert_eq!((eval_step(&first), eval_step(&second)), (1, 2));

    let mut resumed = rig.evals().watch(watch(first.cursor)).await.unwrap().into_inner();
    assert_eq!(next(&mut resumed).await.unwrap().unwrap(), second);
    let history = rig.evals().history(filter.clone()).await.unwrap().into_inner().evals;
    assert_eq!(history.len(), 2);
    let all = rig.evals().history(v1::EvalFilter::default()).await.unwrap().into_inner().evals;
    assert_eq!(all.len(), 3);
    let none = v1::EvalFilter { suite: "other".into(), ..filter.clone() };
    let watched = v1::WatchEvalsRequest { filter: Some(none.clone()), after: 0 };
    let refusals = [
        rig.evals().history(none).await.map(drop).unwrap_err(),
        rig.evals().watch(watched).await.map(drop).unwrap_err(),
    ];
    for refused in refusals {
        assert_eq!(refused.code(), Code::NotFound);
        let said = format!("run {ours} has no suite \"other\"; its suites are: held (R107)");
        assert_eq!(refused.message(), said);
    }
}

#[tokio::test]
async fn pass_rates_come_in_the_same_stream() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let mut stream =
        rig.evals().watch(v1::WatchEvalsRequest::default()).await.unwrap().into_inner();
    rig.publish_eval(&run, 1).await;
    let suite = v1::cycle_done::SuiteRate { suite: "hard".into(), ..Default::default() };
    let rates = v1::PassRates { cycle: 1, suites: vec![suite], ..Default::default() };
    let subject = format!("flotilla.{run}.eval.1.pass-rates");
    rig.publish(&subject, FactBody::PassRates(rates.clone())).await;
    assert_eq!(eval_step(&next(&mut stream).await.unwrap().unwrap()), 1);
    let second = next(&mut stream).await.unwrap().unwrap();
    assert_eq!(second.result, Some(EvalResult::PassRates(rates)));
    let filter = v1::EvalFilter { suite: "hard".into(), ..Default::default() };
    let history = rig.evals().history(filter).await.unwrap().into_inner().evals;
    assert_eq!(history, [second]);
}

#[tokio::test]
async fn a_watch_goes_on_when_the_bus_was_restarted() {
    let mut rig = Rig::start().await;
    let run = rig.submit().await;
    let mut stream =
        rig.evals().watch(v1::WatchEvalsRequest::default()).await.unwrap().into_inner();
    rig.publish_eval(&run, 1).await;
    assert_eq!(eval_step(&next(&mut stream).await.unwrap().unwrap()), 1);
    rig.nats.restart().await.unwrap();
    rig.publish_eval(&run, 2).await;
    assert_eq!(eval_step(&next(&mut stream).await.unwrap().unwrap()), 2);
}

#[tokio::test]
async fn a_stream_that_cannot_continue_reports_why() {
    let rig = Rig::start().await;
    let beyond = v1::WatchEvalsRequest { filter: None, after: u64::MAX };
    let mut stream = rig.evals().watch(beyond).await.unwrap().into_inner();
    let status = next(&mut stream).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");

    let mut short = Request::new(v1::WatchEvalsRequest::default());
    short.set_timeout(Duration::from_millis(300));
    let mut stream = rig.evals().watch(short).await.unwrap().into_inner();
    let status = next(&mut stream).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
}

#[tokio::test]
async fn a_checkpoint_is_downloaded_whole_and_damage_is_noticed() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let weights: Vec<u8> = (0_u32..700_000).flat_map(u32::to_le_bytes).collect();
    let made = rig.dir.path().join("made");
    std::fs::create_dir(&made).unwrap();
    std::fs::write(made.join("model.safetensors"), &weights).unwrap();
    let place = store::TreePlace::for_checkpoint(&run.parse().unwrap(), 1, 8);
    let tree = rig.store.publish_tree(&made, &place, store::TreeMetadata::default()).await.unwrap();
    let file = rig.dir.path().join("store").join(&tree.path).join("model.safetensors");
    let checkpoint = v1::Checkpoint {
        run: run.clone(),
        cycle: 1,
        step: 8,
        tree: Some(tree),
        ..Default::default()
    };
    rig.publish(&format!("flotilla.{run}.checkpoint.1.8"), FactBody::Checkpoint(checkpoint)).await;

    let list = v1::ListCheckpointsRequest { run: run.clone() };
    assert_eq!(rig.checkpoints().list(list).await.unwrap().into_inner().checkpoints.len(), 1);
    let reference = v1::CheckpointRef { run, ..Default::default() };
    let info = rig.checkpoints().get(reference.clone()).await.unwrap().into_inner();
    assert_eq!(info.files[0].bytes, weights.len() as u64);
    let download = async |path: &str| {
        let request =
            v1::DownloadRequest { checkpoint: Some(reference.clone()), path: path.into() };
        let mut stream = rig.checkpoints().download(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = next(&mut stream).await? {
            assert!(chunk.data.len() <= 1 << 20);
            bytes.extend(chunk.data);
        }
        Ok::<_, tonic::Status>(bytes)
    };
    assert!(download("model.safetensors").await.unwrap() == weights);
    let status = download("other.safetensors").await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");

    let mut damaged = weights.clone();
    damaged[1_000_000] ^= 1;
    std::fs::write(file, damaged).unwrap();
    let status = download("model.safetensors").await.unwrap_err();
    assert_eq!(status.code(), Code::DataLoss, "{status}");
}
