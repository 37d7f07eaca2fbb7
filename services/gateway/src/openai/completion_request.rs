//! The fields of a request that the proxy reads; the rest is for the model. A request of 4 MiB may
//! have a million small values: none but these fields are kept in memory.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor},
};

#[derive(Debug, Deserialize)]
pub(super) struct CompletionRequest {
    pub model: String,
    pub stream: Option<bool>,
}

impl CompletionRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// It is no JSON object, or nested too deeply, which servers of models need not survive.
    pub(super) fn parse_body(body: &[u8]) -> serde_json::Result<Self> {
        // Structures are read from lists as well.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Err(de::Error::custom("it is no object"));
        }
        let CheckedValue = serde_json::from_slice(body)?;
        serde_json::from_slice(body)
    }
}

/// Any value, of which only the depth is checked: that of `serde_json` for values that it visits.
struct CheckedValue;

impl<'de> Deserialize<'de> for CheckedValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for CheckedValue {
    type Value = Self;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self, A::Error> {
        while fields.next_entry::<Self, Self>()?.is_some() {}
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_objects_with_a_model_that_are_not_too_deep_are_requests() {
        let read = |body: &str| CompletionRequest::parse_body(body.as_bytes());
        let found =
            read(r#" {"stream": true, "x": [{"a": [1, -1, 0.5, null, "\u00fc"]}], "model": "m"}"#);
        let found = found.unwrap();
        assert_eq!((found.model.as_str(), found.stream), ("m", Some(true)));
        assert_eq!(read(r#"{"model": "m", "stream": null}"#).unwrap().stream, None);
        let nested = |depth: usize| {
            format!(r#"{{"model": "m", "x": {}{}}}"#, "[".repeat(depth), "]".repeat(depth))
        };
        assert!(read(&nested(100)).is_ok());
        for wrong in [
            &nested(2000),
            r#"["m", true]"#,
            "{}",
            r#"{"model": 1}"#,
            r#"{"model": "m", "model": "n"}"#,
            r#"{"model": "m"} {}"#,
            "",
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
