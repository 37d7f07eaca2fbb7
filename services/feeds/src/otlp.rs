//! Traces, by OTLP over HTTP as JSON (opentelemetry.io/docs/specs/otlp), told from the log: a trace a
//! cycle, which follows its prompts from order through generation, verification, selection, training
//! and checkpoint to evals, on whichever boxes. Times are the log's, and lengths are what agents
//! measured; so nothing has to be traced while it runs, and an old run has its traces too. A span's
//! id follows from what it is of.

use std::{collections::BTreeMap, path::PathBuf};

use reqwest::{
    Client, Url,
    header::{HeaderMap, HeaderName, HeaderValue},
};
use serde_json::{Value, json};
use wire::{Body, Place, Record, RunId, v1};

use crate::{Sink, SinkError, http, points::Told, state::State};

/// Spans of one request.
const SPANS_MAX: usize = 500;
/// Prompts that a span names.
const PROMPTS_MAX: usize = 20;

/// What takes OTLP, at its base address; `/v1/traces` is appended.
#[derive(Debug)]
pub struct Otlp {
    client: Client,
    url: Url,
    headers: HeaderMap,
    state: State,
    runs: BTreeMap<RunId, Course>,
}

/// When what is not over yet began, in milliseconds since 1970.
#[derive(Debug, Clone, Default)]
struct Course {
    submitted_ms: u64,
    planned: BTreeMap<u32, u64>,
    /// Of orders, by cycle and job: when, and of which prompts.
    ordered: BTreeMap<(u32, String), (u64, Vec<String>)>,
    trained: BTreeMap<u32, u64>,
    judged: BTreeMap<u32, u64>,
}

/// A span to be.
struct Span {
    cycle: u32,
    /// Names it within its cycle; its id follows from that.
    id: String,
    /// The id of what it is a part of; empty: the cycle.
    parent: String,
    name: String,
    agent: String,
    begin_ms: u64,
    end_ms: u64,
    attributes: Vec<(&'static str, Value)>,
    failed: Option<String>,
}

const CYCLE: &str = "cycle";

impl Otlp {
    /// `headers`: name and value, as whoever takes it asks for.
    ///
    /// # Errors
    /// When the state cannot be read or is none, or a header cannot be one.
    pub fn new(url: Url, headers: &[(String, String)], state: PathBuf) -> Result<Self, SinkError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let wrong = |why: String| SinkError::Never { what: format!("the header {name}"), why };
            let value = HeaderValue::from_str(value).map_err(|error| wrong(error.to_string()))?;
            let name = HeaderName::from_bytes(name.as_bytes());
            map.insert(name.map_err(|error| wrong(error.to_string()))?, value);
        }
        let (client, state) = (http::client()?, State::open(state)?);
        Ok(Self { client, url, headers: map, state, runs: BTreeMap::new() })
    }

    async fn send(&self, run: &RunId, spans: &[Span]) -> Result<(), SinkError> {
        let url = http::below(&self.url, "v1/traces");
        // A resource is who did it.
        let mut agents: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for span in spans {
            agents.entry(&span.agent).or_default().push(span.json(run));
        }
        let resources = agents.into_iter().map(|(agent, spans)| {
            let agent = if agent.is_empty() { "coordinator" } else { agent };
            let about =
                [("service.name", json!("flotilla")), ("service.instance.id", json!(agent))];
            json!({
                "resource": { "attributes": attributes(&about) },
                "scopeSpans": [{ "scope": { "name": "flotilla.log" }, "spans": spans }],
            })
        });
        let traces = json!({ "resourceSpans": resources.collect::<Vec<_>>() });
        let request = self.client.post(url).headers(self.headers.clone()).json(&traces);
        http::answer("the traces' receiver", request).await.map(drop)
    }
}

impl Sink for Otlp {
    /// What began before is needed for what ends after: all is read, and what was told is not told
    /// again.
    async fn cursor(&mut self, _: &RunId) -> Result<u64, SinkError> {
        Ok(0)
    }

    async fn take(&mut self, run: &RunId, told: &[Told]) -> Result<(), SinkError> {
        let taken = self.state.of(run);
        // Kept when all was taken: what is tried again begins as it did.
        let mut course = self.runs.get(run).cloned().unwrap_or_default();
        let spans: Vec<Span> = told
            .iter()
            .flat_map(|told| {
                let spans = course.spans(&told.record);
                if told.record.sequence > taken { spans } else { Vec::new() }
            })
            .collect();
        for some in spans.chunks(SPANS_MAX) {
            self.send(run, some).await?;
        }
        let last = told.last().map_or(0, |told| told.record.sequence);
        if last > taken {
            self.state.set(run, last);
            self.state.save()?;
        }
        self.runs.insert(run.clone(), course);
        Ok(())
    }
}

impl Course {
    /// What is over with this fact.
    fn spans(&mut self, record: &Record) -> Vec<Span> {
        let at = record.time_ms;
        match (&record.fact.subject.place, &record.fact.body) {
            (_, Body::Spec(_)) => self.submitted_ms = at,
            (Place::Plan { cycle }, _) => drop(self.planned.entry(*cycle).or_insert(at)),
            (Place::GenerateOrder { cycle, job, .. }, Body::GenerateOrder(order)) => {
                let prompts = order.requests.iter().take(PROMPTS_MAX);
                let prompts = prompts.map(|request| request.prompt_id.clone()).collect();
                let ordered = self.ordered.entry((*cycle, job.to_string()));
                ordered.or_insert((at, prompts));
            }
            (Place::Samples { cycle, job }, Body::Samples(samples)) => {
                return vec![drawn(*cycle, job.as_str(), samples, at)];
            }
            (Place::Verdicts { cycle, job }, Body::Verdicts(verdicts)) => {
                self.judged.insert(*cycle, at);
                return self.judged(*cycle, job.as_str(), verdicts, at);
            }
            (Place::Selection { cycle }, Body::Selected(selected)) => {
                let begin_ms = self.judged.get(cycle).copied().unwrap_or(at);
                let attributes = vec![
                    ("flotilla.considered", json!(selected.considered)),
                    ("flotilla.kept", json!(selected.kept)),
                ];
                return vec![Span::of(*cycle, "select", (begin_ms, at)).with(attributes)];
            }
            (Place::TrainOrder { cycle, .. }, _) => drop(self.trained.entry(*cycle).or_insert(at)),
            (Place::Checkpoint { cycle, step }, Body::Checkpoint(checkpoint)) if *step > 0 => {
                return self.trained(*cycle, checkpoint, at);
            }
            (Place::Eval { cycle, step, suite }, Body::Eval(eval)) => {
                let wall_s = eval.process.map_or(0.0, |process| process.wall_s);
                let attributes = vec![
                    ("flotilla.step", json!(step)),
                    ("flotilla.perplexity", json!(eval.perplexity)),
                    ("flotilla.engine", json!(eval.engine)),
                ];
                let span =
                    Span::of(*cycle, &format!("eval {suite} {step}"), (before(at, wall_s), at));
                return vec![span.by(&eval.agent).with(attributes)];
            }
            (Place::Failure { .. }, Body::Failure(failure)) => return vec![failed(failure, at)],
            (Place::CycleDone { cycle }, Body::CycleDone(_)) => {
                let begin_ms = self.planned.get(cycle).copied().unwrap_or(self.submitted_ms);
                self.ordered.retain(|(of, _), _| of != cycle);
                return vec![Span::root(*cycle, (begin_ms, at))];
            }
            // A run without cycles is one.
            (_, Body::Done(_)) if self.planned.is_empty() => {
                return vec![Span::root(0, (self.submitted_ms, at))];
            }
            _ => {}
        }
        Vec::new()
    }

    /// The verdicts, and with them the whole job.
    fn judged(&self, cycle: u32, job: &str, verdicts: &v1::Verdicts, at: u64) -> Vec<Span> {
        let begin_ms = before(at, verdicts.wall_s);
        let passed = verdicts.verdicts.iter();
        let passed = passed.filter(|it| it.outcome() == v1::verdicts::Outcome::Pass).count();
        let attributes = vec![
            ("flotilla.verifier", json!(verdicts.verifier)),
            ("flotilla.samples", json!(verdicts.verdicts.len())),
            ("flotilla.passed", json!(passed)),
        ];
        let verify = Span::of(cycle, &format!("verify {job}"), (begin_ms, at));
        let verify = verify.by(&verdicts.agent).within(&format!("job {job}")).with(attributes);
        let Some((ordered, prompts)) = self.ordered.get(&(cycle, job.to_owned())) else {
            return vec![verify];
        };
        let whole = Span::of(cycle, &format!("job {job}"), (*ordered, at));
        vec![verify, whole.with(vec![("flotilla.prompts", json!(prompts))])]
    }

    /// A checkpoint on the way is a part of the training, whose last one ends it.
    fn trained(&self, cycle: u32, checkpoint: &v1::Checkpoint, at: u64) -> Vec<Span> {
        let begin_ms = before(at, checkpoint.wall_s);
        let attributes = vec![
            ("flotilla.step", json!(checkpoint.step)),
            ("flotilla.loss", json!(checkpoint.loss)),
            ("flotilla.engine", json!(checkpoint.engine)),
        ];
        let published = Span::of(cycle, &format!("checkpoint {}", checkpoint.step), (begin_ms, at));
        let published = published.by(&checkpoint.agent).within("train").with(attributes);
        if !checkpoint.r#final {
            return vec![published];
        }
        let ordered = self.trained.get(&cycle).copied().unwrap_or(begin_ms);
        vec![published, Span::of(cycle, "train", (ordered, at))]
    }
}

fn drawn(cycle: u32, job: &str, samples: &v1::Samples, at: u64) -> Span {
    let tokens: u64 = samples.samples.iter().map(|sample| u64::from(sample.tokens)).sum();
    let attributes = vec![
        ("flotilla.samples", json!(samples.samples.len())),
        ("flotilla.tokens", json!(tokens)),
        ("flotilla.engine", json!(samples.engine)),
        ("flotilla.adapter", json!(samples.adapter)),
    ];
    let span = Span::of(cycle, &format!("generate {job}"), (before(at, samples.wall_s), at));
    span.by(&samples.agent).within(&format!("job {job}")).with(attributes)
}

fn failed(failure: &v1::Failure, at: u64) -> Span {
    let cycle = failure.id.split('-').next().and_then(|cycle| cycle.parse().ok()).unwrap_or(0);
    let id = format!("{} {} failed, {}", failure.kind, failure.id, failure.attempt);
    let mut span = Span::of(cycle, &id, (at, at)).by(&failure.agent);
    span.failed = Some(failure.message.clone());
    span
}

/// So many seconds before, as an agent measured them.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounded below")]
fn before(at_ms: u64, wall_s: f64) -> u64 {
    let wall_ms = if wall_s.is_finite() { (wall_s * 1000.0).clamp(0.0, 1e12) } else { 0.0 };
    at_ms.saturating_sub(wall_ms as u64)
}

impl Span {
    fn of(cycle: u32, id: &str, (begin_ms, end_ms): (u64, u64)) -> Self {
        Self {
            cycle,
            id: id.into(),
            parent: CYCLE.into(),
            name: id.split(' ').next().unwrap_or(id).into(),
            agent: String::new(),
            begin_ms: begin_ms.min(end_ms),
            end_ms,
            attributes: Vec::new(),
            failed: None,
        }
    }

    fn root(cycle: u32, times: (u64, u64)) -> Self {
        Self {
            parent: String::new(),
            name: format!("cycle {cycle}"),
            ..Self::of(cycle, CYCLE, times)
        }
    }

    fn by(mut self, agent: &str) -> Self {
        self.agent = agent.into();
        self
    }

    fn within(mut self, parent: &str) -> Self {
        self.parent = parent.into();
        self
    }

    fn with(mut self, attributes: Vec<(&'static str, Value)>) -> Self {
        self.attributes = attributes;
        self
    }

    fn json(&self, run: &RunId) -> Value {
        let id = |name: &str| {
            let of = format!("{run}/{}/{name}", self.cycle);
            wire::Digest::of(of.as_bytes()).to_string().split_off("b3:".len())
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
            "attributes": attributes(&about),
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

/// As OTLP writes them: integers are texts.
fn attributes(pairs: &[(&'static str, Value)]) -> Vec<Value> {
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

    fn record(at_ms: u64, place: Place, body: Body) -> Record {
        let subject = Subject::new(&RunId::new("r-1").unwrap(), place);
        Record { sequence: at_ms, time_ms: at_ms, author: None, fact: Fact { subject, body } }
    }

    fn story() -> Vec<Record> {
        let job = || JobId::new("j1").unwrap();
        let request = v1::generate_order::Request { prompt_id: "p1".into(), ..Default::default() };
        let order = v1::GenerateOrder { requests: vec![request], ..Default::default() };
        let pool = Pool::new("default").unwrap();
        let place = Place::GenerateOrder { pool: pool.clone(), cycle: 1, job: job(), attempt: 1 };
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
            record(1000, Place::Spec, Body::Spec(v1::Spec::default())),
            record(2000, Place::Plan { cycle: 1 }, Body::Plan(v1::Plan::default())),
            record(2500, place, Body::GenerateOrder(order)),
            record(5000, Place::Samples { cycle: 1, job: job() }, Body::Samples(samples)),
            record(6000, Place::Verdicts { cycle: 1, job: job() }, Body::Verdicts(verdicts)),
            record(6100, Place::Selection { cycle: 1 }, Body::Selected(v1::Selected::default())),
            record(
                6200,
                Place::TrainOrder { pool, cycle: 1, attempt: 1 },
                Body::TrainOrder(v1::TrainOrder::default()),
            ),
            record(8000, Place::Checkpoint { cycle: 1, step: 9 }, Body::Checkpoint(checkpoint)),
            record(9000, Place::CycleDone { cycle: 1 }, Body::CycleDone(v1::CycleDone::default())),
        ]
    }

    #[test]
    fn a_trace_follows_a_cycle_from_order_to_its_end_and_every_part_has_its_whole() {
        let mut course = Course::default();
        let spans: Vec<Span> = story().iter().flat_map(|record| course.spans(record)).collect();
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
        assert_eq!(times(CYCLE), (2000, 9000));
        let run = RunId::new("r-1").unwrap();
        let told: Vec<Value> = spans.iter().map(|span| span.json(&run)).collect();
        let text = |span: &Value, field: &str| span[field].as_str().unwrap_or_default().to_owned();
        let ids: BTreeSet<String> = told.iter().map(|span| text(span, "spanId")).collect();
        assert_eq!(ids.len(), told.len(), "each has an id of its own");
        let traces: BTreeSet<String> = told.iter().map(|span| text(span, "traceId")).collect();
        assert_eq!(traces.len(), 1);
        for span in &told {
            let parent = text(span, "parentSpanId");
            assert!(ids.contains(&parent) || span["name"] == "cycle 1", "{span}");
            assert!((text(span, "traceId").len(), text(span, "spanId").len()) == (32, 16));
        }
    }

    #[tokio::test]
    async fn what_is_tried_again_begins_as_it_did() {
        let directory = tempfile::tempdir().unwrap();
        let url = "http://127.0.0.1:1".parse().unwrap();
        let mut otlp = Otlp::new(url, &[], directory.path().join("state")).unwrap();
        let told = |record: &Record| Told {
            record: std::sync::Arc::new(record.clone()),
            what: crate::points::What::Figures(Vec::new()),
        };
        let (run, story) = (RunId::new("r-1").unwrap(), story());
        let told: Vec<Told> = story.iter().map(told).collect();
        // Up to the order nothing is over, so nothing is sent.
        otlp.take(&run, &told[..3]).await.unwrap();
        otlp.take(&run, &told[3..]).await.unwrap_err();
        assert!(otlp.runs[&run].ordered.contains_key(&(1, "j1".to_owned())));
        assert_eq!(otlp.state.of(&run), 2500);
    }

    #[test]
    fn what_agents_say_of_time_breaks_nothing() {
        assert_eq!(before(5000, f64::NAN), 5000);
        assert_eq!(before(5000, -3.0), 5000);
        assert_eq!(before(5000, f64::INFINITY), 5000);
        assert_eq!(before(5000, 1e300), 0);
    }
}
