//! The gRPC service `flotilla.v1.Runs`.

use bytes::Bytes;
use control::{
    AuditDepth, AuditFinding, AuditReport, RunError, SpecFiles, SubmittedRun, to_timestamp,
};
use futures::{StreamExt, stream::select_all};
use tonic::{Request, Response, Status};
use wire::{Record, RunId, v1};

use crate::{
    arguments,
    call::{CallContext, ItemStream, StreamCaller, caller_name, create_call_span},
    rpc::runs_server,
};

pub(crate) struct RunsService(pub(crate) CallContext);

type RunsResult<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl runs_server::Runs for RunsService {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> RunsResult<v1::SubmitResponse> {
        let user = caller_name(&request);
        let v1::SubmitRequest { spec_yaml, files, check_only, forecast } = request.into_inner();
        let submit = async {
            let yaml = arguments::require_spec_yaml(&spec_yaml)?;
            let files = files.into_iter().map(|(name, bytes)| (name, Bytes::from(bytes)));
            let files = SpecFiles::Attached(files.collect());
            if let (true, Some(forecast)) = (check_only, &forecast) {
                let found = self.0.control.forecast_spec(yaml, &files, forecast).await?;
                let (data, forecast) = (Some(found.0), Some(found.1));
                return Ok(v1::SubmitResponse { data, forecast, ..Default::default() });
            }
            if check_only {
                let data = self.0.control.check_spec(yaml, &files).await?;
                return Ok(v1::SubmitResponse { data: Some(data), ..Default::default() });
            }
            let submitted = self.0.control.submit_run(yaml, &files, &user).await?;
            let SubmittedRun { run, runs, report } = submitted;
            tracing::info!(%run, runs = runs.len(), "submitted");
            let runs = runs.iter().map(ToString::to_string).collect();
            let (run, data) = (run.to_string(), Some(report));
            Ok(v1::SubmitResponse { run, data, runs, forecast: None })
        };
        self.0.answer_unary(create_call_span("Runs.Submit", ""), submit).await
    }

    async fn fork(&self, request: Request<v1::ForkRequest>) -> RunsResult<v1::ForkResponse> {
        let user = caller_name(&request);
        let v1::ForkRequest { run, cycle, settings, name } = request.into_inner();
        let fork = async {
            let parent = RunId::new(run.as_str())?;
            let name = Some(name.as_str()).filter(|name| !name.is_empty());
            let run = self.0.control.fork_run(&parent, cycle, name, &settings, &user).await?;
            tracing::info!(%run, %parent, cycle, "forked");
            Ok(v1::ForkResponse { run: run.to_string() })
        };
        self.0.answer_unary(create_call_span("Runs.Fork", &run), fork).await
    }

    async fn get(&self, request: Request<v1::GetRunRequest>) -> RunsResult<v1::Run> {
        let v1::GetRunRequest { run } = request.into_inner();
        let get = async {
            let run = RunId::new(run.as_str())?;
            Ok(self.0.control.describe_run(&run).await?)
        };
        self.0.answer_unary(create_call_span("Runs.Get", &run), get).await
    }

    async fn list(&self, _: Request<v1::ListRunsRequest>) -> RunsResult<v1::ListRunsResponse> {
        let list =
            async { Ok(v1::ListRunsResponse { runs: self.0.control.describe_runs().await? }) };
        self.0.answer_unary(create_call_span("Runs.List", ""), list).await
    }

    async fn pause(&self, request: Request<v1::ControlRequest>) -> RunsResult<v1::ControlResponse> {
        self.control_run("Runs.Pause", v1::control::Action::Pause, request).await
    }

    async fn resume(
        &self,
        request: Request<v1::ControlRequest>,
    ) -> RunsResult<v1::ControlResponse> {
        self.control_run("Runs.Resume", v1::control::Action::Resume, request).await
    }

    async fn cancel(
        &self,
        request: Request<v1::ControlRequest>,
    ) -> RunsResult<v1::ControlResponse> {
        self.control_run("Runs.Cancel", v1::control::Action::Cancel, request).await
    }

    async fn audit(&self, request: Request<v1::AuditRequest>) -> RunsResult<v1::AuditReport> {
        let v1::AuditRequest { run, no_store } = request.into_inner();
        let audit = async {
            let run = RunId::new(run.as_str())?;
            let depth = if no_store { AuditDepth::Log } else { AuditDepth::Files };
            let _reading = self.0.acquire_cycle_read().await;
            Ok(to_audit_report(self.0.control.audit_run(&run, depth, &|_| ()).await?))
        };
        self.0.answer_unary(create_call_span("Runs.Audit", &run), audit).await
    }

    type WatchStream = ItemStream<v1::RunEvent>;

    async fn watch(&self, request: Request<v1::WatchRunRequest>) -> RunsResult<Self::WatchStream> {
        let caller = StreamCaller::from_request(&request);
        let v1::WatchRunRequest { run, after } = request.into_inner();
        let open = async {
            let run = RunId::new(run.as_str())?;
            let records = self.0.control.watch_run(&run, after).await?;
            Ok(records.map(|record| record.map(to_run_event)))
        };
        self.0.open_stream(create_call_span("Runs.Watch", &run), caller, open).await
    }

    type BoardStream = ItemStream<v1::Board>;

    async fn board(&self, request: Request<v1::BoardRequest>) -> RunsResult<Self::BoardStream> {
        let caller = StreamCaller::from_request(&request);
        let v1::BoardRequest { runs } = request.into_inner();
        let call = create_call_span("Runs.Board", &runs.join(","));
        let open = async {
            let mut boards = Vec::new();
            for run in arguments::parse_runs(&runs)? {
                self.0.ensure_run_exists(&run).await?;
                boards.push(self.0.run_view(&run)?.watch_changes().boxed());
            }
            Ok(select_all(boards))
        };
        self.0.open_stream(call, caller, open).await
    }

    async fn samples(&self, request: Request<v1::SamplesRequest>) -> RunsResult<v1::SamplesPage> {
        let request = request.into_inner();
        let call = create_call_span("Runs.Samples", &request.run);
        let samples = async {
            let run = RunId::new(request.run.as_str())?;
            let _reading = self.0.acquire_cycle_read().await;
            Ok(self.0.control.get_samples_page(&run, &request).await?)
        };
        self.0.answer_unary(call, samples).await
    }
}

impl RunsService {
    async fn control_run(
        &self,
        method: &'static str,
        action: v1::control::Action,
        request: Request<v1::ControlRequest>,
    ) -> RunsResult<v1::ControlResponse> {
        let user = caller_name(&request);
        let v1::ControlRequest { run, reason } = request.into_inner();
        let steer = async {
            let run = RunId::new(run.as_str())?;
            let reason = arguments::check_reason(&reason)?.to_owned();
            let control = v1::Control { action: action.into(), reason, user, queue: false };
            self.0.control.control_run(&run, control).await?;
            Ok(v1::ControlResponse {})
        };
        self.0.answer_unary(create_call_span(method, &run), steer).await
    }
}

impl CallContext {
    /// Checks that a run exists, so that a misspelt run is an error and not an empty answer.
    pub(crate) async fn ensure_run_exists(&self, run: &RunId) -> Result<(), RunError> {
        match self.control.bus().find_spec(run).await? {
            Some(_) => Ok(()),
            None => Err(RunError::Unknown(run.clone())),
        }
    }
}

fn to_audit_report(report: AuditReport) -> v1::AuditReport {
    let finding = |finding: AuditFinding| v1::audit_report::Finding {
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

fn to_run_event(record: Record) -> v1::RunEvent {
    v1::RunEvent {
        cursor: record.sequence,
        at: Some(to_timestamp(record.time_ms)),
        subject: record.fact.subject.to_string(),
        author: record.author.as_ref().map(ToString::to_string).unwrap_or_default(),
        json: String::from_utf8(record.fact.to_json()).expect("JSON is UTF-8"),
    }
}
