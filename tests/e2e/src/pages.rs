//! Commands and files in pages of `docs/`. The words after a fence say what a block is: "```sh
//! HOST" runs on that host, "```sh HOST stays" runs in a terminal that stays open, and "```yaml
//! FILE" (or json, jsonl) is the content of that file. Tests ignore all other blocks.

use std::path::Path;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    Run { host: String, stays_open: bool, script: String },
    File { name: String, text: String },
}

/// Returns the blocks of a page that tests run, in order.
pub fn runnable_blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for (head, text) in fenced_blocks(page) {
        let words: Vec<&str> = head.split(' ').collect();
        match words[..] {
            ["sh", host] => {
                blocks.push(Block::Run { host: host.into(), stays_open: false, script: text });
            }
            ["sh", host, "stays"] => {
                blocks.push(Block::Run { host: host.into(), stays_open: true, script: text });
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

/// Returns the blocks of a page with this language and no other word, in order.
pub fn blocks_in_language(page: &str, language: &str) -> Vec<String> {
    let blocks = fenced_blocks(page).into_iter().filter(|(head, _)| head == language);
    blocks.map(|(_, text)| text).collect()
}

/// Returns the words after each fence and the text of its block.
fn fenced_blocks(page: &str) -> Vec<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(&path).expect(page);
    // Every second part is inside of a block.
    let parts = text.split("\n```").skip(1).step_by(2).filter_map(|part| part.split_once('\n'));
    parts.map(|(head, body)| (head.to_owned(), format!("{body}\n"))).collect()
}
