//! Pages of `docs/`, whose commands are run. What a block is, stands behind its language:
//! "```sh HOST" is run there, "```sh HOST stays" in a terminal that stays open, "```yaml FILE"
//! (or json, jsonl) is that file. Others are for people alone.

use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    Run { host: String, stays: bool, script: String },
    File { name: String, text: String },
}

/// The blocks of a page that are for us, in order.
///
/// # Panics
/// When there is no such page, or none are.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (head, text) in fenced(page) {
        let words: Vec<&str> = head.split(' ').collect();
        match words[..] {
            ["sh", host] => {
                blocks.push(Block::Run { host: host.into(), stays: false, script: text });
            }
            ["sh", host, "stays"] => {
                blocks.push(Block::Run { host: host.into(), stays: true, script: text });
            }
            ["yaml" | "json" | "jsonl", name] => {
                blocks.push(Block::File { name: name.into(), text });
            }
            [_] => {}
            _ => panic!("{page}: what is {head:?}?"),
        }
    }
    assert!(!blocks.is_empty(), "{page} has nothing to run");
    blocks
}

/// The blocks of a page that are in a language and nothing else, in order.
///
/// # Panics
/// When there is no such page.
pub fn in_language(page: &str, language: &str) -> Vec<String> {
    let blocks = fenced(page).into_iter().filter(|(head, _)| head == language);
    blocks.map(|(_, text)| text).collect()
}

/// What stands behind the fence, and what between it and the next.
fn fenced(page: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(&path).expect(page);
    // Every second part is between two fences.
    let parts = text.split("\n```").skip(1).step_by(2).filter_map(|part| part.split_once('\n'));
    parts.map(|(head, body)| (head.to_owned(), format!("{body}\n"))).collect()
}
