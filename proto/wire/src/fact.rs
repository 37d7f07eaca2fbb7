//! A fact: a subject and the message that belongs there, and its form on the bus.

use std::io::{self, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::ser::Formatter;

use crate::{
    AgentId, Subject,
    subject::{Place, SubjectError},
    v1,
};

/// One entry of the log.
#[derive(Debug, Clone, PartialEq)]
pub struct Fact {
    pub subject: Subject,
    pub body: Body,
}

/// What a fact says.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a spec is read once a run; few facts are held")]
pub enum Body {
    Spec(v1::Spec),
    Control(v1::Control),
    Plan(v1::Plan),
    GenerateOrder(v1::GenerateOrder),
    Samples(v1::Samples),
    Quarantine(v1::Quarantine),
    Verdicts(v1::Verdicts),
    Selected(v1::Selected),
    TrainOrder(v1::TrainOrder),
    Checkpoint(v1::Checkpoint),
    Eval(v1::Eval),
    Failure(v1::Failure),
    CycleDone(v1::CycleDone),
    Archived(v1::Archived),
    Done(v1::Done),
}

/// A fact as the log holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Position in the log, from 1.
    pub sequence: u64,
    /// When the log accepted it, in milliseconds since 1970: the one clock all peers share.
    pub time_ms: u64,
    /// Who wrote it, as the server saw to; only in closed fleets.
    pub author: Option<AgentId>,
    pub fact: Fact,
}

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
    #[error("read the fact {subject}: {author} wrote it, in the name of {named} (B113)")]
    Author { subject: String, author: AgentId, named: String },
}

/// A line of an archive that is no record.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("not a line with sequence, time_ms, subject and fact (B113)")]
    Json(#[source] serde_json::Error),
    #[error(transparent)]
    Fact(#[from] FactError),
}

impl Fact {
    /// Reads a fact from its subject and its canonical proto3 JSON.
    ///
    /// # Errors
    /// When the subject is no fact's, or the payload is not the message that belongs there.
    pub fn decode(subject: &str, payload: &[u8]) -> Result<Self, FactError> {
        let subject: Subject = subject.parse()?;
        let body = Body::decode(&subject, payload)?;
        Ok(Self { subject, body })
    }

    /// The fact's canonical proto3 JSON.
    pub fn encode(&self) -> Vec<u8> {
        self.body.encode()
    }
}

impl Body {
    fn decode(subject: &Subject, payload: &[u8]) -> Result<Self, FactError> {
        Ok(match subject.place {
            Place::Spec => Self::Spec(json(subject, "Spec", payload)?),
            Place::Control { .. } => Self::Control(json(subject, "Control", payload)?),
            Place::Plan { .. } => Self::Plan(json(subject, "Plan", payload)?),
            Place::GenerateOrder { .. } => {
                Self::GenerateOrder(json(subject, "GenerateOrder", payload)?)
            }
            Place::Samples { .. } => Self::Samples(json(subject, "Samples", payload)?),
            Place::Quarantine { .. } => Self::Quarantine(json(subject, "Quarantine", payload)?),
            Place::Verdicts { .. } => Self::Verdicts(json(subject, "Verdicts", payload)?),
            Place::Selection { .. } => Self::Selected(json(subject, "Selected", payload)?),
            Place::TrainOrder { .. } => Self::TrainOrder(json(subject, "TrainOrder", payload)?),
            Place::Checkpoint { .. } => Self::Checkpoint(json(subject, "Checkpoint", payload)?),
            Place::Eval { .. } => Self::Eval(json(subject, "Eval", payload)?),
            Place::Failure { .. } => Self::Failure(json(subject, "Failure", payload)?),
            Place::CycleDone { .. } => Self::CycleDone(json(subject, "CycleDone", payload)?),
            Place::Archived { .. } => Self::Archived(json(subject, "Archived", payload)?),
            Place::Done => Self::Done(json(subject, "Done", payload)?),
        })
    }

    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Spec(message) => bytes(message),
            Self::Control(message) => bytes(message),
            Self::Plan(message) => bytes(message),
            Self::GenerateOrder(message) => bytes(message),
            Self::Samples(message) => bytes(message),
            Self::Quarantine(message) => bytes(message),
            Self::Verdicts(message) => bytes(message),
            Self::Selected(message) => bytes(message),
            Self::TrainOrder(message) => bytes(message),
            Self::Checkpoint(message) => bytes(message),
            Self::Eval(message) => bytes(message),
            Self::Failure(message) => bytes(message),
            Self::CycleDone(message) => bytes(message),
            Self::Archived(message) => bytes(message),
            Self::Done(message) => bytes(message),
        }
    }

    /// The agent in whose name it is said.
    fn agent(&self) -> Option<&str> {
        let agent = match self {
            Self::Samples(samples) => &samples.agent,
            Self::Verdicts(verdicts) => &verdicts.agent,
            Self::Checkpoint(checkpoint) => &checkpoint.agent,
            Self::Eval(eval) => &eval.agent,
            Self::Failure(failure) => &failure.agent,
            _ => return None,
        };
        Some(agent.as_str()).filter(|agent| !agent.is_empty())
    }

    /// The message's name in `flotilla.v1`, as the fact's header gives it.
    pub fn message_name(&self) -> &'static str {
        match self {
            Self::Spec(_) => "Spec",
            Self::Control(_) => "Control",
            Self::Plan(_) => "Plan",
            Self::GenerateOrder(_) => "GenerateOrder",
            Self::Samples(_) => "Samples",
            Self::Quarantine(_) => "Quarantine",
            Self::Verdicts(_) => "Verdicts",
            Self::Selected(_) => "Selected",
            Self::TrainOrder(_) => "TrainOrder",
            Self::Checkpoint(_) => "Checkpoint",
            Self::Eval(_) => "Eval",
            Self::Failure(_) => "Failure",
            Self::CycleDone(_) => "CycleDone",
            Self::Archived(_) => "Archived",
            Self::Done(_) => "Done",
        }
    }
}

impl Record {
    /// The record as a line of JSON, newline included: how archives hold it.
    pub fn to_line(&self) -> Vec<u8> {
        let Self { sequence, time_ms, author, fact } = self;
        let subject = author
            .as_ref()
            .map_or_else(|| fact.subject.to_string(), |author| fact.subject.authored(author));
        // A subject needs no escapes.
        let head =
            format!(r#"{{"sequence":{sequence},"time_ms":{time_ms},"subject":"{subject}","fact":"#);
        [head.as_bytes(), &fact.encode(), b"}\n"].concat()
    }

    /// Reads what `to_line` wrote.
    ///
    /// # Errors
    /// When it is no such line.
    pub fn from_line(line: &[u8]) -> Result<Self, LineError> {
        #[derive(Deserialize)]
        struct Line {
            sequence: u64,
            time_ms: u64,
            subject: String,
            fact: serde_json::Value,
        }
        let Line { sequence, time_ms, subject, fact } =
            serde_json::from_slice(line).map_err(LineError::Json)?;
        Ok(Self::read(sequence, time_ms, &subject, fact.to_string().as_bytes())?)
    }

    /// What the log holds at `subject`, where the author may stand too.
    ///
    /// # Errors
    /// When it is no fact, or one in somebody else's name.
    pub fn read(
        sequence: u64,
        time_ms: u64,
        subject: &str,
        payload: &[u8],
    ) -> Result<Self, FactError> {
        let (place, author) = Subject::of_log(subject)?;
        let body = Body::decode(&place, payload)?;
        if let (Some(author), Some(named)) = (&author, body.agent())
            && author.as_str() != named
        {
            let (subject, named) = (subject.to_owned(), named.to_owned());
            return Err(FactError::Author { subject, author: author.clone(), named });
        }
        Ok(Self { sequence, time_ms, author, fact: Fact { subject: place, body } })
    }
}

fn json<M: DeserializeOwned>(
    subject: &Subject,
    message: &'static str,
    payload: &[u8],
) -> Result<M, FactError> {
    serde_json::from_slice(payload).map_err(|source| FactError::Json {
        subject: subject.to_string(),
        message,
        source,
    })
}

fn bytes<M: Serialize>(message: &M) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, Proto);
    message.serialize(&mut serializer).expect("a generated message has only string keys");
    bytes
}

/// JSON as proto3 has it. Messages hold no nulls: where `serde_json` writes one, there is a
/// number that is none, and as null nobody could read the fact.
struct Proto;

impl Formatter for Proto {
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
            if let Ok(fact) = Fact::decode(&subject, payload.as_bytes()) {
                prop_assert_eq!(fact.subject.to_string(), subject);
            }
        }
    }

    #[test]
    fn a_fact_is_readable_json_and_reads_back() {
        let fact = Fact {
            subject: "flotilla.r1.eval.1.24.heldout".parse().unwrap(),
            body: Body::Eval(v1::Eval {
                run: "r1".into(),
                cycle: 1,
                step: 24,
                suite: "heldout".into(),
                perplexity: 1.5,
                tokens: 12,
                ..Default::default()
            }),
        };
        let payload = fact.encode();
        assert_eq!(
            String::from_utf8(payload.clone()).unwrap(),
            r#"{"run":"r1","cycle":1,"step":24,"suite":"heldout","perplexity":1.5,"tokens":"12"}"#
        );
        assert_eq!(Fact::decode("flotilla.r1.eval.1.24.heldout", &payload).unwrap(), fact);
    }

    #[test]
    fn a_number_that_is_none_can_be_read_by_others() {
        let subject = "flotilla.r1.checkpoint.1.24";
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let body = Body::Checkpoint(v1::Checkpoint { loss, ..Default::default() });
            let payload = Fact { subject: subject.parse().unwrap(), body }.encode();
            let Body::Checkpoint(read) = Fact::decode(subject, &payload).unwrap().body else {
                panic!("a checkpoint's subject")
            };
            assert!(read.loss.is_nan(), "{}", read.loss);
        }
    }

    #[test]
    fn a_record_reads_back_from_its_line() {
        let fact =
            Fact::decode("flotilla.r1.done", br#"{"status":"FAILED","message":"a\nb"}"#).unwrap();
        let record = Record { sequence: 7, time_ms: 1_795_176_000_123, author: None, fact };
        let line = record.to_line();
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(Record::from_line(&line).unwrap(), record);
        assert!(Record::from_line(b"{}").is_err());
    }

    #[test]
    fn fields_of_a_newer_version_are_ignored() {
        let fact = Fact::decode("flotilla.r1.done", br#"{"status":"FAILED","later":1}"#).unwrap();
        assert_eq!(
            fact.body,
            Body::Done(v1::Done { status: v1::done::Status::Failed.into(), message: "".into() })
        );
    }

    #[test]
    fn a_payload_that_does_not_parse_names_its_subject() {
        let error = Fact::decode("flotilla.r1.done", b"{").unwrap_err();
        assert_eq!(error.to_string(), "read the fact flotilla.r1.done: not a Done message (B113)");
    }
}
