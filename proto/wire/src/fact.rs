//! Facts: a subject, the message that belongs to it, and both in the form in which the log and
//! archives store them.

use std::io::{self, Write};

use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, Error as _},
};
use serde_json::ser::Formatter;

use crate::{
    AgentId, Subject,
    json_count::exceeds_json_count,
    subject::{FactKey, SubjectError},
    v1,
};

/// The JSON objects of a fact that an agent writes: a hundred times those of a large job. An empty
/// one takes fifty times its bytes in memory.
const OBJECTS_MAX: usize = 100_000;

/// A subject and the message published on it. The log accepts at most one fact for each subject.
#[derive(Debug, Clone, PartialEq)]
pub struct Fact {
    pub subject: Subject,
    /// Its type matches the kind in the subject.
    pub body: FactBody,
}

/// The message of a fact, one variant for each kind.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a spec is read once a run; few facts are held")]
pub enum FactBody {
    Spec(v1::Spec),
    Control(v1::Control),
    Channel(v1::ChannelMove),
    Plan(v1::Plan),
    GenerateOrder(v1::GenerateOrder),
    Samples(v1::Samples),
    Declined(v1::Declined),
    Quarantine(v1::Quarantine),
    Verdicts(v1::Verdicts),
    Scores(v1::Scores),
    Selected(v1::Selected),
    TrainOrder(v1::TrainOrder),
    SlicePlan(v1::SlicePlan),
    Delta(v1::Delta),
    SliceClose(v1::SliceClose),
    Merge(v1::Merge),
    Checkpoint(v1::Checkpoint),
    Eval(v1::Eval),
    Failure(v1::Failure),
    PassRates(v1::PassRates),
    CycleDone(v1::CycleDone),
    Archived(v1::Archived),
    Done(v1::Done),
}

/// A fact with the position, time and author that the log recorded for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// The position in the log, counted from 1.
    pub sequence: u64,
    /// The time at which the log accepted the fact, in milliseconds since 1970: the only clock that
    /// all peers share.
    pub time_ms: u64,
    /// The member that wrote the fact, enforced by the server; only in closed fleets.
    pub author: Option<AgentId>,
    /// Its subject does not contain the author.
    pub fact: Fact,
}

/// The reason why an entry of the log is not a valid fact.
#[derive(Debug, thiserror::Error)]
pub enum FactError {
    #[error(transparent)]
    Subject(#[from] SubjectError),
    #[error("read the fact {subject}: not a {message} message (B113)")]
    Json {
        subject: String,
        message: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "read the fact {subject}: its spec is of a {kind} run, which does not belong there (B113)"
    )]
    SpecKind { subject: String, kind: &'static str },
    #[error("read the fact {subject}: {author} wrote it, in the name of {named} (B113)")]
    Author { subject: String, author: AgentId, named: String },
}

/// The reason why a line of an archive is not a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordLineError {
    #[error("not a line with sequence, time_ms, subject and fact (B113)")]
    Json(#[source] serde_json::Error),
    #[error(transparent)]
    Fact(#[from] FactError),
}

impl Fact {
    /// Parses a fact from its subject and its canonical proto3 JSON.
    pub fn from_json(subject: &str, payload: &[u8]) -> Result<Self, FactError> {
        let subject: Subject = subject.parse()?;
        let body = FactBody::from_json(&subject, payload)?;
        Ok(Self { subject, body })
    }

    /// Returns the message as canonical proto3 JSON.
    pub fn to_json(&self) -> Vec<u8> {
        self.body.to_json()
    }
}

impl FactBody {
    fn from_json(subject: &Subject, payload: &[u8]) -> Result<Self, FactError> {
        Ok(match subject.key {
            FactKey::Spec | FactKey::WatchedSpec => Self::Spec(decode_spec(subject, payload)?),
            FactKey::Control { .. } => Self::Control(parse_message(subject, "Control", payload)?),
            FactKey::Channel { .. } => {
                Self::Channel(parse_message(subject, "ChannelMove", payload)?)
            }
            FactKey::Plan { .. } => Self::Plan(parse_message(subject, "Plan", payload)?),
            FactKey::GenerateOrder { .. } => {
                Self::GenerateOrder(parse_message(subject, "GenerateOrder", payload)?)
            }
            FactKey::Samples { .. } => Self::Samples(parse_message(subject, "Samples", payload)?),
            FactKey::Declined { .. } => {
                Self::Declined(parse_message(subject, "Declined", payload)?)
            }
            FactKey::Quarantine { .. } => {
                Self::Quarantine(parse_message(subject, "Quarantine", payload)?)
            }
            FactKey::Verdicts { .. } => {
                Self::Verdicts(parse_message(subject, "Verdicts", payload)?)
            }
            FactKey::Scores { .. } => Self::Scores(parse_message(subject, "Scores", payload)?),
            FactKey::Selection { .. } => {
                Self::Selected(parse_message(subject, "Selected", payload)?)
            }
            FactKey::TrainOrder { .. } | FactKey::TrainPartOrder { .. } => {
                Self::TrainOrder(parse_message(subject, "TrainOrder", payload)?)
            }
            FactKey::SlicePlan { .. } => {
                Self::SlicePlan(parse_message(subject, "SlicePlan", payload)?)
            }
            FactKey::Delta { .. } => Self::Delta(parse_message(subject, "Delta", payload)?),
            FactKey::SliceClose { .. } => {
                Self::SliceClose(parse_message(subject, "SliceClose", payload)?)
            }
            FactKey::Merge { .. } => Self::Merge(parse_message(subject, "Merge", payload)?),
            FactKey::Checkpoint { .. } | FactKey::WatchedCheckpoint { .. } => {
                Self::Checkpoint(parse_message(subject, "Checkpoint", payload)?)
            }
            FactKey::Eval { .. } => Self::Eval(parse_message(subject, "Eval", payload)?),
            FactKey::Failure { .. } => Self::Failure(parse_message(subject, "Failure", payload)?),
            FactKey::PassRates { .. } => {
                Self::PassRates(parse_message(subject, "PassRates", payload)?)
            }
            FactKey::CycleDone { .. } => {
                Self::CycleDone(parse_message(subject, "CycleDone", payload)?)
            }
            FactKey::Archived { .. } => {
                Self::Archived(parse_message(subject, "Archived", payload)?)
            }
            FactKey::Done => Self::Done(parse_message(subject, "Done", payload)?),
        })
    }

    fn to_json(&self) -> Vec<u8> {
        match self {
            Self::Spec(message) => serialize_message(message),
            Self::Control(message) => serialize_message(message),
            Self::Channel(message) => serialize_message(message),
            Self::Plan(message) => serialize_message(message),
            Self::GenerateOrder(message) => serialize_message(message),
            Self::Samples(message) => serialize_message(message),
            Self::Declined(message) => serialize_message(message),
            Self::Quarantine(message) => serialize_message(message),
            Self::Verdicts(message) => serialize_message(message),
            Self::Scores(message) => serialize_message(message),
            Self::Selected(message) => serialize_message(message),
            Self::TrainOrder(message) => serialize_message(message),
            Self::SlicePlan(message) => serialize_message(message),
            Self::Delta(message) => serialize_message(message),
            Self::SliceClose(message) => serialize_message(message),
            Self::Merge(message) => serialize_message(message),
            Self::Checkpoint(message) => serialize_message(message),
            Self::Eval(message) => serialize_message(message),
            Self::Failure(message) => serialize_message(message),
            Self::PassRates(message) => serialize_message(message),
            Self::CycleDone(message) => serialize_message(message),
            Self::Archived(message) => serialize_message(message),
            Self::Done(message) => serialize_message(message),
        }
    }

    /// Returns the agent that the message names as its producer.
    fn named_agent(&self) -> Option<&str> {
        let agent = match self {
            Self::Samples(samples) => &samples.agent,
            Self::Declined(declined) => &declined.agent,
            Self::Verdicts(verdicts) => &verdicts.agent,
            Self::Scores(scores) => &scores.agent,
            Self::Delta(delta) => &delta.agent,
            Self::Merge(merge) => &merge.agent,
            Self::Checkpoint(checkpoint) => &checkpoint.agent,
            Self::Eval(eval) => &eval.agent,
            Self::Failure(failure) => &failure.agent,
            _ => return None,
        };
        Some(agent.as_str()).filter(|agent| !agent.is_empty())
    }

    /// Returns the message's name in `flotilla.v1`, also the type header of a published fact.
    pub fn message_name(&self) -> &'static str {
        match self {
            Self::Spec(_) => "Spec",
            Self::Control(_) => "Control",
            Self::Channel(_) => "ChannelMove",
            Self::Plan(_) => "Plan",
            Self::GenerateOrder(_) => "GenerateOrder",
            Self::Samples(_) => "Samples",
            Self::Declined(_) => "Declined",
            Self::Quarantine(_) => "Quarantine",
            Self::Verdicts(_) => "Verdicts",
            Self::Scores(_) => "Scores",
            Self::Selected(_) => "Selected",
            Self::TrainOrder(_) => "TrainOrder",
            Self::SlicePlan(_) => "SlicePlan",
            Self::Delta(_) => "Delta",
            Self::SliceClose(_) => "SliceClose",
            Self::Merge(_) => "Merge",
            Self::Checkpoint(_) => "Checkpoint",
            Self::Eval(_) => "Eval",
            Self::Failure(_) => "Failure",
            Self::PassRates(_) => "PassRates",
            Self::CycleDone(_) => "CycleDone",
            Self::Archived(_) => "Archived",
            Self::Done(_) => "Done",
        }
    }
}

impl Record {
    /// Returns the record as one line of JSON including the newline, the format of archives:
    ///
    /// ```text
    /// {"sequence":7,"time_ms":1795176000123,"subject":"flotilla.r1.done","fact":{"status":"FAILED"}}
    /// ```
    pub fn to_line(&self) -> Vec<u8> {
        let Self { sequence, time_ms, author, fact } = self;
        let subject = author
            .as_ref()
            .map_or_else(|| fact.subject.to_string(), |author| fact.subject.with_author(author));
        // Subjects contain no characters that JSON has to escape.
        let head =
            format!(r#"{{"sequence":{sequence},"time_ms":{time_ms},"subject":"{subject}","fact":"#);
        [head.as_bytes(), &fact.to_json(), b"}\n"].concat()
    }

    /// Parses a line written by [`Record::to_line`].
    pub fn from_line(line: &[u8]) -> Result<Self, RecordLineError> {
        #[derive(Deserialize)]
        struct Line {
            sequence: u64,
            time_ms: u64,
            subject: String,
            fact: serde_json::Value,
        }
        let Line { sequence, time_ms, subject, fact } =
            serde_json::from_slice(line).map_err(RecordLineError::Json)?;
        Ok(Self::from_log(sequence, time_ms, &subject, fact.to_string().as_bytes())?)
    }

    /// Builds a record from an entry of the log; in closed fleets `subject` ends with the author.
    /// Fails also if the message names another agent than its author.
    pub fn from_log(
        sequence: u64,
        time_ms: u64,
        subject: &str,
        payload: &[u8],
    ) -> Result<Self, FactError> {
        let (place, author) = Subject::parse_with_author(subject)?;
        let body = FactBody::from_json(&place, payload)?;
        if let (Some(author), Some(named)) = (&author, body.named_agent())
            && author.as_str() != named
        {
            let (subject, named) = (subject.to_owned(), named.to_owned());
            return Err(FactError::Author { subject, author: author.clone(), named });
        }
        Ok(Self { sequence, time_ms, author, fact: Fact { subject: place, body } })
    }
}

/// Checks that the spec's kind belongs under its subject. The NATS server lets watchers write at
/// [`Place::WatchedSpec`] alone, so this keeps a watcher from starting any other run.
fn decode_spec(subject: &Subject, payload: &[u8]) -> Result<v1::Spec, FactError> {
    let spec: v1::Spec = parse_message(subject, "Spec", payload)?;
    let is_watched = matches!(spec.kind, Some(v1::spec::Kind::Watched(_)));
    if is_watched == (subject.key == FactKey::WatchedSpec) {
        return Ok(spec);
    }
    Err(FactError::SpecKind { subject: subject.to_string(), kind: spec.kind_name() })
}

fn parse_message<M: DeserializeOwned>(
    subject: &Subject,
    message: &'static str,
    payload: &[u8],
) -> Result<M, FactError> {
    let failed = |source| FactError::Json { subject: subject.to_string(), message, source };
    if has_too_many_objects(&subject.key, payload) {
        let why = format!("it has more than {OBJECTS_MAX} objects");
        return Err(failed(serde_json::Error::custom(why)));
    }
    serde_json::from_slice(payload).map_err(failed)
}

/// Exempts the facts of the coordinator that grow with a run's prompts and cycles.
fn has_too_many_objects(key: &FactKey, payload: &[u8]) -> bool {
    !matches!(key, FactKey::Spec | FactKey::Plan { .. })
        && exceeds_json_count(payload, b'{', OBJECTS_MAX)
}

fn serialize_message<M: Serialize>(message: &M) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, ProtoJsonFormatter);
    message.serialize(&mut serializer).expect("a generated message has only string keys");
    bytes
}

/// A formatter that writes `"NaN"` where `serde_json` writes `null`. Messages contain no nulls, so
/// a null is always a float that is not finite, and proto3 JSON has no null numbers.
struct ProtoJsonFormatter;

impl Formatter for ProtoJsonFormatter {
    fn write_null<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b"\"NaN\"")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_stands_in_the_log_is_read_or_refused(
            kind in "[a-z]{1,10}", rest in "[a-z0-9.-]{0,24}", payload in "\\PC{0,64}",
        ) {
            let subject = format!("flotilla.r1.{kind}.{rest}");
            if let Ok(fact) = Fact::from_json(&subject, payload.as_bytes()) {
                prop_assert_eq!(fact.subject.to_string(), subject);
            }
        }
    }

    #[test]
    fn a_fact_is_readable_json_and_reads_back() {
        let fact = Fact {
            subject: "flotilla.r1.eval.1.24.heldout".parse().unwrap(),
            body: FactBody::Eval(v1::Eval {
                run: "r1".into(),
                cycle: 1,
                step: 24,
                suite: "heldout".into(),
                perplexity: 1.5,
                tokens: 12,
                ..Default::default()
            }),
        };
        let payload = fact.to_json();
        assert_eq!(
            String::from_utf8(payload.clone()).unwrap(),
            r#"{"run":"r1","cycle":1,"step":24,"suite":"heldout","perplexity":1.5,"tokens":"12"}"#
        );
        assert_eq!(Fact::from_json("flotilla.r1.eval.1.24.heldout", &payload).unwrap(), fact);
    }

    #[test]
    fn a_number_that_is_none_can_be_read_by_others() {
        let subject = "flotilla.r1.checkpoint.1.24";
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let body = FactBody::Checkpoint(v1::Checkpoint { loss, ..Default::default() });
            let payload = Fact { subject: subject.parse().unwrap(), body }.to_json();
            let FactBody::Checkpoint(read) = Fact::from_json(subject, &payload).unwrap().body
            else {
                panic!("a checkpoint's subject")
            };
            assert!(read.loss.is_nan(), "{}", read.loss);
        }
    }

    #[test]
    fn a_record_reads_back_from_its_line() {
        let fact = Fact::from_json("flotilla.r1.done", br#"{"status":"FAILED","message":"a\nb"}"#)
            .unwrap();
        let record = Record { sequence: 7, time_ms: 1_795_176_000_123, author: None, fact };
        let line = record.to_line();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(Record::from_line(&line).unwrap(), record);
        assert!(Record::from_line(b"{}").is_err());
    }

    #[test]
    fn fields_of_a_newer_version_are_ignored() {
        let fact =
            Fact::from_json("flotilla.r1.done", br#"{"status":"FAILED","later":1}"#).unwrap();
        assert_eq!(
            fact.body,
            FactBody::Done(v1::Done {
                status: v1::done::Status::Failed.into(),
                message: "".into()
            })
        );
    }

    #[test]
    fn a_spec_is_refused_under_the_subject_of_another_kind() {
        let raft = br#"{"run":"r1","raft":{"verifier":{"command":{"argv":["sh"]}}}}"#;
        let watched = br#"{"run":"r1","watched":{"source":"out","host":"box"}}"#;
        let refused = |subject: &str, payload: &[u8]| {
            matches!(Fact::from_json(subject, payload), Err(FactError::SpecKind { .. }))
        };
        assert!(refused("flotilla.r1.watched", raft));
        assert!(refused("flotilla.r1.watched", b"{}"));
        assert!(refused("flotilla.r1.spec", watched));
        assert!(Fact::from_json("flotilla.r1.spec", raft).is_ok());
        assert!(Fact::from_json("flotilla.r1.watched", watched).is_ok());
        let archived = Record::from_log(1, 0, "flotilla.r1.watched.me", raft).unwrap_err();
        assert!(matches!(archived, FactError::SpecKind { .. }), "{archived}");
    }

    #[test]
    fn an_agent_s_fact_of_countless_objects_is_refused() {
        let parse = |subject: &str, payload: String| Fact::from_json(subject, payload.as_bytes());
        let list = |count: usize| vec!["{}"; count].join(",");
        let samples = |count| {
            parse("flotilla.r1.samples.1.t00000", format!(r#"{{"samples":[{}]}}"#, list(count)))
        };
        // The message is an object too.
        assert!(samples(OBJECTS_MAX - 1).is_ok());
        let error = samples(OBJECTS_MAX).unwrap_err();
        let why = crate::format_error_chain(&error);
        assert!(why.contains("not a Samples message (B113)"), "{why}");
        assert!(why.contains("more than 100000 objects"), "{why}");
        let plan = format!(r#"{{"jobs":[{}]}}"#, list(OBJECTS_MAX));
        assert!(parse("flotilla.r1.cycle.1.plan", plan).is_ok(), "the coordinator wrote it");

        let code = "{\"{\\".repeat(OBJECTS_MAX);
        let text = serde_json::json!({ "samples": [{ "text": code }] }).to_string();
        assert!(parse("flotilla.r1.samples.1.t00000", text).is_ok(), "a text is no object");
    }

    #[test]
    fn a_payload_that_does_not_parse_names_its_subject() {
        let error = Fact::from_json("flotilla.r1.done", b"{").unwrap_err();
        assert_eq!(error.to_string(), "read the fact flotilla.r1.done: not a Done message (B113)");
    }
}
