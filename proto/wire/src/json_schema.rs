//! Bounds of the JSON schemas that verifiers compile.

use serde_json::Value;

/// The length of a schema's pattern; a longer one takes too much memory to compile.
const PATTERN_BYTES_MAX: usize = 4096;

/// The patterns of a schema. Each may take milliseconds to compile.
const PATTERNS_MAX: usize = 100;

/// The compiled size of a pattern, in bytes.
pub const COMPILED_PATTERN_MAX: usize = 1 << 20;

/// Checks the number and the lengths of the patterns in a JSON schema: the values of `pattern` and
/// the keys of `patternProperties`, wherever they are.
///
/// # Errors
/// The text says what is too large.
pub fn check_schema_patterns(schema: &Value) -> Result<(), String> {
    let (mut pending, mut patterns) = (vec![schema], 0);
    while let Some(value) = pending.pop() {
        let object = match value {
            Value::Array(items) => {
                pending.extend(items);
                continue;
            }
            Value::Object(object) => object,
            _ => continue,
        };
        let named = object.get("pattern").and_then(Value::as_str);
        let keys = object.get("patternProperties").and_then(Value::as_object);
        let keys = keys.into_iter().flat_map(|keys| keys.keys().map(String::as_str));
        for pattern in named.into_iter().chain(keys) {
            patterns += 1;
            let bytes = pattern.len();
            if bytes > PATTERN_BYTES_MAX {
                return Err(format!(
                    "a pattern has {bytes} bytes, the limit is {PATTERN_BYTES_MAX}"
                ));
            }
        }
        if patterns > PATTERNS_MAX {
            return Err(format!("it has more than {PATTERNS_MAX} patterns"));
        }
        pending.extend(object.values());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn long_and_many_patterns_are_refused_wherever_they_are() {
        let fine = json!({ "properties": { "a": { "pattern": "^a+$" }, "pattern": {} } });
        assert_eq!(check_schema_patterns(&fine), Ok(()));
        let long = "a".repeat(PATTERN_BYTES_MAX + 1);
        for schema in [
            json!({ "allOf": [{ "properties": { "a": { "pattern": long } } }] }),
            json!({ "$defs": { "x": { "patternProperties": { long.as_str(): true } } } }),
        ] {
            assert!(check_schema_patterns(&schema).unwrap_err().contains("4097 bytes"));
        }
        let many: Vec<_> = (0..=PATTERNS_MAX).map(|_| json!({ "pattern": "a" })).collect();
        assert!(check_schema_patterns(&json!({ "anyOf": many })).unwrap_err().contains("100"));
    }
}
