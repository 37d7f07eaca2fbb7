//! Where the fields of a YAML document are written, so that errors can name a line.

use serde_saphyr::granit_parser::{Event, Parser, Span};

/// Bounds of what is remembered of a document: the rest has no places. A specification of a run has
/// some hundred fields, but the author of a document may be anybody.
const FIELDS_MAX: usize = 10_000;
const PATH_BYTES_MAX: usize = 256;

/// A place in a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SourcePlace {
    /// Counted from 1.
    pub(crate) line: usize,
    /// In characters, counted from 1.
    pub(crate) column: usize,
    /// Number of characters, at least 1.
    pub(crate) width: usize,
}

/// A field of a document.
#[derive(Debug, Clone)]
struct SourceField {
    /// Path such as `evals[0].name`; empty for the document itself.
    path: String,
    /// The key, or the item of a list.
    key: SourcePlace,
    /// The value, or its first character if it is a mapping or a list.
    value: SourcePlace,
    /// Nothing is written as the value.
    is_empty: bool,
}

/// The places of all fields of a document.
#[derive(Debug, Clone, Default)]
pub(crate) struct SourceMap {
    fields: Vec<SourceField>,
}

/// A mapping or a list that is being read.
enum OpenNode {
    /// With the key whose value comes next.
    Mapping {
        path: String,
        key: Option<(String, SourcePlace)>,
    },
    List {
        path: String,
        length: usize,
    },
}

impl SourceMap {
    /// Reads as much of a document as is valid YAML.
    pub(crate) fn read(yaml: &str) -> Self {
        let mut map = Self::default();
        let mut open: Vec<OpenNode> = Vec::new();
        for event in Parser::new_from_str(yaml) {
            let Ok((event, span)) = event else { break };
            let is_long = map.fields.last().is_some_and(|it| it.path.len() > PATH_BYTES_MAX);
            if is_long || map.fields.len() > FIELDS_MAX {
                break;
            }
            match event {
                Event::Scalar(text, ..) => map.add_scalar(&mut open, &text, span),
                Event::Alias(_) => map.add_scalar(&mut open, "", span),
                Event::MappingStart(..) => {
                    let path = map.add_value(&mut open, span);
                    open.push(OpenNode::Mapping { path, key: None });
                }
                Event::SequenceStart(..) => {
                    let path = map.add_value(&mut open, span);
                    open.push(OpenNode::List { path, length: 0 });
                }
                Event::MappingEnd | Event::SequenceEnd => drop(open.pop()),
                Event::DocumentEnd => break,
                _ => {}
            }
        }
        map
    }

    /// Adds a key or a value.
    fn add_scalar(&mut self, open: &mut [OpenNode], text: &str, span: Span) {
        if let Some(OpenNode::Mapping { key: key @ None, .. }) = open.last_mut() {
            // A longer key is in no section that is known.
            let name = text.chars().take(PATH_BYTES_MAX).collect();
            *key = Some((name, place_of(span)));
        } else {
            self.add_value(open, span);
            if let Some(field) = self.fields.last_mut() {
                field.is_empty = span.start.index() == span.end.index();
            }
        }
    }

    /// Adds a value and returns its path.
    fn add_value(&mut self, open: &mut [OpenNode], span: Span) -> String {
        let value = place_of(span);
        let (path, key) = match open.last_mut() {
            None => (String::new(), value),
            Some(OpenNode::List { path, length }) => {
                *length += 1;
                (format!("{path}[{}]", *length - 1), value)
            }
            Some(OpenNode::Mapping { path, key }) => {
                let (name, place) = key.take().unwrap_or_else(|| (String::new(), value));
                (if path.is_empty() { name } else { format!("{path}.{name}") }, place)
            }
        };
        self.fields.push(SourceField { path: path.clone(), key, value, is_empty: false });
        path
    }

    /// Returns the place of a field's value, or of its key if the value begins on another line; of a
    /// field that is not written, the key of the innermost section around it.
    pub(crate) fn find_field(&self, path: &str) -> Option<SourcePlace> {
        if let Some(SourceField { key, value, .. }) = self.field(path) {
            return Some(if value.line == key.line { *value } else { *key });
        }
        let mut outer = path;
        while let Some(end) = outer.rfind(['.', '[']) {
            outer = &outer[..end];
            if let Some(found) = self.find_key(outer) {
                return Some(found);
            }
        }
        None
    }

    /// Returns the last field with a path: a key may be written twice.
    fn field(&self, path: &str) -> Option<&SourceField> {
        self.fields.iter().rev().find(|field| field.path == path)
    }

    /// Returns the first key of a section that is written without a value.
    pub(crate) fn find_unset_key(&self, section: &str) -> Option<&str> {
        self.fields.iter().filter(|field| field.is_empty).find_map(|field| {
            let key = field.path.strip_prefix(section)?.strip_prefix('.')?;
            (!key.contains(['.', '['])).then_some(key)
        })
    }

    /// Returns the place of a field's key.
    pub(crate) fn find_key(&self, path: &str) -> Option<SourcePlace> {
        self.field(path).map(|field| field.key)
    }

    /// Returns the path of the field whose key or value begins at a place.
    pub(crate) fn path_at(&self, line: usize, column: usize) -> Option<&str> {
        let begins = |place: &SourcePlace| (place.line, place.column) == (line, column);
        // The innermost: a mapping begins where its first key does.
        let mut fields = self.fields.iter().rev();
        let found = fields.find(|field| begins(&field.key) || begins(&field.value));
        found.map(|field| &*field.path)
    }

    /// Returns true if a key begins at a place.
    pub(crate) fn has_key_at(&self, line: usize, column: usize) -> bool {
        self.fields
            .iter()
            .any(|it| (it.key.line, it.key.column) == (line, column) && it.key != it.value)
    }

    /// Returns true if nothing is written in the document.
    pub(crate) fn is_blank(&self) -> bool {
        self.fields.iter().all(|field| field.is_empty && field.path.is_empty())
    }

    /// Returns true if the value at a place, or of the key at a place, is not written.
    pub(crate) fn is_empty_at(&self, line: usize, column: usize) -> bool {
        let begins = |place: &SourcePlace| (place.line, place.column) == (line, column);
        let mut fields = self.fields.iter().rev();
        fields.any(|it| it.is_empty && (begins(&it.key) || begins(&it.value)))
    }

    /// Returns the place of the key or value that begins at a line and column.
    pub(crate) fn place_at(&self, line: usize, column: usize) -> SourcePlace {
        let places = self.fields.iter().rev().flat_map(|field| [field.key, field.value]);
        let mut found = places.filter(|place| (place.line, place.column) == (line, column));
        found.next().unwrap_or(SourcePlace { line, column, width: 1 })
    }
}

/// Returns the line and the column of a field's value, counted from 1, or of the section around it.
pub fn find_place(yaml: &str, field: &str) -> Option<(usize, usize)> {
    SourceMap::read(yaml).find_field(field).map(|place| (place.line, place.column))
}

/// Returns the first line of a span.
fn place_of(span: Span) -> SourcePlace {
    let (start, end) = (span.start, span.end);
    let width = if start.line() == end.line() { end.col().saturating_sub(start.col()) } else { 1 };
    SourcePlace { line: start.line(), column: start.col() + 1, width: width.max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YAML: &str = "name: mine\nraft:\n  cycles: 12\n  verifier: { exact: { strip: no } }\n\
                        evals:\n  - { name: a }\n  -  name: b\n";

    fn find(path: &str) -> Option<(usize, usize, usize)> {
        let place = SourceMap::read(YAML).find_field(path)?;
        Some((place.line, place.column, place.width))
    }

    #[test]
    fn fields_are_found_by_their_paths() {
        assert_eq!(find("name"), Some((1, 7, 4)));
        assert_eq!(find("raft.cycles"), Some((3, 11, 2)));
        assert_eq!(find("raft.verifier.exact.strip"), Some((4, 31, 2)));
        assert_eq!(find("evals[1].name"), Some((7, 12, 1)));
        assert_eq!(find("raft"), Some((2, 1, 4)));
    }

    #[test]
    fn a_field_that_is_not_written_is_at_its_section() {
        assert_eq!(find("raft.sampling.top_k"), Some((2, 1, 4)));
        assert_eq!(find("evals[0].text"), Some((6, 5, 1)));
        assert_eq!(find("seed"), None);
    }

    #[test]
    fn keys_without_a_value_are_found_in_their_section() {
        let map = SourceMap::read("raft:\n  verifier: { numeric }\n  lora: {}\n");
        assert_eq!(map.find_unset_key("raft.verifier"), Some("numeric"));
        assert_eq!((map.find_unset_key("raft"), map.find_unset_key("raft.lora")), (None, None));
    }

    #[test]
    fn a_hostile_document_takes_little_memory() {
        let long_key = format!("? {}\n: [{}]\n", "k".repeat(1 << 19), "0,".repeat(1 << 18));
        let deep = format!("{}0{}", "{a: ".repeat(200), "}".repeat(200))
            .replace("a:", &format!("{}:", "k".repeat(900)));
        let many = format!("a: [{}]\n", "0,".repeat(1 << 18));
        for yaml in [long_key, deep, many] {
            let map = SourceMap::read(&yaml);
            let bytes: usize = map.fields.iter().map(|field| field.path.len()).sum();
            assert!(bytes < 4 << 20, "{bytes} bytes");
        }
    }

    #[test]
    fn places_have_paths_also_before_a_mistake() {
        let map = SourceMap::read("raft:\n  cycles: 3\n  lora: { r: 1\n");
        assert_eq!(map.path_at(2, 3), Some("raft.cycles"));
        assert_eq!(map.path_at(2, 11), Some("raft.cycles"));
        assert_eq!(map.path_at(2, 4), None);
    }
}
