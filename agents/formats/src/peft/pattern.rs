//! `rank_pattern` and `alpha_pattern`: values for modules whose path matches a key. PEFT matches a
//! key as a regular expression against the end of a module's path, at a dot or at the start, and
//! uses the first match in the order of the file.

use regex::Regex;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// An object whose keys keep their order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct OrderedObject(pub(super) Vec<(String, Value)>);

impl<'de> Deserialize<'de> for OrderedObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = OrderedObject;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object or null")
            }

            fn visit_unit<E>(self) -> Result<OrderedObject, E> {
                Ok(OrderedObject::default())
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<OrderedObject, M::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    // A duplicate key keeps its first position and its last value, as in Python.
                    match entries.iter_mut().find(|(other, _)| *other == key) {
                        Some((_, before)) => *before = value,
                        None => entries.push((key, value)),
                    }
                }
                Ok(OrderedObject(entries))
            }
        }
        deserializer.deserialize_any(Entries)
    }
}

impl Serialize for OrderedObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct ModulePattern {
    written: OrderedObject,
    keys: Vec<Regex>,
}

impl ModulePattern {
    /// Fails with the first key that is not a valid regular expression.
    pub(super) fn new(written: OrderedObject) -> Result<Self, String> {
        let expression = |(key, _): &(String, Value)| {
            Regex::new(&format!(r"^(?:.*\.)?(?:{key})$")).map_err(|_| key.clone())
        };
        let keys = written.0.iter().map(expression).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { written, keys })
    }

    pub(super) fn as_written(&self) -> &OrderedObject {
        &self.written
    }

    /// Returns the value of the first key that matches a path from the base model's root.
    pub(super) fn value_for(&self, path: &str) -> Option<&Value> {
        let index = self.keys.iter().position(|key| key.is_match(path))?;
        self.written.0.get(index).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Result<ModulePattern, String> {
        ModulePattern::new(serde_json::from_str(text).unwrap())
    }

    #[test]
    fn the_first_key_in_the_file_s_order_that_matches_counts() {
        let path = "model.layers.11.self_attn.q_proj";
        for (text, expected) in [
            (r#"{}"#, None),
            ("null", None),
            (r#"{"z.*_proj": 1, "q_proj": 2, "a": 3}"#, Some(2)),
            (r#"{"self_attn.q_proj": 1, "q_proj": 2}"#, Some(1)),
            (r#"{"q_proj": 2, "self_attn.q_proj": 1}"#, Some(2)),
            (r#"{"proj": 1, "attn.q_proj": 2, "q_pro": 3}"#, None),
            (r#"{"layers.1.self_attn.q_proj": 1}"#, None),
            (r#"{"layers\\.(1|11)\\..*": 1}"#, Some(1)),
            (r#"{"^model.layers.11.self_attn.q_proj": 4}"#, Some(4)),
            (r#"{"k_proj|q_proj": 1}"#, Some(1)),
            (r#"{"model.layers.\\d+.self_attn.q_proj": 1}"#, Some(1)),
            (r#"{"q_proj": 1, "k_proj": 2, "q_proj": 3}"#, Some(3)),
        ] {
            let found = pattern(text).unwrap().value_for(path).and_then(Value::as_u64);
            assert_eq!(found, expected, "{text}");
        }
        assert_eq!(pattern(r#"{"fine": 1, "(?<!a)q_proj": 2}"#).unwrap_err(), "(?<!a)q_proj");
    }

    #[test]
    fn the_order_survives_writing() {
        let text = r#"{"z":1,"a":2.5,"m":3}"#;
        let read: OrderedObject = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }
}
