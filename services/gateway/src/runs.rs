//! `flotilla.v1.Runs`.

use bytes::Bytes;
use control::{AuditReport, Depth, Files, Finding, RunError, Submitted, timestamp};
use futures::{StreamExt, stream::select_all};
use tonic::{Request, Response, Status};
use wire::{Place, Record, RunId, Subject, v1};

use crate::{
    arguments,
    call::{Calls, Items, called, deadline},
    rpc::runs_server,
};

pub(crate) struct Runs(pub(crate) Calls);

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl runs_server::Runs for Runs {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Answer<v1::SubmitResponse> {
        let v1::SubmitRequest { spec_yaml, files, check_only } = request.into_inner();
        let submit = async {
            let yaml = arguments::spec_yaml(&spec_yaml)?;
            let files = files.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes)));
            let files = Files::Attached(files.collect());
            if check_only {
                let data = self.0.control.check(yaml, &files).await?;
                return Ok(v1::SubmitResponse { run: String::new(), data: Some(data) });
            }
            let Submitted { run, report } = self.0.control.submit(yaml, &files).await?;
            tracing::info!(%run, "submitted");
            Ok(v1::SubmitResponse { run: run.to_string(), data: Some(report) })
        };
        self.0.unary(called("Runs.Submit", ""), submit).await
    }

    async fn get(&self, request: Request<v1::GetRunRequest>) -> Answer<v1::Run> {
        let v1::GetRunRequest { run } = request.into_inner();
        let get = async {
            let run = RunId::new(run.as_str())?;
            Ok(control::view(&self.0.control.run(&run).await?))
        };
        self.0.unary(called("Runs.Get", &run), get).await
    }

    async fn list(&self, _: Request<v1::ListRunsRequest>) -> Answer<v1::ListRunsResponse> {
        let list = async {
            let runs = self.0.control.runs().await?;
            Ok(v1::ListRunsResponse { runs: runs.iter().map(control::view).collect() })
        };
        self.0.unary(called("Runs.List", ""), list).await
    }

    async fn pause(&self, request: Request<v1::ControlRequest>) -> Answer<v1::ControlResponse> {
        self.steer("Runs.Pause", v1::control::Action::Pause, request.into_inner()).await
    }

    async fn resume(&self, request: Request<v1::ControlRequest>) -> Answer<v1::ControlResponse> {
        self.steer("Runs.Resume", v1::control::Action::Resume, request.into_inner()).await
    }

    async fn cancel(&self, request: Request<v1::ControlRequest>) -> Answer<v1::ControlResponse> {
        self.steer("Runs.Cancel", v1::control::Action::Cancel, request.into_inner()).await
    }

    async fn audit(&self, request: Request<v1::AuditRequest>) -> Answer<v1::AuditReport> {
        let v1::AuditRequest { run, no_store } = request.into_inner();
        let audit = async {
            let run = RunId::new(run.as_str())?;
            let depth = if no_store { Depth::Log } else { Depth::Files };
            Ok(report(self.0.control.audit(&run, depth, &|_| ()).await?))
        };
        self.0.unary(called("Runs.Audit", &run), audit).await
    }

    type WatchStream = Items<v1::RunEvent>;

    async fn watch(&self, request: Request<v1::WatchRunRequest>) -> Answer<Self::WatchStream> {
        let deadline = deadline(&request);
        let v1::WatchRunRequest { run, after } = request.into_inner();
        let open = async {
            let run = RunId::new(run.as_str())?;
            let records = self.0.control.watch_run(&run, after).await?;
            Ok(records.map(|record| record.map(event)))
        };
        self.0.stream(called("Runs.Watch", &run), deadline, open).await
    }

    type BoardStream = Items<v1::Board>;

    async fn board(&self, request: Request<v1::BoardRequest>) -> Answer<Self::BoardStream> {
        let deadline = deadline(&request);
        let v1::BoardRequest { runs } = request.into_inner();
        let call = called("Runs.Board", &runs.join(","));
        let open = async {
            let mut boards = Vec::new();
            for run in arguments::runs(&runs)? {
                self.0.known(&run).await?;
                boards.push(self.0.board(&run)?.changes().boxed());
            }
            Ok(select_all(boards))
        };
        self.0.stream(call, deadline, open).await
    }

    async fn samples(&self, request: Request<v1::SamplesRequest>) -> Answer<v1::SamplesPage> {
        let request = request.into_inner();
        let call = called("Runs.Samples", &request.run);
        let samples = async {
            let run = RunId::new(request.run.as_str())?;
            let _reading = self.0.reading().await;
            Ok(self.0.control.samples(&run, &request).await?)
        };
        self.0.unary(call, samples).await
    }
}

impl Runs {
    async fn steer(
        &self,
        method: &'static str,
        action: v1::control::Action,
        request: v1::ControlRequest,
    ) -> Answer<v1::ControlResponse> {
        let v1::ControlRequest { run, reason } = request;
        let steer = async {
            let run = RunId::new(run.as_str())?;
            self.0.control.steer(&run, action, arguments::reason(&reason)?).await?;
            Ok(v1::ControlResponse {})
        };
        self.0.unary(called(method, &run), steer).await
    }
}

impl Calls {
    /// So that a misspelt run is an error and not an empty answer.
    pub(crate) async fn known(&self, run: &RunId) -> Result<(), RunError> {
        let spec = Subject::new(run, Place::Spec).to_string();
        match self.control.bus().get(&spec).await? {
            Some(_) => Ok(()),
            None => Err(RunError::Unknown(run.clone())),
        }
    }
}

fn report(report: AuditReport) -> v1::AuditReport {
    let finding = |finding: Finding| v1::audit_report::Finding {
        r#where: finding.place.as_str().into(),
        what: finding.what,
        subject: finding.subject.unwrap_or_default(),
        sequence: finding.sequence.unwrap_or_default(),
        url: finding.url.unwrap_or_default(),
        expected: finding.expected.unwrap_or_default(),
        found: finding.found.unwrap_or_default(),
    };
    let AuditReport { tally, checked, not_checked, findings, findings_left_out, .. } = report;
    v1::AuditReport {
        facts: tally.facts,
        planned_samples: tally.planned_samples,
        accepted_samples: tally.accepted_samples,
        judged_samples: tally.judged_samples,
        kept_samples: tally.kept_samples,
        checkpoints: tally.checkpoints,
        evals: tally.evals,
        checked: checked.into_iter().map(str::to_owned).collect(),
        not_checked,
        findings: findings.into_iter().map(finding).collect(),
        findings_left_out,
    }
}

fn event(record: Record) -> v1::RunEvent {
    v1::RunEvent {
        cursor: record.sequence,
        at: Some(timestamp(record.time_ms)),
        subject: record.fact.subject.to_string(),
        author: record.author.as_ref().map(ToString::to_string).unwrap_or_default(),
        json: String::from_utf8(record.fact.encode()).expect("JSON is UTF-8"),
    }
}
