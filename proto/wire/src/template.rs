//! Templates of requests to language models.

/// Replaces all placeholders in one pass: a value that contains a placeholder stays as it is.
pub fn fill_template(template: &str, values: &[(&str, &str)]) -> String {
    let mut filled = String::new();
    let mut rest = template;
    loop {
        let found = values.iter().filter_map(|(name, value)| Some((rest.find(name)?, name, value)));
        let Some((at, name, value)) = found.min_by_key(|(at, ..)| *at) else {
            filled.push_str(rest);
            return filled;
        };
        filled.push_str(&rest[..at]);
        filled.push_str(value);
        rest = &rest[at + name.len()..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_never_a_template() {
        let values = [("{a}", "{b}"), ("{b}", "2")];
        assert_eq!(fill_template("{b}{a}, {c} {b", &values), "2{b}, {c} {b");
        assert_eq!(fill_template("", &values), "");
    }
}
