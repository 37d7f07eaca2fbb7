//! Counts parts of a JSON text before it is parsed. The smallest objects and members take many
//! times their bytes in memory.

/// Returns true if a JSON text has more than `most` of a byte outside of its strings: `{` for each
/// object, `:` for each member of one. Texts in it may be code and contain any number.
pub fn exceeds_json_count(json: &[u8], structural: u8, most: usize) -> bool {
    // The first two tests are cheap, and answer for nearly all texts.
    json.len() > most
        && json.iter().filter(|byte| **byte == structural).count() > most
        && count_outside_strings(json, structural) > most
}

/// Returns true if a JSON text has more than `most` items of lists, members of objects, or values
/// after the first of either. One of four bytes takes up to 200 in memory.
pub fn exceeds_json_values(json: &[u8], most: usize) -> bool {
    b"[:,".iter().any(|structural| exceeds_json_count(json, *structural, most))
}

fn count_outside_strings(json: &[u8], structural: u8) -> usize {
    let (mut count, mut in_string, mut is_escaped) = (0, false, false);
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            byte if *byte == structural && !in_string => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_texts_do_not_count() {
        let json = serde_json::json!({ "a{": [{}, { "b\":{": "\\{\":" }], "c:\\": 1 }).to_string();
        assert_eq!(count_outside_strings(json.as_bytes(), b'{'), 3);
        assert_eq!(count_outside_strings(json.as_bytes(), b':'), 3);
        assert!(exceeds_json_count(json.as_bytes(), b'{', 2));
        assert!(!exceeds_json_count(json.as_bytes(), b'{', 3));
        for many in ["[0,0,0,0]", "[[],[[]]]", "{\"a\":{\"b\":{\"c\":{\"d\":1}}}}"] {
            assert!(exceeds_json_values(many.as_bytes(), 2), "{many}");
            assert!(!exceeds_json_values(many.as_bytes(), 4), "{many}");
        }
        assert!(!exceeds_json_values(br#"["[,:[,:[,:"]"#, 2));
    }
}
