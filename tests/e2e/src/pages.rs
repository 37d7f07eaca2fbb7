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
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(&path).expect(page);
    let mut blocks = Vec::new();
    for (number, part) in text.split("\n```").enumerate() {
        // Every second part is between two fences.
        let (true, Some((head, body))) = (number % 2 == 1, part.split_once('\n')) else { continue };
        let words: Vec<&str> = head.split(' ').collect();
        let text = format!("{body}\n");
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
