//! JSON in a completion.

use serde_json::Value;

use crate::fences::find_blocks;

/// Returns the completion if it is JSON, otherwise the last JSON block that is tagged `json` or
/// untagged.
pub(crate) fn find_document(completion: &str) -> Option<Value> {
    let parse = |text: &str| serde_json::from_str(text.trim()).ok();
    let blocks = find_blocks(completion);
    parse(completion).or_else(|| {
        let tagged = |tag: &str| tag.is_empty() || tag.starts_with("json");
        blocks.iter().rev().filter(|block| tagged(&block.tag)).find_map(|block| parse(block.body))
    })
}

/// Treats 1 as 1.0 and ignores the order of keys.
pub(crate) fn json_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => {
            one == other || one.as_f64().is_some_and(|one| other.as_f64() == Some(one))
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| json_equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let found = |(key, value)| other.get(key).is_some_and(|other| json_equal(value, other));
            one.len() == other.len() && one.iter().all(found)
        }
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_is_the_completion_or_its_last_block() {
        assert_eq!(find_document(" {\"a\": 1}\n"), Some(json!({"a": 1})));
        let text = "First\n```json\n[1]\n```\nno:\n```json\n[2]\n```\n```python\n[3]\n```";
        assert_eq!(find_document(text), Some(json!([2])));
        assert_eq!(find_document("the answer is {\"a\": 1}"), None);
    }

    #[test]
    fn numbers_and_the_order_of_keys_are_compared_by_what_they_say() {
        assert!(json_equal(&json!({"a": 1, "b": [2.0]}), &json!({"b": [2], "a": 1.0})));
        assert!(!json_equal(&json!({"a": 1}), &json!({"a": 1, "b": 2})));
        assert!(!json_equal(&json!([1, 2]), &json!([2, 1])));
        assert!(!json_equal(&json!("1"), &json!(1)));
    }
}
