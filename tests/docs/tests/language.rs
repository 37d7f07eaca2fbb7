//! The language of the source: names and doc comments that a reader of the field understands.
//! CONTRIBUTING.md has the rules, docs/GLOSSARY.md the words of the product.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use docs::{is_test, program_sources, root};
use regex::Regex;
use syn::{Attribute, Expr, ImplItem, Item, Lit, Meta, TraitItem, Visibility};

/// Public function names that say nothing at the call site.
const FORBIDDEN_FUNCTIONS: [&str; 31] = [
    "again", "alone", "attend", "away", "book", "does", "fates", "given", "goes", "hear", "heard",
    "held", "keep", "knows", "leave", "look", "looked", "made", "obey", "of", "owed", "said",
    "say", "see", "tell", "then", "told", "took", "under", "until", "whole",
];

/// Public type names that are metaphors or have many meanings.
const FORBIDDEN_TYPES: [&str; 24] = [
    "Again", "Ahead", "Answer", "Ask", "Asked", "Away", "Citizen", "Course", "Crowd", "Desk",
    "Door", "Gallery", "Heard", "Held", "Herd", "Kit", "Ledger", "Post", "Shelf", "Standing",
    "Temper", "Told", "Turn", "Weather",
];

/// Words that a doc comment may not begin with, because no complete sentence follows.
const FORBIDDEN_BEGINNINGS: [&str; 12] = [
    "What", "Of", "Whether", "Who", "Whose", "How", "Where", "Whatever", "Whoever", "As", "Why",
    "That",
];

/// Idioms of the standard library, for which one word is enough.
const IDIOMS: [&str; 47] = [
    "new",
    "from",
    "fmt",
    "default",
    "drop",
    "main",
    "next",
    "clone",
    "eq",
    "cmp",
    "hash",
    "deref",
    "get",
    "push",
    "len",
    "run",
    "try_from",
    "into",
    "poll",
    "source",
    "index",
    "borrow",
    "call",
    "iter",
    "write",
    "flush",
    "read",
    "serialize",
    "deserialize",
    "insert",
    "remove",
    "clear",
    "contains",
    "parse",
    "build",
    "start",
    "stop",
    "wait",
    "open",
    "close",
    "send",
    "seek",
    "add",
    "from_str",
    "extend",
    "sum",
    "exp",
];

/// Phrases of the private dialect that the source was once written in.
const DIALECT: &str = r"(?i)\b(?:says?|said|tells?|told|nobody|somebody|anybody|whoever|whatever|anew|goes on|gone on|once more|so many|so long|left away|its like|is none|are none|no number)\b";

/// An item with a name.
struct Named {
    place: String,
    name: String,
    is_public: bool,
    doc: String,
}

#[derive(Default)]
struct Source {
    functions: Vec<Named>,
    types: Vec<Named>,
}

impl Source {
    fn read_items(&mut self, file: &str, items: &[Item]) {
        for item in items {
            match item {
                Item::Mod(module) if !is_test(&module.attrs) => {
                    if let Some((_, items)) = &module.content {
                        self.read_items(file, items);
                    }
                }
                Item::Fn(item) if !is_test(&item.attrs) => {
                    let named = named(file, &item.sig.ident, Some(&item.vis), &item.attrs);
                    self.functions.push(named);
                }
                Item::Impl(item) if item.trait_.is_none() && !is_test(&item.attrs) => {
                    for inner in &item.items {
                        if let ImplItem::Fn(method) = inner {
                            let (name, vis) = (&method.sig.ident, Some(&method.vis));
                            self.functions.push(named(file, name, vis, &method.attrs));
                        }
                    }
                }
                Item::Trait(item) => {
                    self.types.push(named(file, &item.ident, Some(&item.vis), &item.attrs));
                    for inner in &item.items {
                        if let TraitItem::Fn(method) = inner {
                            let vis = Some(&item.vis);
                            self.functions.push(named(file, &method.sig.ident, vis, &method.attrs));
                        }
                    }
                }
                Item::Struct(item) => {
                    self.types.push(named(file, &item.ident, Some(&item.vis), &item.attrs));
                }
                Item::Enum(item) => {
                    self.types.push(named(file, &item.ident, Some(&item.vis), &item.attrs));
                }
                Item::Type(item) => {
                    self.types.push(named(file, &item.ident, Some(&item.vis), &item.attrs));
                }
                _ => {}
            }
        }
    }
}

fn named(file: &str, name: &syn::Ident, vis: Option<&Visibility>, attrs: &[Attribute]) -> Named {
    let line = name.span().start().line;
    let is_public = matches!(vis, Some(Visibility::Public(_)));
    Named { place: format!("{file}:{line}"), name: name.to_string(), is_public, doc: doc(attrs) }
}

fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter_map(|it| match &it.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

fn source() -> Source {
    let mut source = Source::default();
    for (name, text) in program_sources() {
        source.read_items(&name, &syn::parse_file(&text).expect(&name).items);
    }
    source
}

fn first_word(doc: &str) -> &str {
    doc.split([' ', '\n', ',', '.', ':', '`']).next().unwrap_or_default()
}

/// Returns true for a third-person verb, such as `Returns`. A few nouns look alike.
fn is_verb(word: &str) -> bool {
    let nouns = ["This", "Its", "Always", "Is", "Was", "Seconds", "Bytes", "Tokens", "Samples"];
    word.len() > 2
        && word.starts_with(|first: char| first.is_ascii_uppercase())
        && word.ends_with('s')
        && !nouns.contains(&word)
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

#[test]
fn public_names_explain_themselves_where_they_are_used() {
    let source = source();
    let mut wrong: Vec<String> = Vec::new();
    for item in source.functions.iter().filter(|item| item.is_public) {
        if FORBIDDEN_FUNCTIONS.contains(&item.name.as_str()) {
            wrong.push(format!("{}: fn {}: use a verb and its object", item.place, item.name));
        }
    }
    for item in source.types.iter().filter(|item| item.is_public) {
        if FORBIDDEN_TYPES.contains(&item.name.as_str()) {
            wrong.push(format!("{}: type {}: use a specific noun", item.place, item.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn doc_comments_stand_alone() {
    let source = source();
    let mut wrong: Vec<String> = Vec::new();
    for item in source.functions.iter().chain(&source.types) {
        if FORBIDDEN_BEGINNINGS.contains(&first_word(&item.doc)) {
            wrong.push(format!(
                "{}: {} begins with {:?}",
                item.place,
                item.name,
                first_word(&item.doc)
            ));
        }
    }
    assert!(wrong.is_empty(), "begin with a verb, or a noun:\n{}", wrong.join("\n"));
}

/// The words that GLOSSARY.md replaces by others.
fn replaced_words() -> BTreeSet<String> {
    let text = fs::read_to_string(root().join("docs/GLOSSARY.md")).expect("a page");
    let (_, table) = text.split_once("| use | not |\n|---|---|\n").expect("the table");
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let columns = rows.filter_map(|row| row.split('|').nth(2));
    let words: BTreeSet<String> =
        columns.flat_map(|it| it.split(',')).map(|word| word.trim().to_owned()).collect();
    assert!(words.len() > 8, "these are not all: {words:?}");
    words
}

/// Splits `CamelCase`, `snake_case` and prose into words in lower case.
fn split_words(text: &str) -> BTreeSet<String> {
    let mut spaced = String::new();
    for letter in text.chars() {
        if letter.is_ascii_uppercase() {
            spaced.push(' ');
        }
        spaced.push(letter.to_ascii_lowercase());
    }
    spaced.split(|it: char| !it.is_alphanumeric()).map(str::to_owned).collect()
}

#[test]
fn one_meaning_has_one_word() {
    let source = source();
    let replaced = replaced_words();
    let mut wrong: Vec<String> = Vec::new();
    for item in source.functions.iter().chain(&source.types) {
        let words = split_words(&format!("{} {}", item.name, item.doc));
        for word in &replaced {
            if words.contains(word) || words.contains(&format!("{word}s")) {
                wrong.push(format!("{}: {} has {word:?}", item.place, item.name));
            }
        }
    }
    assert!(wrong.is_empty(), "docs/GLOSSARY.md has other words:\n{}", wrong.join("\n"));
}

/// Prints the metrics of the language with `--no-capture`, and checks their limits.
#[test]
fn the_language_stays_that_of_its_field() {
    let source = source();
    let named = source.functions.iter().filter(|item| !IDIOMS.contains(&item.name.as_str()));
    let one_word = |item: &&Named| !item.name.trim_matches('_').contains('_');
    let functions = percent(named.clone().filter(one_word).count(), named.count());
    let capitals = |name: &str| name.chars().filter(char::is_ascii_uppercase).count();
    let single = source.types.iter().filter(|item| capitals(&item.name) < 2).count();
    let types = percent(single, source.types.len());
    let mut count: BTreeMap<&str, usize> = BTreeMap::new();
    let local = BTreeSet::from(["Config", "Error", "Args", "Result", "Output", "Item"]);
    for item in source.types.iter().filter(|item| !local.contains(item.name.as_str())) {
        *count.entry(&item.name).or_default() += 1;
    }
    let repeated: usize = count.values().filter(|count| **count > 1).sum();
    let repeated = percent(repeated, count.values().sum());
    let documented: Vec<&str> = source.functions.iter().map(|item| item.doc.as_str()).collect();
    let documented: Vec<&str> = documented.into_iter().filter(|doc| !doc.is_empty()).collect();
    let verbs = documented.iter().filter(|doc| is_verb(first_word(doc))).count();
    let verbs = percent(verbs, documented.len());
    let (dialect, words) = count_dialect();
    let dialect = 1000.0 * dialect as f64 / words as f64;
    let (pages, page_words) = count_dialect_of_pages();
    let pages = 1000.0 * pages as f64 / page_words as f64;
    println!(
        "function names of one word: {functions:.1} %\n\
         type names of one word: {types:.1} %\n\
         types whose name is defined more than once: {repeated:.1} %\n\
         function docs that begin with a verb: {verbs:.1} % of {}\n\
         dialect in comments: {dialect:.2} per 1000 of {words} words\n\
         dialect in pages: {pages:.2} per 1000 of {page_words} words",
        documented.len()
    );
    for (what, measured, limit) in [
        ("function names of one word", functions, 30.0),
        ("type names of one word", types, 40.0),
        ("types defined more than once", repeated, 25.0),
        ("function docs that begin with no verb", 100.0 - verbs, 30.0),
        ("dialect per 1000 words of comments", dialect, 1.0),
        ("dialect per 1000 words of pages", pages, 1.0),
    ] {
        assert!(measured <= limit, "{what}: {measured:.1}, at most {limit}");
    }
}

/// Counts phrases of the dialect, and words, in the comments of the program.
fn count_dialect() -> (usize, usize) {
    let dialect = Regex::new(DIALECT).expect("a pattern");
    let (mut found, mut words) = (0, 0);
    for text in program_sources().values() {
        let program = text.split("#[cfg(test)]").next().unwrap_or_default();
        for line in program.lines().filter_map(|line| line.trim().strip_prefix("//")) {
            let line = line.trim_start_matches(['/', '!']);
            words += line.split_whitespace().count();
            found += dialect.find_iter(line).count();
        }
    }
    (found, words)
}

/// Counts phrases of the dialect, and words, in the documentation outside of code blocks.
fn count_dialect_of_pages() -> (usize, usize) {
    let dialect = Regex::new(DIALECT).expect("a pattern");
    let pages =
        fs::read_dir(root().join("docs")).expect("docs").map(|entry| entry.expect("a page"));
    let pages = pages
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|it| it == "md"));
    let (mut found, mut words) = (0, 0);
    for page in pages.chain(["README.md", "ARCHITECTURE.md"].map(|name| root().join(name))) {
        let text = fs::read_to_string(&page).expect("a page");
        for prose in text.split("```").step_by(2) {
            words += prose.split_whitespace().count();
            found += dialect.find_iter(prose).count();
        }
    }
    (found, words)
}
