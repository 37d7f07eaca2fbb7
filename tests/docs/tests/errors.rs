//! Error codes: every error has one, and every code has a section in docs/ERRORS.md.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use docs::{is_test, program_sources, root};
use proc_macro2::{Span, TokenStream, TokenTree};
use regex::Regex;
use syn::{
    Attribute, Fields, ItemEnum, ItemMod, ItemStruct, LitStr, Macro, Type, parse::ParseStream,
    visit::Visit,
};

/// Invariants of the operations. candle adds their text to errors that have a code.
const ENGINE_OPS: &str = "agents/engine/src/ops";
/// A tool for developers.
const BENCH: &str = "services/bench/src";

/// An error message and the type of its cause, if it has one.
struct Message {
    line: usize,
    words: String,
    cause: Option<String>,
}

/// The errors and strings of one file.
#[derive(Default)]
struct SourceErrors {
    /// Error types.
    types: Vec<String>,
    messages: Vec<Message>,
    /// All string literals.
    strings: Vec<String>,
}

impl SourceErrors {
    /// Returns the text in `#[error(...)]` and its position.
    fn error_text(attributes: &[Attribute]) -> Option<(LitStr, Span)> {
        let error = attributes.iter().find(|it| it.path().is_ident("error"))?;
        let first = |input: ParseStream<'_>| {
            let words: LitStr = input.parse()?;
            input.parse::<TokenStream>()?;
            Ok(words)
        };
        let words = error.parse_args_with(first).ok()?;
        let at = words.span();
        Some((words, at))
    }

    fn add_message(&mut self, attributes: &[Attribute], fields: &Fields) -> bool {
        let Some((words, at)) = Self::error_text(attributes) else { return false };
        let cause = fields.iter().find(|field| {
            let marked = |name| field.attrs.iter().any(|it| it.path().is_ident(name));
            field.ident.as_ref().is_some_and(|name| name == "source")
                || marked("from")
                || marked("source")
        });
        let cause = cause.map(|field| innermost_type(&field.ty));
        self.messages.push(Message { line: at.start().line, words: words.value(), cause });
        true
    }
}

/// Returns `io::Error` for `Option<Box<std::io::Error>>`.
fn innermost_type(kind: &Type) -> String {
    let Type::Path(path) = kind else { return "dyn".into() };
    let names: Vec<_> = path.path.segments.iter().collect();
    let Some(last) = names.last() else { return String::new() };
    if let syn::PathArguments::AngleBracketed(inside) = &last.arguments
        && let Some(syn::GenericArgument::Type(inside)) = inside.args.first()
    {
        return innermost_type(inside);
    }
    let named = names.iter().rev().take(2).rev();
    named.map(|segment| segment.ident.to_string()).collect::<Vec<_>>().join("::")
}

impl<'ast> Visit<'ast> for SourceErrors {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        let mut any = false;
        for variant in &item.variants {
            any |= variant.attrs.iter().any(|it| it.path().is_ident("error"));
            self.add_message(&variant.attrs, &variant.fields);
        }
        if any {
            self.types.push(item.ident.to_string());
        }
        syn::visit::visit_item_enum(self, item);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        if self.add_message(&item.attrs, &item.fields) {
            self.types.push(item.ident.to_string());
        }
        syn::visit::visit_item_struct(self, item);
    }

    fn visit_macro(&mut self, used: &'ast Macro) {
        let name = used.path.segments.last().map(|name| name.ident.to_string()).unwrap_or_default();
        let mut literals = Vec::new();
        collect_strings(&used.tokens, &mut literals);
        if ["bail", "anyhow", "ensure"].contains(&name.as_str())
            && let Some(words) = message_literal(&used.tokens, name == "ensure")
        {
            let line = used.path.segments[0].ident.span().start().line;
            self.messages.push(Message { line, words, cause: None });
        }
        self.strings.append(&mut literals);
        syn::visit::visit_macro(self, used);
    }

    fn visit_lit_str(&mut self, text: &'ast LitStr) {
        self.strings.push(text.value());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Ok(list) = attribute.meta.require_list() {
            collect_strings(&list.tokens, &mut self.strings);
        }
    }
}

/// Returns the first literal of a macro call, or the first one after the condition.
fn message_literal(tokens: &TokenStream, behind_condition: bool) -> Option<String> {
    let mut tokens = tokens.clone().into_iter();
    if behind_condition {
        tokens.find(|token| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ','))?;
    }
    let Some(TokenTree::Literal(literal)) = tokens.next() else { return None };
    syn::parse_str::<LitStr>(&literal.to_string()).ok().map(|words| words.value())
}

fn collect_strings(tokens: &TokenStream, strings: &mut Vec<String>) {
    for token in tokens.clone() {
        match token {
            TokenTree::Group(group) => collect_strings(&group.stream(), strings),
            TokenTree::Literal(literal) => {
                let text = syn::parse_str::<LitStr>(&literal.to_string());
                strings.extend(text.ok().map(|text| text.value()));
            }
            _ => {}
        }
    }
}

fn read_sources() -> BTreeMap<String, SourceErrors> {
    let read = program_sources().into_iter().map(|(name, text)| {
        let file = syn::parse_file(&text).expect(&name);
        let mut found = SourceErrors::default();
        found.visit_file(&file);
        (name, found)
    });
    read.collect()
}

fn code_pattern() -> Regex {
    Regex::new(r"\(([A-Z]\d{3})\)").expect("a pattern")
}

#[test]
fn every_error_message_has_a_code_or_a_cause_with_a_code() {
    let files = read_sources();
    let error_types: BTreeSet<&str> =
        files.values().flat_map(|found| &found.types).map(String::as_str).collect();
    // Its `Display` adds one of two codes.
    let error_types: BTreeSet<&str> = error_types.into_iter().chain(["SpecError"]).collect();
    assert!(error_types.len() > 90, "these are not all: {}", error_types.len());
    let (code, placeholder) = (code_pattern(), Regex::new(r"\{[^{}]*\}").unwrap());
    let mut without = Vec::new();
    let mut seen = 0;
    for (name, found) in &files {
        if name.starts_with(ENGINE_OPS) || name.starts_with(BENCH) {
            continue;
        }
        for Message { line, words, cause } in &found.messages {
            seen += 1;
            let has_words = placeholder.replace_all(words, "").contains(char::is_alphabetic);
            // Messages of the operating system have a code by their kind.
            let has_coded_cause = cause.as_deref().is_some_and(|cause| {
                let last = cause.rsplit("::").next().unwrap_or_default();
                cause == "io::Error" || last != "Error" && error_types.contains(last)
            });
            if has_words && !has_coded_cause && !code.is_match(words) {
                without
                    .push(format!("{name}:{line}: {words} [{}]", cause.as_deref().unwrap_or("-")));
            }
        }
    }
    assert!(seen > 500, "these are not all: {seen}");
    assert!(without.is_empty(), "no code:\n{}", without.join("\n"));
}

#[test]
fn every_code_has_a_page_and_every_page_a_code() {
    let errors = fs::read_to_string(root().join("docs/ERRORS.md")).unwrap();
    let mut pages = BTreeSet::new();
    let mut letter = ' ';
    for line in errors.lines() {
        if let Some(part) = line.strip_prefix("## ") {
            letter = part.chars().next().unwrap();
        }
        let Some(heading) = line.strip_prefix("### ") else { continue };
        let (code, title) = heading.split_once(' ').expect(heading);
        assert!(code.starts_with(letter) && !title.is_empty(), "{heading}");
        assert!(pages.insert(code.to_owned()), "{code} is there twice");
    }
    let (text, bytes) = (code_pattern(), Regex::new(r#"b"([A-Z]\d{3})""#).unwrap());
    let mut used = BTreeSet::new();
    for found in read_sources().values() {
        for words in &found.strings {
            used.extend(text.captures_iter(words).map(|found| found[1].to_owned()));
        }
    }
    let own = fs::read_to_string(root().join("proto/wire/src/error_code.rs")).unwrap();
    used.extend(bytes.captures_iter(&own).map(|found| found[1].to_owned()));
    // The code of clap's messages.
    used.insert("A100".to_owned());
    let all = |of: &BTreeSet<String>, not: &BTreeSet<String>| {
        of.difference(not).cloned().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(all(&used, &pages), "", "without a page");
    assert_eq!(all(&pages, &used), "", "pages of no error");
}
