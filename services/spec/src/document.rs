//! Changes of the document of a spec, by the dotted paths of its values.

use serde_json::{Map, Value};

/// Sets the value at a dotted path, with the sections on the way; `null` removes the key. Returns
/// false if a section took the place of another value.
pub(crate) fn set_value(document: &mut Value, path: &str, value: Value) -> bool {
    let mut has_sections = true;
    let mut place = document;
    let (sections, name) = path.rsplit_once('.').map_or((None, path), |(all, it)| (Some(all), it));
    let mut enter = |place: &Value| has_sections &= place.is_object() || place.is_null();
    for section in sections.into_iter().flat_map(|all| all.split('.')) {
        enter(place);
        place = as_section(place).entry(section).or_insert(Value::Null);
    }
    enter(place);
    let section = as_section(place);
    match value {
        Value::Null => drop(section.remove(name)),
        value => drop(section.insert(name.to_owned(), value)),
    }
    has_sections
}

/// Returns the keys of a section. Another value becomes an empty one.
pub(crate) fn as_section(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("it was made one")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_is_set_with_its_sections() {
        for (path, value, is_kept, changed) in [
            ("a.b", json!(2), true, json!({ "a": { "b": 2, "c": null } })),
            ("a.b", json!(null), true, json!({ "a": { "c": null } })),
            ("a.c.d", json!(2), true, json!({ "a": { "b": 1, "c": { "d": 2 } } })),
            ("x.y", json!([2]), true, json!({ "a": { "b": 1, "c": null }, "x": { "y": [2] } })),
            ("a.b.d", json!(2), false, json!({ "a": { "b": { "d": 2 }, "c": null } })),
        ] {
            let mut document = json!({ "a": { "b": 1, "c": null } });
            assert_eq!(set_value(&mut document, path, value), is_kept, "{path}");
            assert_eq!(document, changed, "{path}");
        }
    }
}
