//! Reads YAML into sections, with errors that name the key, what may stand there, and the line.

use std::collections::BTreeSet;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_saphyr::Error as YamlError;

use crate::{
    error::{FieldError, SpecError, SpecErrorCode},
    similar::find_similar,
    source_map::{SourceMap, SourcePlace},
};

/// Parses YAML. The error names the place of the mistake and what may stand there.
pub fn parse_yaml<T: DeserializeOwned>(yaml: &str) -> Result<T, SpecError> {
    serde_saphyr::from_str(yaml).map_err(|error| explain_error(yaml, error.without_snippet()))
}

/// Parses YAML and checks its fields. A number of another form or size is refused with the range
/// that the check of its field allows.
pub(crate) fn parse_checked<T: DeserializeOwned>(
    yaml: &str,
    check: impl Fn(&T) -> Result<(), FieldError>,
) -> Result<T, SpecError> {
    let parsed: T = match serde_saphyr::from_str(yaml) {
        Ok(parsed) => parsed,
        Err(error) => {
            let error = error.without_snippet();
            let found = refused_number(yaml, error, &check);
            return Err(found.unwrap_or_else(|| explain_error(yaml, error)));
        }
    };
    check(&parsed).map_err(|error| SpecError::from_field(yaml, &error))?;
    Ok(parsed)
}

/// Returns the error of a scalar that is no number of its type, with the range that the check
/// allows: the check is asked about the largest number in its place.
fn refused_number<T: DeserializeOwned>(
    yaml: &str,
    error: &YamlError,
    check: impl Fn(&T) -> Result<(), FieldError>,
) -> Option<SpecError> {
    let YamlError::InvalidScalar { ty: "u32", .. } = error else { return None };
    let map = SourceMap::read(yaml);
    let place = place_of(&map, error)?;
    let written = text_at(yaml, place);
    let largest = u32::MAX.to_string();
    let lines = yaml.lines().enumerate().map(|(index, line)| {
        if index + 1 != place.line {
            return line.to_owned();
        }
        let before: String = line.chars().take(place.column - 1).collect();
        let after: String = line.chars().skip(place.column - 1 + place.width).collect();
        format!("{before}{largest}{after}")
    });
    let tried: T = serde_saphyr::from_str(&lines.collect::<Vec<_>>().join("\n")).ok()?;
    let FieldError { field, remedy } = check(&tried).err()?;
    if map.path_at(place.line, place.column) != Some(&*field) {
        return None;
    }
    let range = remedy.strip_suffix(&format!(", not {largest}"))?;
    let message = format!("{field}: {range}, not {written}");
    Some(SpecError::new(yaml, SpecErrorCode::InvalidField, message, Some(place)))
}

const SPEC_FORM: &str =
    "a spec is a section of keys, such as name, base and raft; `flotilla run new` writes one";

fn explain_error(yaml: &str, error: &YamlError) -> SpecError {
    if let Some(error) = explain_json(yaml) {
        return error;
    }
    let map = SourceMap::read(yaml);
    let mut place = place_in_text(yaml, &map, error);
    let path = place.and_then(|place| map.path_at(place.line, place.column));
    let written = place.map_or_else(String::new, |place| text_at(yaml, place));
    let is_empty = place.is_some_and(|place| map.is_empty_at(place.line, place.column));
    let field = match path {
        Some("") | None => String::new(),
        Some(path) => format!("{path}: "),
    };
    let is_key = place.is_some_and(|place| map.has_key_at(place.line, place.column));
    let section = match path {
        Some(path) if is_key => path.rsplit_once('.').map_or("", |(section, _)| section),
        // The value of the section, such as `{}`.
        path => path.unwrap_or_default(),
    };
    let within = if section.is_empty() { String::new() } else { format!(" in {section}") };
    let message = match error {
        _ if map.is_blank() => SPEC_FORM.to_owned(),
        _ if is_empty && !is_key => format!("{field}has no value"),
        YamlError::SerdeUnknownVariant { variant, expected, .. } if !is_key => {
            format!("{field}{}", describe_choice(variant, expected))
        }
        YamlError::SerdeUnknownField { field: key, expected, .. }
        | YamlError::SerdeUnknownVariant { variant: key, expected, .. } => {
            format!("unknown key {}{within}{}", cut(key), known_keys(key, expected))
        }
        YamlError::SerdeMissingField { field: key, .. } => {
            place = map.find_key(section).or(place);
            format!("the key {key} is missing{within}{}", missing_key_example(key))
        }
        YamlError::InvalidScalar { ty, .. } => {
            format!("{field}must be {}, not {written}", scalar_name(ty))
        }
        YamlError::InvalidBooleanStrict { .. } => {
            format!("{field}must be true or false, not {written}")
        }
        YamlError::NullIntoString { .. } => format!("{field}has no value"),
        YamlError::DuplicateMappingKey { key, .. } => {
            format!("the key {} is written twice", cut(key.as_deref().unwrap_or(&written)))
        }
        YamlError::SerdeInvalidType { unexpected, expected, .. }
        | YamlError::SerdeInvalidValue { unexpected, expected, .. } => {
            format!("{field}must be {expected}, not {}", cut(unexpected))
        }
        YamlError::Unexpected { expected, .. } => {
            describe_unexpected(path.unwrap_or_default(), expected, &written)
        }
        YamlError::Message { msg, .. } => format!("{field}{msg}"),
        YamlError::ExternalMessage { msg, .. } if is_about_tab(msg) => {
            place = place.map(|place| find_tab(yaml, place));
            "a tab; YAML is indented by spaces".to_owned()
        }
        YamlError::ExternalMessage { msg, .. } => describe_structure(yaml, place, msg),
        other if plain_text(other).contains("multiple YAML documents") => {
            "a spec is one document; remove the line ---".to_owned()
        }
        other => format!("{field}{}", plain_text(other)),
    };
    let until = place.map_or(usize::MAX, |place| place.line);
    let message = match yaml_advice(yaml, until, &message) {
        Some(advice) => format!("{advice}: {message}"),
        None => message,
    };
    SpecError::new(yaml, SpecErrorCode::Unreadable, message, place)
}

fn is_about_tab(message: &str) -> bool {
    ["found a tab", "tabs disallowed"].iter().any(|it| message.contains(it))
}

/// Explains the first mistake in a document that is meant as JSON, which is stricter than YAML;
/// `None` for other documents, and without a mistake.
fn explain_json(text: &str) -> Option<SpecError> {
    let first = text.trim_start().strip_prefix('{')?.trim_start();
    let error =
        serde_json::from_str::<IgnoredAny>(text).err().filter(|_| first.starts_with('"'))?;
    let (line, column) = (error.line(), error.column());
    let message = error.to_string();
    let message = message.strip_suffix(&format!(" at line {line} column {column}"));
    let message = format!("this JSON has a mistake: {}", message?);
    // The end of a document is after its last line.
    let line = line.min(text.lines().count());
    let place = SourcePlace { line, column: column.max(1), width: 1 };
    Some(SpecError::new(text, SpecErrorCode::Unreadable, message, Some(place)))
}

/// Returns a message about a line that YAML cannot place, or else YAML's own message.
fn describe_structure(yaml: &str, place: Option<SourcePlace>, own: &str) -> String {
    let plain = if own.contains("did not find expected key") {
        "a key is expected here, such as name: mine; check the indentation and the quotes"
    } else if own.contains("expected '-' indicator") {
        "an item that begins with - is expected here; check the indentation"
    } else if own.contains("invalid indentation") || own.contains("<document start>") {
        "the indentation does not fit the lines above"
    } else {
        return own.to_owned();
    };
    let indentation = place.and_then(|place| describe_indentation(yaml, place));
    indentation.unwrap_or_else(|| plain.to_owned())
}

/// Returns a message about the first text of a line, if it begins where no section above it does.
fn describe_indentation(yaml: &str, place: SourcePlace) -> Option<String> {
    let lines: Vec<&str> = yaml.lines().take(place.line).collect();
    let (line, above) = lines.split_last()?;
    let found = place.column.checked_sub(1)?;
    if line.len() - line.trim_start_matches(' ').len() != found {
        return None;
    }
    let is_written = |line: &&&str| !matches!(line.trim_start().chars().next(), None | Some('#'));
    let (mut open, mut innermost) = (BTreeSet::new(), usize::MAX);
    for begins in above.iter().rev().filter(is_written).map(|line| item_indents(line)) {
        // What is further in than a later line has ended before that line.
        open.extend(begins.iter().copied().filter(|indent| *indent < innermost));
        innermost = begins.first().map_or(innermost, |least| innermost.min(*least));
    }
    if open.is_empty() || open.contains(&found) {
        return None;
    }
    let open: Vec<String> = open.iter().map(usize::to_string).collect();
    let spaces = if found == 1 { "space" } else { "spaces" };
    Some(format!("indented by {found} {spaces}; the lines above have {}", open.join(" or ")))
}

/// Returns the spaces before the text of a line, and before the text of each list item in it.
fn item_indents(line: &str) -> Vec<usize> {
    let (mut indents, mut rest) = (Vec::new(), line);
    loop {
        let text = rest.trim_start_matches(' ');
        indents.push(line.len() - text.len());
        match text.strip_prefix("- ") {
            Some(item) => rest = item,
            None => return indents,
        }
    }
}

/// Returns a message about a value of another kind than its field takes.
fn describe_unexpected(path: &str, expected: &str, written: &str) -> String {
    let example = missing_key_example(path.rsplit('.').next().unwrap_or_default());
    let written = if written == "[" { "a list" } else { written };
    match (path, expected) {
        ("", _) => SPEC_FORM.to_owned(),
        (_, "mapping start") => {
            format!("{path}: must be a section of keys{example}, not {written}")
        }
        (_, "sequence start") => format!("{path}: must be a list, such as [a, b], not {written}"),
        (_, "string scalar") => format!("{path}: must be one value, not a list or a section"),
        _ => format!("{path}: expected {expected}"),
    }
}

/// Returns the likely cause of a mistake, up to a line, that YAML's own message does not name.
fn yaml_advice(yaml: &str, until: usize, message: &str) -> Option<String> {
    let advice = if message.contains("escape") {
        "write a pattern in single quotes, in which a backslash stays one"
    } else if message.contains("mapping values are not allowed") {
        "this line is indented otherwise than the one above, or a text with a colon lacks quotes"
    } else if is_left_open(yaml) {
        let lines = yaml.lines().take(until).enumerate();
        let (index, _) = lines.filter(|(_, line)| is_left_open(line)).last()?;
        return Some(format!("a bracket of line {} may be left open", index + 1));
    } else if message.contains("did not find expected ',' or '}'") {
        "a comma is missing, or a text with a colon lacks quotes"
    } else {
        return None;
    };
    Some(advice.to_owned())
}

/// Returns words with an example of a key that every spec needs.
fn missing_key_example(key: &str) -> &'static str {
    match key {
        "base" => ", such as base: { model: org/name } or base: { checkpoint: RUN }",
        "verifier" => ", such as verifier: { numeric: {} }",
        "prompts" => ", such as prompts: prompts.jsonl",
        "data" => ", such as data: examples.jsonl",
        "lora" => ", such as lora: { r: 16, alpha: 32 }",
        "training" => ", such as training: { epochs: 1 }",
        "sampling" => ", such as sampling: { temperature: 0.8 }",
        _ => "",
    }
}

/// Returns true if lines have more opening than closing brackets.
fn is_left_open(lines: &str) -> bool {
    let texts = lines.lines().map(|line| line.split(" #").next().unwrap_or_default());
    let text: String = texts.collect();
    let count = |bracket: char| text.matches(bracket).count();
    count('{') > count('}') || count('[') > count(']')
}

/// Returns the text of an error without its location.
fn plain_text(error: &YamlError) -> String {
    let text = error.to_string();
    let text = text.trim_start_matches("error: ").lines().next().unwrap_or_default();
    let is_place = |part: &str| part.starts_with("line ") && part.contains(" column ");
    text.split_once(": ")
        .filter(|(part, _)| is_place(part))
        .map_or(text, |(_, rest)| rest)
        .to_owned()
}

fn place_of(map: &SourceMap, error: &YamlError) -> Option<SourcePlace> {
    let location = error.location()?;
    let number = |number: u64| usize::try_from(number).ok().filter(|number| *number > 0);
    Some(map.place_at(number(location.line())?, number(location.column())?))
}

/// Returns the place of an error; of a text of comments alone the first line, as its end is after
/// its last line.
fn place_in_text(yaml: &str, map: &SourceMap, error: &YamlError) -> Option<SourcePlace> {
    if yaml.lines().all(|line| matches!(line.trim_start().chars().next(), None | Some('#'))) {
        return Some(SourcePlace { line: 1, column: 1, width: 1 });
    }
    place_of(map, error)
}

/// Returns the place of the first tab that indents a line, from a place on.
fn find_tab(yaml: &str, from: SourcePlace) -> SourcePlace {
    let lines = yaml.lines().enumerate().skip(from.line.saturating_sub(1));
    let indented = lines.filter_map(|(index, text)| {
        let indent = text.chars().take_while(|sign| sign.is_whitespace());
        let column = indent.collect::<Vec<char>>().iter().position(|sign| *sign == '\t')? + 1;
        Some(SourcePlace { line: index + 1, column, width: 1 })
    });
    indented.into_iter().next().unwrap_or(from)
}

fn text_at(yaml: &str, place: SourcePlace) -> String {
    let line = yaml.lines().nth(place.line.saturating_sub(1)).unwrap_or_default();
    let text: String =
        line.chars().skip(place.column.saturating_sub(1)).take(place.width).collect();
    cut(&text)
}

/// The longest text of a document that an error repeats, in characters.
const QUOTED_MAX: usize = 60;

fn cut(text: &str) -> String {
    match text.char_indices().nth(QUOTED_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns the rest of a sentence about an unknown key: the most similar key, or else all.
fn known_keys(key: &str, known: &[&str]) -> String {
    let suggestion = match find_similar(key, known.iter().copied()) {
        Some(known) => format!("; did you mean {known}?"),
        None => ".".to_owned(),
    };
    format!("{suggestion} The known keys are: {}", known.join(", "))
}

/// Returns words about a text that is none of the allowed ones, with the most similar one.
pub(crate) fn describe_choice(written: &str, allowed: &[&str]) -> String {
    let similar = find_similar(written, allowed.iter().copied());
    let suggestion = similar.map_or(String::new(), |it| format!("; did you mean {it}?"));
    format!("must be one of {}, not {}{suggestion}", allowed.join(", "), cut(written))
}

/// Returns words for a Rust type.
fn scalar_name(ty: &str) -> &str {
    match ty {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "bool" | "boolean" => "true or false",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use crate::RunSpec;

    const GOOD: &str = "\
name: mine
base: { checkpoint: base-1 }
raft:
  prompts: prompts.jsonl
  cycles: 3
  verifier: { exact: { extract: '#(\\d+)$' } }
  training:
    learning_rate: 0.002
";

    /// Returns the error of the spec with a change.
    fn refused(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        RunSpec::parse(&GOOD.replace(from, to)).unwrap_err().to_string()
    }

    /// Requires these words in the first line, and the mark below them in the others.
    fn assert_says(error: &str, words: &[&str], marked: &str) {
        for word in words {
            assert!(
                error.lines().next().is_some_and(|line| line.contains(word)),
                "{word}: {error}"
            );
        }
        let mut lines = error.lines().rev();
        let (marks, text) = (lines.next().unwrap(), lines.next().unwrap());
        let start = marks.chars().position(|sign| sign == '^').unwrap();
        let width = marks.chars().filter(|sign| *sign == '^').count();
        let found: String = text.chars().skip(start).take(width).collect();
        assert_eq!(found, marked, "{error}");
    }

    #[test]
    fn a_good_spec_is_read() {
        RunSpec::parse(GOOD).unwrap();
    }

    #[test]
    fn an_unknown_key_is_marked_with_the_most_similar_one() {
        let error = refused("cycles:", "cycels:");
        let words =
            ["line 5, column 3: unknown key cycels in raft; did you mean cycles?", "(R102)"];
        assert_says(&error, &words, "cycels");
        assert_eq!(error.matches("samples_per_prompt").count(), 2, "keys are listed once: {error}");
        let error = refused("exact:", "exakt:");
        assert_says(&error, &["unknown key exakt in raft.verifier; did you mean exact?"], "exakt");
    }

    #[test]
    fn a_number_of_another_form_or_size_is_refused_with_the_range() {
        for number in ["two", "-2", "99999999999", "4000000000", "1.5"] {
            let error = refused("cycles: 3", &format!("cycles: {number}"));
            let expected = format!("raft.cycles: must be from 0 to 10000, not {number} (R103)");
            assert_says(&error, &["line 5, column 11: ", &expected], number);
        }
        let error = refused("0.002", "1e9");
        assert_says(&error, &["learning_rate: must be from 1e-12 to 10, not 1000000000"], "1e9");
        let error = refused("learning_rate: 0.002", "epochs: many");
        assert_says(&error, &["raft.training.epochs: must be ", "not many"], "many");
    }

    #[test]
    fn a_section_is_shown_by_an_example() {
        let error = refused("{ checkpoint: base-1 }", "base-1");
        let words = ["line 2, column 7: base: must be a section of keys", "{ model: org/name }"];
        assert_says(&error, &words, "base-1");
        let error = refused("  cycles: 3", "  lora: yes");
        assert_says(&error, &["raft.lora: must be a section", "{ r: 16, alpha: 32 }"], "yes");
        for (whole, said) in [
            ("", "a spec is a section of keys"),
            ("# nothing\n", "a spec is a section of keys"),
            ("- name: mine\n", "a spec is a section of keys"),
            ("name: mine\n", "the key base is missing, such as base: { model: org/name }"),
            ("base: { model: a/b }\n", "spec: has neither a section raft nor a section sft"),
        ] {
            let error = RunSpec::parse(whole).unwrap_err().to_string();
            assert!(error.contains(said), "{whole:?}: {error}");
        }
    }

    #[test]
    fn a_missing_value_is_marked() {
        for key in ["cycles", "prompts"] {
            let (from, to) = match key {
                "cycles" => ("cycles: 3", "cycles:"),
                _ => ("prompts: prompts.jsonl", "prompts:"),
            };
            let error = refused(from, to);
            assert!(error.contains(&format!("raft.{key}: has no value")), "{error}");
        }
    }

    #[test]
    fn a_missing_key_is_marked_at_its_section() {
        let error = refused("  verifier: { exact: { extract: '#(\\d+)$' } }\n", "");
        assert_says(&error, &["line 3, column 1: raft.verifier: is missing"], "raft");
    }

    #[test]
    fn a_value_that_is_none_of_the_allowed_ones_is_refused_with_them() {
        let error = refused("learning_rate: 0.002", "schedule: cosin");
        let words = [
            "line 8, column 15: raft.training.schedule: must be one of constant, linear, cosine",
            "not cosin; did you mean cosine?",
        ];
        assert_says(&error, &words, "cosin");
        let error = refused("{ exact: { extract: '#(\\d+)$' } }", "{ json_schema: { schma: 1 } }");
        assert_says(&error, &["unknown key schma in raft.verifier.json_schema"], "schma");
        let error = refused("{ checkpoint: base-1 }", "{ init: {} }");
        assert_says(&error, &["line 2", "the key config is missing in base.init"], "init");
    }

    #[test]
    fn mistakes_of_yaml_are_marked() {
        let error = refused("  cycles: 3", "\tcycles: 3");
        assert_says(&error, &["line 5, column 1: a tab; YAML is indented by spaces"], "\t");
        let error = refused("checkpoint: base-1 }", "checkpoint: base-1");
        assert!(error.starts_with("line 3, column 5: "), "{error}");
        let error = refused("  cycles: 3", "  cycles: 3\n  lora: { r: 16, alpha: 32");
        assert!(
            error.contains("line 6") && error.contains("a bracket of line 6 may be left open"),
            "{error}"
        );
        let error = refused("{ exact: { extract: '#(\\d+)$' } }", "{ numeric: {");
        assert!(error.contains("a bracket of line 6 may be left open"), "{error}");
        let error = refused("prompts: prompts.jsonl", "prompts: [a, b]");
        assert!(error.starts_with("line 4, column 12: raft.prompts: must be one value"), "{error}");
        let error = refused("'#(\\d+)$'", "\"#(\\d+)$\"");
        assert!(error.contains("write a pattern in single quotes"), "{error}");
        let error = refused("  cycles: 3", "    cycles: 3");
        assert!(error.contains("line 5") && error.contains("indented otherwise"), "{error}");
        let error = refused("  cycles: 3", "  cycles: 3\n  cycles: 4");
        assert_says(&error, &["line 6", "the key cycles is written twice"], "cycles");
    }

    #[test]
    fn a_line_of_another_indentation_is_refused_with_that_of_the_lines_above() {
        let error = refused("  training:", " training:");
        let said = "line 7, column 2: indented by 1 space; the lines above have 0 or 2 (R102)";
        assert!(error.starts_with(said), "{error}");
        let error = refused("  training:", "   training:");
        assert!(error.contains("indented by 3 spaces; the lines above have 0 or 2"), "{error}");
        let other = "while parsing a block mapping, did not find expected key";
        let error = super::describe_structure("", None, other);
        assert!(error.starts_with("a key is expected here, such as name: mine"), "{error}");
        assert_eq!(super::item_indents("  - - a: 1"), [2, 4, 6]);
    }

    #[test]
    fn a_bad_pattern_is_marked_with_the_reason() {
        let error = refused("(\\d+)$", "(\\d+$");
        let words = ["raft.verifier.exact.extract: not a regular expression: unclosed group"];
        assert!(error.lines().next().is_some_and(|line| line.contains(words[0])), "{error}");
        assert_says(&error, &words, "'#(\\d+$'");
    }
}
