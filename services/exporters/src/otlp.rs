//! Export of traces by OTLP over HTTP with JSON (opentelemetry.io/docs/specs/otlp), built from the
//! log. Each cycle is a trace that follows its prompts from the order through generation,
//! verification, selection, training and checkpoint to the evaluations, on all hosts.
//!
//! Times come from the log, and durations from the agents' measurements. So nothing needs to be
//! traced while a run works, and an old run has traces as well. The id of a span is derived from
//! its run, cycle and name.

use std::{collections::BTreeMap, path::PathBuf};

use reqwest::{
    Client, Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use serde_json::{Value, json};
use wire::{FactBody, FactKey, Record, RunId, v1};

use crate::{
    ExporterError, RunExporter, cursor_file::CursorFile, http_client, metric_points::RunUpdate,
};

const SPANS_MAX: usize = 500;
const PROMPTS_MAX: usize = 20;

/// An exporter to an OTLP collector at its base URL; `/v1/traces` is appended.
#[derive(Debug)]
pub struct OtlpExporter {
    client: Client,
    url: Url,
    headers: HeaderMap,
    cursors: CursorFile,
    open_spans: BTreeMap<RunId, OpenSpans>,
}

/// Start times of the unfinished work of a run, in milliseconds since 1970. A fact that ends a
/// piece of work turns its start time into a span.
#[derive(Debug, Clone, Default)]
struct OpenSpans {
    submitted_ms: u64,
    planned: BTreeMap<u32, u64>,
    /// Time and prompts of each generation order, by cycle and job.
    ordered: BTreeMap<(u32, String), (u64, Vec<String>)>,
    train_ordered: BTreeMap<u32, u64>,
    last_verdicts: BTreeMap<u32, u64>,
}

struct TraceSpan {
    cycle: u32,
    /// Unique within the cycle; the OTLP id is derived from it.
    id: String,
    /// Empty for the span of the cycle itself.
    parent: String,
    name: String,
    /// Empty for the coordinator.
    agent: String,
    begin_ms: u64,
    end_ms: u64,
    attributes: Vec<(&'static str, Value)>,
    failed: Option<String>,
}

const CYCLE_SPAN: &str = "cycle";

impl OtlpExporter {
    /// Creates an exporter. `headers` are names and values that the collector requires.
    pub fn new(
        url: Url,
        headers: &[(String, String)],
        state: PathBuf,
    ) -> Result<Self, ExporterError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let wrong =
                |why: String| ExporterError::Permanent { what: format!("the header {name}"), why };
            let value = HeaderValue::from_str(value).map_err(|error| wrong(error.to_string()))?;
            let name = HeaderName::from_bytes(name.as_bytes());
            map.insert(name.map_err(|error| wrong(error.to_string()))?, value);
        }
        let (client, state) = (http_client::build_client()?, CursorFile::open_file(state)?);
        Ok(Self { client, url, headers: map, cursors: state, open_spans: BTreeMap::new() })
    }

    async fn send_spans(&self, run: &RunId, spans: &[TraceSpan]) -> Result<(), ExporterError> {
        let url = http_client::append_path(&self.url, "v1/traces");
        // Spans are grouped by agent, each agent being one OTLP resource.
        let mut agents: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for span in spans {
            agents.entry(&span.agent).or_default().push(span.to_json(run));
        }
        let resources = agents.into_iter().map(|(agent, spans)| {
            let agent = if agent.is_empty() { "coordinator" } else { agent };
            let about =
                [("service.name", json!("flotilla")), ("service.instance.id", json!(agent))];
            json!({
                "resource": { "attributes": to_attributes(&about) },
                "scopeSpans": [{ "scope": { "name": "flotilla.log" }, "spans": spans }],
            })
        });
        let traces = json!({ "resourceSpans": resources.collect::<Vec<_>>() });
        let request = self.client.post(url).headers(self.headers.clone()).json(&traces);
        http_client::request_text("the traces' receiver", request).await.map(drop)
    }
}

impl RunExporter for OtlpExporter {
    /// Reads all facts, because earlier ones contain the start times of later spans. Spans up to
    /// the stored cursor are not sent again.
    async fn write_updates(
        &mut self,
        run: &RunId,
        updates: &[RunUpdate],
    ) -> Result<(), ExporterError> {
        let taken = self.cursors.run_cursor(run);
        // The change is stored only after all spans are sent, so a retry starts from the same
        // state.
        let mut open = self.open_spans.get(run).cloned().unwrap_or_default();
        let spans: Vec<TraceSpan> = updates
            .iter()
            .flat_map(|update| {
                let spans = open.finish_spans(&update.record);
                if update.record.sequence > taken { spans } else { Vec::new() }
            })
            .collect();
        for some in spans.chunks(SPANS_MAX) {
            self.send_spans(run, some).await?;
        }
        let last = updates.last().map_or(0, |update| update.record.sequence);
        if last > taken {
            self.cursors.set_cursor(run, last);
            self.cursors.save_file()?;
        }
        self.open_spans.insert(run.clone(), open);
        Ok(())
    }
}

impl OpenSpans {
    /// Records the start times in a fact, and returns the spans that the fact ends.
    fn finish_spans(&mut self, record: &Record) -> Vec<TraceSpan> {
        let at = record.time_ms;
        match (&record.fact.subject.key, &record.fact.body) {
            (_, FactBody::Spec(_)) => self.submitted_ms = at,
            (FactKey::Plan { cycle }, _) => drop(self.planned.entry(*cycle).or_insert(at)),
            (FactKey::GenerateOrder { cycle, job, .. }, FactBody::GenerateOrder(order)) => {
                let prompts = order.requests.iter().take(PROMPTS_MAX);
                let prompts = prompts.map(|request| request.prompt_id.clone()).collect();
                let ordered = self.ordered.entry((*cycle, job.to_string()));
                ordered.or_insert((at, prompts));
            }
            (FactKey::Samples { cycle, job }, FactBody::Samples(samples)) => {
                return vec![generation_span(*cycle, job.as_str(), samples, at)];
            }
            (FactKey::Verdicts { cycle, job }, FactBody::Verdicts(verdicts)) => {
                self.last_verdicts.insert(*cycle, at);
                return self.verification_spans(*cycle, job.as_str(), verdicts, at);
            }
            (FactKey::Scores { cycle, job }, FactBody::Scores(scores)) => {
                self.last_verdicts.insert(*cycle, at);
                return vec![scoring_span(*cycle, job.as_str(), scores, at)];
            }
            (FactKey::Selection { cycle }, FactBody::Selected(selected)) => {
                let begin_ms = self.last_verdicts.get(cycle).copied().unwrap_or(at);
                let attributes = vec![
                    ("flotilla.considered", json!(selected.considered)),
                    ("flotilla.kept", json!(selected.kept)),
                ];
                return vec![
                    TraceSpan::new_child(*cycle, "select", (begin_ms, at))
                        .with_attributes(attributes),
                ];
            }
            (FactKey::TrainOrder { cycle, .. }, _) => {
                self.train_ordered.entry(*cycle).or_insert(at);
            }
            (place, FactBody::Checkpoint(checkpoint)) => {
                if let Some((cycle, 1..)) = place.checkpoint_position() {
                    return self.training_spans(cycle, checkpoint, at);
                }
            }
            (FactKey::Eval { cycle, step, suite }, FactBody::Eval(eval)) => {
                let wall_s = eval.process.map_or(0.0, |process| process.wall_s);
                let attributes = vec![
                    ("flotilla.step", json!(step)),
                    ("flotilla.perplexity", json!(eval.perplexity)),
                    ("flotilla.engine", json!(eval.engine)),
                ];
                let span = TraceSpan::new_child(
                    *cycle,
                    &format!("eval {suite} {step}"),
                    (start_before(at, wall_s), at),
                );
                return vec![span.with_agent(&eval.agent).with_attributes(attributes)];
            }
            (FactKey::Failure { .. }, FactBody::Failure(failure)) => {
                return vec![failure_span(failure, at)];
            }
            (FactKey::CycleDone { cycle }, FactBody::CycleDone(_)) => {
                let begin_ms = self.planned.get(cycle).copied().unwrap_or(self.submitted_ms);
                self.ordered.retain(|(of, _), _| of != cycle);
                return vec![TraceSpan::new_root(*cycle, (begin_ms, at))];
            }
            // A run without cycles is one trace.
            (_, FactBody::Done(_)) if self.planned.is_empty() => {
                return vec![TraceSpan::new_root(0, (self.submitted_ms, at))];
            }
            _ => {}
        }
        Vec::new()
    }

    /// Returns also the span of the whole job if its order is known.
    fn verification_spans(
        &self,
        cycle: u32,
        job: &str,
        verdicts: &v1::Verdicts,
        at: u64,
    ) -> Vec<TraceSpan> {
        let begin_ms = start_before(at, verdicts.wall_s);
        let passed = verdicts.verdicts.iter();
        let passed = passed.filter(|it| it.outcome() == v1::verdicts::Outcome::Pass).count();
        let attributes = vec![
            ("flotilla.verifier", json!(verdicts.verifier)),
            ("flotilla.samples", json!(verdicts.verdicts.len())),
            ("flotilla.passed", json!(passed)),
        ];
        let verify = TraceSpan::new_child(cycle, &format!("verify {job}"), (begin_ms, at));
        let verify = verify
            .with_agent(&verdicts.agent)
            .with_parent(&format!("job {job}"))
            .with_attributes(attributes);
        let Some((ordered, prompts)) = self.ordered.get(&(cycle, job.to_owned())) else {
            return vec![verify];
        };
        let whole = TraceSpan::new_child(cycle, &format!("job {job}"), (*ordered, at));
        vec![verify, whole.with_attributes(vec![("flotilla.prompts", json!(prompts))])]
    }

    /// Returns for the final checkpoint also the span of the training.
    fn training_spans(&self, cycle: u32, checkpoint: &v1::Checkpoint, at: u64) -> Vec<TraceSpan> {
        let begin_ms = start_before(at, checkpoint.wall_s);
        let attributes = vec![
            ("flotilla.step", json!(checkpoint.step)),
            ("flotilla.loss", json!(checkpoint.loss)),
            ("flotilla.engine", json!(checkpoint.engine)),
        ];
        let published =
            TraceSpan::new_child(cycle, &format!("checkpoint {}", checkpoint.step), (begin_ms, at));
        let published = published
            .with_agent(&checkpoint.agent)
            .with_parent("train")
            .with_attributes(attributes);
        if !checkpoint.r#final {
            return vec![published];
        }
        let ordered = self.train_ordered.get(&cycle).copied().unwrap_or(begin_ms);
        vec![published, TraceSpan::new_child(cycle, "train", (ordered, at))]
    }
}

fn scoring_span(cycle: u32, job: &str, scores: &v1::Scores, at: u64) -> TraceSpan {
    let span = (start_before(at, scores.wall_s), at);
    TraceSpan::new_child(cycle, &format!("score {job}"), span)
        .with_agent(&scores.agent)
        .with_parent(&format!("job {job}"))
        .with_attributes(vec![("flotilla.samples", json!(scores.scores.len()))])
}

fn generation_span(cycle: u32, job: &str, samples: &v1::Samples, at: u64) -> TraceSpan {
    let tokens: u64 = samples.samples.iter().map(|sample| u64::from(sample.tokens)).sum();
    let attributes = vec![
        ("flotilla.samples", json!(samples.samples.len())),
        ("flotilla.tokens", json!(tokens)),
        ("flotilla.engine", json!(samples.engine)),
        ("flotilla.adapter", json!(samples.adapter)),
    ];
    let span = TraceSpan::new_child(
        cycle,
        &format!("generate {job}"),
        (start_before(at, samples.wall_s), at),
    );
    span.with_agent(&samples.agent).with_parent(&format!("job {job}")).with_attributes(attributes)
}

fn failure_span(failure: &v1::Failure, at: u64) -> TraceSpan {
    let cycle = failure.id.split('-').next().and_then(|cycle| cycle.parse().ok()).unwrap_or(0);
    let id = format!("{} {} failed, {}", failure.kind, failure.id, failure.attempt);
    let mut span = TraceSpan::new_child(cycle, &id, (at, at)).with_agent(&failure.agent);
    span.failed = Some(failure.message.clone());
    span
}

/// Returns the time `wall_s` seconds before `at_ms`; invalid durations count as 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded below")]
fn start_before(at_ms: u64, wall_s: f64) -> u64 {
    let wall_ms = if wall_s.is_finite() { (wall_s * 1000.0).clamp(0.0, 1e12) } else { 0.0 };
    at_ms.saturating_sub(wall_ms as u64)
}

impl TraceSpan {
    /// Creates a span below that of its cycle. Its name is the first word of `id`.
    fn new_child(cycle: u32, id: &str, (begin_ms, end_ms): (u64, u64)) -> Self {
        Self {
            cycle,
            id: id.into(),
            parent: CYCLE_SPAN.into(),
            name: id.split(' ').next().unwrap_or(id).into(),
            agent: String::new(),
            begin_ms: begin_ms.min(end_ms),
            end_ms,
            attributes: Vec::new(),
            failed: None,
        }
    }

    fn new_root(cycle: u32, times: (u64, u64)) -> Self {
        Self {
            parent: String::new(),
            name: format!("cycle {cycle}"),
            ..Self::new_child(cycle, CYCLE_SPAN, times)
        }
    }

    fn with_agent(mut self, agent: &str) -> Self {
        self.agent = agent.into();
        self
    }

    fn with_parent(mut self, parent: &str) -> Self {
        self.parent = parent.into();
        self
    }

    fn with_attributes(mut self, attributes: Vec<(&'static str, Value)>) -> Self {
        self.attributes = attributes;
        self
    }

    fn to_json(&self, run: &RunId) -> Value {
        let id = |name: &str| {
            let of = format!("{run}/{}/{name}", self.cycle);
            wire::Digest::hash_bytes(of.as_bytes()).to_string().split_off("b3:".len())
        };
        let mut about = vec![
            ("flotilla.run", json!(run.as_str())),
            ("flotilla.cycle", json!(self.cycle)),
            ("flotilla.id", json!(self.id)),
        ];
        about.extend(self.attributes.iter().cloned());
        let mut span = json!({
            "traceId": &id("")[..32],
            "spanId": &id(&self.id)[..16],
            "name": self.name,
            "kind": 1,
            "startTimeUnixNano": format!("{}000000", self.begin_ms),
            "endTimeUnixNano": format!("{}000000", self.end_ms),
            "attributes": to_attributes(&about),
        });
        if !self.parent.is_empty() {
            span["parentSpanId"] = id(&self.parent)[..16].into();
        }
        if let Some(why) = &self.failed {
            span["status"] = json!({ "code": 2, "message": why });
        }
        span
    }
}

/// Writes integers as strings, as OTLP JSON does.
fn to_attributes(pairs: &[(&'static str, Value)]) -> Vec<Value> {
    fn value(of: &Value) -> Value {
        match of {
            Value::Number(number) if number.is_f64() => json!({ "doubleValue": number }),
            Value::Number(number) => json!({ "intValue": number.to_string() }),
            Value::Array(values) => {
                json!({ "arrayValue": { "values": values.iter().map(value).collect::<Vec<_>>() } })
            }
            Value::String(text) => json!({ "stringValue": text }),
            other => json!({ "stringValue": other.to_string() }),
        }
    }
    pairs.iter().map(|(key, of)| json!({ "key": key, "value": value(of) })).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wire::{Fact, JobId, Pool, Subject};

    use super::*;

    fn record(at_ms: u64, place: FactKey, body: FactBody) -> Record {
        let subject = Subject::new(&RunId::new("r-1").unwrap(), place);
        Record { sequence: at_ms, time_ms: at_ms, author: None, fact: Fact { subject, body } }
    }

    fn story() -> Vec<Record> {
        let job = || JobId::new("j1").unwrap();
        let request = v1::generate_order::Request { prompt_id: "p1".into(), ..Default::default() };
        let order = v1::GenerateOrder { requests: vec![request], ..Default::default() };
        let pool = Pool::new("default").unwrap();
        let place = FactKey::GenerateOrder { pool: pool.clone(), cycle: 1, job: job(), attempt: 1 };
        let samples = v1::Samples { agent: "box-a".into(), wall_s: 2.0, ..Default::default() };
        let verdicts = v1::Verdicts { agent: "box-b".into(), wall_s: 0.5, ..Default::default() };
        let checkpoint = v1::Checkpoint {
            step: 9,
            r#final: true,
            wall_s: 1.0,
            agent: "box-c".into(),
            ..Default::default()
        };
        vec![
            record(1000, FactKey::Spec, FactBody::Spec(v1::Spec::default())),
            record(2000, FactKey::Plan { cycle: 1 }, FactBody::Plan(v1::Plan::default())),
            record(2500, place, FactBody::GenerateOrder(order)),
            record(5000, FactKey::Samples { cycle: 1, job: job() }, FactBody::Samples(samples)),
            record(6000, FactKey::Verdicts { cycle: 1, job: job() }, FactBody::Verdicts(verdicts)),
            record(
                6100,
                FactKey::Selection { cycle: 1 },
                FactBody::Selected(v1::Selected::default()),
            ),
            record(
                6200,
                FactKey::TrainOrder { pool, cycle: 1, attempt: 1 },
                FactBody::TrainOrder(v1::TrainOrder::default()),
            ),
            record(
                8000,
                FactKey::Checkpoint { cycle: 1, step: 9 },
                FactBody::Checkpoint(checkpoint),
            ),
            record(
                9000,
                FactKey::CycleDone { cycle: 1 },
                FactBody::CycleDone(v1::CycleDone::default()),
            ),
        ]
    }

    #[test]
    fn a_trace_follows_a_cycle_from_order_to_its_end_and_every_part_has_its_whole() {
        let mut open = OpenSpans::default();
        let spans: Vec<TraceSpan> =
            story().iter().flat_map(|record| open.finish_spans(record)).collect();
        let times = |id: &str| {
            let span = spans.iter().find(|span| span.id == id).unwrap_or_else(|| panic!("no {id}"));
            (span.begin_ms, span.end_ms)
        };
        assert_eq!(times("generate j1"), (3000, 5000));
        assert_eq!(times("verify j1"), (5500, 6000));
        assert_eq!(times("job j1"), (2500, 6000));
        assert_eq!(times("select"), (6000, 6100));
        assert_eq!(times("checkpoint 9"), (7000, 8000));
        assert_eq!(times("train"), (6200, 8000));
        assert_eq!(times(CYCLE_SPAN), (2000, 9000));
        let run = RunId::new("r-1").unwrap();
        let sent: Vec<Value> = spans.iter().map(|span| span.to_json(&run)).collect();
        let text = |span: &Value, field: &str| span[field].as_str().unwrap_or_default().to_owned();
        let ids: BTreeSet<String> = sent.iter().map(|span| text(span, "spanId")).collect();
        assert_eq!(ids.len(), sent.len(), "each has an id of its own");
        let traces: BTreeSet<String> = sent.iter().map(|span| text(span, "traceId")).collect();
        assert_eq!(traces.len(), 1);
        for span in &sent {
            let parent = text(span, "parentSpanId");
            assert!(ids.contains(&parent) || span["name"] == "cycle 1", "{span}");
            assert!((text(span, "traceId").len(), text(span, "spanId").len()) == (32, 16));
        }
    }

    #[tokio::test]
    async fn a_retry_starts_from_the_same_state() {
        let directory = tempfile::tempdir().unwrap();
        let url = "http://127.0.0.1:1".parse().unwrap();
        let mut otlp = OtlpExporter::new(url, &[], directory.path().join("state")).unwrap();
        let update = |record: &Record| RunUpdate {
            record: std::sync::Arc::new(record.clone()),
            kind: crate::metric_points::UpdateKind::Metrics(Vec::new()),
        };
        let (run, story) = (RunId::new("r-1").unwrap(), story());
        let updates: Vec<RunUpdate> = story.iter().map(update).collect();
        // Before the order no work has ended, so nothing is sent.
        otlp.write_updates(&run, &updates[..3]).await.unwrap();
        otlp.write_updates(&run, &updates[3..]).await.unwrap_err();
        assert!(otlp.open_spans[&run].ordered.contains_key(&(1, "j1".to_owned())));
        assert_eq!(otlp.cursors.run_cursor(&run), 2500);
    }

    #[test]
    fn invalid_durations_of_agents_are_harmless() {
        assert_eq!(start_before(5000, f64::NAN), 5000);
        assert_eq!(start_before(5000, -3.0), 5000);
        assert_eq!(start_before(5000, f64::INFINITY), 5000);
        assert_eq!(start_before(5000, 1e300), 0);
    }
}
