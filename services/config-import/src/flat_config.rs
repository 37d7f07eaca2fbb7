//! A configuration as a list of keys such as `datasets[0].path`.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::report::ImportError;

/// A configuration of a training has some hundred keys in some KiB.
const CONFIG_BYTES_MAX: usize = 1 << 20;
const KEYS_MAX: usize = 2000;
/// The longest key, with its sections. A section's name is in the key of each of its values.
const KEY_BYTES_MAX: usize = 1000;

/// The keys of a configuration, without sections. A list is one value, unless it has sections.
#[derive(Debug)]
pub(crate) struct FlatConfig<'a> {
    text: &'a str,
    pub(crate) keys: BTreeMap<String, Value>,
}

impl<'a> FlatConfig<'a> {
    /// Parses YAML or JSON.
    pub(crate) fn parse(text: &'a str) -> Result<Self, ImportError> {
        let bytes = text.len();
        if bytes > CONFIG_BYTES_MAX {
            let size = format!("{bytes} bytes");
            return Err(ImportError::TooLarge { size, limit: CONFIG_BYTES_MAX });
        }
        // JSON may be indented by tabs, YAML may not.
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(_) => spec::parse_yaml(text).map_err(ImportError::Yaml)?,
        };
        let Value::Object(sections) = value else { return Err(ImportError::Shape) };
        let mut keys = BTreeMap::new();
        for (key, value) in sections {
            add_keys(&mut keys, key, value)?;
        }
        Ok(Self { text, keys })
    }

    /// Describes the place of a key for an error, with its line if it is known.
    pub(crate) fn describe_place(&self, key: &str) -> String {
        match spec::find_place(self.text, key) {
            Some((line, _)) => format!("line {line}: key {key}"),
            None => format!("key {key}"),
        }
    }
}

/// Adds the keys of a section, or of a value. Fails if a key is too long or one too many.
fn add_keys(
    keys: &mut BTreeMap<String, Value>,
    path: String,
    value: Value,
) -> Result<(), ImportError> {
    if path.len() > KEY_BYTES_MAX {
        let size = format!("a key of {} bytes", path.len());
        return Err(ImportError::TooLarge { size, limit: KEY_BYTES_MAX });
    }
    match value {
        Value::Object(section) if !section.is_empty() => {
            for (name, value) in section {
                add_keys(keys, format!("{path}.{name}"), value)?;
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (index, value) in items.into_iter().enumerate() {
                add_keys(keys, format!("{path}[{index}]"), value)?;
            }
        }
        _ if keys.len() >= KEYS_MAX => {
            let size = format!("more than {KEYS_MAX} keys");
            return Err(ImportError::TooLarge { size, limit: KEYS_MAX });
        }
        value => {
            keys.insert(path, value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_and_lists_of_sections_become_keys() {
        let config = FlatConfig::parse("a: 1\nb: { c: [x, y], d: {} }\ne: [{ f: 2 }, { f: }]\n");
        let config = config.unwrap();
        let keys: Vec<&str> = config.keys.keys().map(String::as_str).collect();
        assert_eq!(keys, ["a", "b.c", "b.d", "e[0].f", "e[1].f"]);
        assert_eq!(config.describe_place("e[1].f"), "line 3: key e[1].f");
    }

    #[test]
    fn a_configuration_is_bounded_and_has_keys() {
        let error = |text: &str| FlatConfig::parse(text).unwrap_err().to_string();
        assert!(error("- a").contains("expected keys"), "{}", error("- a"));
        assert!(error(&" ".repeat(CONFIG_BYTES_MAX + 1)).contains("the limit is 1048576"));
        let many: String = (0..=KEYS_MAX).map(|n| format!("k{n}: 1\n")).collect();
        assert!(error(&many).contains("more than 2000 keys, the limit is 2000"));
        let many: String = (0..KEYS_MAX).map(|n| format!("k{n}: 1\n")).collect();
        assert!(FlatConfig::parse(&many).is_ok(), "the limit itself");
        assert!(FlatConfig::parse("{\n\t\"a\": 1\n}").is_ok(), "JSON with tabs");
    }

    #[test]
    fn a_section_is_refused_before_all_its_keys_are_written_out() {
        let error = |text: &str| FlatConfig::parse(text).unwrap_err().to_string();
        let values: Vec<String> = (0..=KEYS_MAX).map(|n| format!("\"c{n}\": 1")).collect();
        let section = format!("{{ {} }}", values.join(", "));
        let long = "k".repeat(KEY_BYTES_MAX + 1);
        let expected = "it has a key of 1001 bytes, the limit is 1000 (R102)";
        assert_eq!(error(&format!("{{ \"{long}\": {section} }}")), expected);
        assert!(error(&format!("{{ \"a\": {section} }}")).contains("more than 2000 keys"));
        let [outer, inner] = [600, 400].map(|size| "k".repeat(size));
        assert_eq!(error(&format!("{{ \"{outer}\": {{ \"{inner}\": 1 }} }}")), expected);
        let longest = &long[1..];
        assert!(FlatConfig::parse(&format!("{{ \"{longest}\": 1 }}")).is_ok(), "the limit itself");
    }
}
