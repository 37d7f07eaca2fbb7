//! The pages of the documentation: all links have a target, and the table of contents is complete.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use docs::root;
use regex::Regex;

fn pages(directory: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(directory)).expect("a directory");
    let mut pages: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    pages.retain(|path| path.extension().is_some_and(|it| it == "md"));
    pages.sort();
    pages
}

/// Returns the local links of a page: path and fragment.
fn links(page: &Path) -> Vec<(String, String)> {
    let text = fs::read_to_string(page).expect("a page");
    let link = Regex::new(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)").expect("a pattern");
    let found = link.captures_iter(&text);
    let fragment =
        |found: &regex::Captures<'_>, n| found.get(n).map_or("", |it| it.as_str()).to_owned();
    let all = found.map(|found| (fragment(&found, 1), fragment(&found, 2)));
    all.filter(|(path, _)| !path.contains("://")).collect()
}

/// Returns the fragments of a page's headings.
fn fragments(page: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(page).expect("a page");
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let name = |line: &str| {
        let words = line.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|it| it.is_alphanumeric() || [' ', '-', '_'].contains(it));
        kept.collect::<String>().replace(' ', "-")
    };
    headings.map(name).collect()
}

#[test]
fn all_links_have_a_target() {
    let mut seen = 0;
    let all = [pages(""), pages("docs"), pages("docs/adr")].concat();
    for page in &all {
        for (path, fragment) in links(page) {
            let to = page.parent().unwrap().join(&path);
            let to = if path.is_empty() { page.clone() } else { to };
            assert!(to.exists(), "{}: there is no {path}", page.display());
            if !fragment.is_empty() {
                assert!(
                    fragments(&to).contains(&fragment),
                    "{}: there is no #{fragment}",
                    page.display()
                );
            }
            seen += 1;
        }
    }
    assert!(seen > 100, "these are not all: {seen}");
}

#[test]
fn the_contents_have_every_page_once() {
    let contents = root().join("docs/SUMMARY.md");
    let listed: Vec<String> = links(&contents).into_iter().map(|(path, _)| path).collect();
    let once: BTreeSet<&String> = listed.iter().collect();
    assert_eq!(once.len(), listed.len(), "one is there twice");
    for page in pages("docs") {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name == "SUMMARY.md" || listed.contains(&name), "{name} is not listed");
    }
}
