//! Reads scored sequences from JSON lines.

use serde::{Deserialize, Deserializer, de::Error as _};

use crate::ScoredSequence;

/// A line of a file of scored sequences. Log-probabilities are natural logarithms, one per token;
/// `null` stands for a value that is not finite.
#[derive(Debug, Clone, Deserialize)]
struct ScoredLine {
    prompt_id: String,
    reward: f64,
    #[serde(deserialize_with = "read_logprobs")]
    logprobs: Vec<f64>,
    #[serde(default, deserialize_with = "read_optional_logprobs")]
    behaviour: Option<Vec<f64>>,
    #[serde(default, deserialize_with = "read_optional_logprobs")]
    old: Option<Vec<f64>>,
    #[serde(default, deserialize_with = "read_optional_logprobs")]
    reference: Option<Vec<f64>>,
}

/// The error that a line is not a scored sequence. `line` counts from 1.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {reason} (O103)")]
pub struct LineError {
    pub line: usize,
    pub reason: String,
}

/// Rounding may take the log-probability of a certain token slightly above 0.
const LOGPROB_MAX: f64 = 0.01;

/// Reads a sequence from each line that is not blank.
///
/// # Errors
/// With the first line that is not valid, and the reason.
pub fn read_scored_lines(text: &str) -> Result<Vec<ScoredSequence>, LineError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(index, line): (usize, &str)| {
        let read = serde_json::from_str::<ScoredLine>(line);
        let read = read
            .or_else(|error| serde_json::from_str(&replace_bare_names(line)).map_err(|_| error));
        let fail = |reason: String| LineError { line: index + 1, reason };
        let line = read.map_err(|error| fail(error.to_string()))?;
        let ScoredLine { prompt_id, reward, logprobs, behaviour, old, reference } = line;
        Ok(ScoredSequence { prompt_id, reward, logprobs, behaviour, old, reference })
    };
    lines.map(read).collect()
}

/// Replaces the names that Python's `json` writes for numbers that JSON does not have.
fn replace_bare_names(line: &str) -> String {
    let parts = line.split('"').enumerate();
    let replaced = parts.map(|(index, part)| {
        // Every second part is the inside of a string. A string with an escaped quote shifts this;
        // then the line stays wrong and is refused.
        if index % 2 == 1 {
            return part.to_owned();
        }
        part.replace("NaN", "null").replace("-Infinity", "null").replace("Infinity", "null")
    });
    replaced.collect::<Vec<_>>().join("\"")
}

fn read_logprobs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let values = Vec::<Option<f64>>::deserialize(deserializer)?;
    let values: Vec<f64> = values.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect();
    match values.iter().find(|value| **value > LOGPROB_MAX) {
        Some(above) => {
            Err(D::Error::custom(format!("{above} is not a log-probability: it is above 0")))
        }
        None => Ok(values),
    }
}

fn read_optional_logprobs<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<f64>>, D::Error> {
    #[derive(Deserialize)]
    struct Logprobs(#[serde(deserialize_with = "read_logprobs")] Vec<f64>);
    Ok(Option::<Logprobs>::deserialize(deserializer)?.map(|Logprobs(values)| values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_mistakes_are_named_by_line() {
        let text = concat!(
            r#"{"prompt_id":"a","reward":1,"logprobs":[-0.5,-1],"behaviour":[-0.4,NaN]}"#,
            "\n\n",
            r#"{"prompt_id":"b","reward":0,"logprobs":[],"reference":null,"more":[1]}"#,
            "\n",
        );
        let read = read_scored_lines(text).unwrap();
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].logprobs, [-0.5, -1.0]);
        assert!(read[0].behaviour.as_ref().unwrap()[1].is_nan());
        assert_eq!(read[1].reference, None);
        for (wrong, reason) in [
            (r#"{"reward":1,"logprobs":[]}"#, "prompt_id"),
            (r#"{"prompt_id":"a","reward":null,"logprobs":[]}"#, "invalid type: null"),
            (r#"{"prompt_id":"a","reward":1,"logprobs":[0.7]}"#, "0.7 is not a log-probability"),
            (r#"{"prompt_id":"a","reward":1,"logprobs":"#, "EOF"),
        ] {
            let error = read_scored_lines(&format!("\n{wrong}")).unwrap_err();
            assert_eq!(error.line, 2);
            assert!(error.reason.contains(reason), "{error}");
        }
    }
}
