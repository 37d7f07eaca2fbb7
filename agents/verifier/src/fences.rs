//! Code blocks of a completion: text between fences, as Markdown defines them (CommonMark 4.5).

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FencedBlock<'a> {
    /// The first word after the fence in lower case; empty if missing.
    pub tag: String,
    pub body: &'a str,
}

/// Ends an unclosed block with the text, because the model ran out of tokens.
pub(crate) fn find_blocks(text: &str) -> Vec<FencedBlock<'_>> {
    let mut found = Vec::new();
    let mut open: Option<(char, usize, String, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let start = at;
        at += line.len();
        let fence = parse_fence(line);
        open = match (open, fence) {
            (None, Some((mark, length, info))) if opens_block(mark, info) => {
                let tag = info.split_whitespace().next().unwrap_or_default();
                let tag = tag.trim_matches(['{', '}', '.']).to_lowercase();
                Some((mark, length, tag, at))
            }
            (Some((mark, length, tag, body)), Some((other, longer, info)))
                if mark == other && longer >= length && info.is_empty() =>
            {
                found.push(FencedBlock { tag, body: &text[body..start] });
                None
            }
            (open, _) => open,
        };
    }
    if let Some((_, _, tag, body)) = open {
        found.push(FencedBlock { tag, body: &text[body..] });
    }
    found
}

/// Returns the fence character, the number of repetitions and the text behind it.
fn parse_fence(line: &str) -> Option<(char, usize, &str)> {
    let text = line.trim_start_matches(' ');
    let mark = text.chars().next().filter(|mark| matches!(mark, '`' | '~'))?;
    let rest = text.trim_start_matches(mark);
    let length = text.len() - rest.len();
    (line.len() - text.len() <= 3 && length >= 3).then(|| (mark, length, rest.trim()))
}

/// Returns false for a line such as "```x```", which is inline code.
fn opens_block(mark: char, info: &str) -> bool {
    mark == '~' || !info.contains('`')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(String, &str)> {
        find_blocks(text).into_iter().map(|fence| (fence.tag, fence.body)).collect()
    }

    #[test]
    fn blocks_are_found_with_their_language() {
        let text = "Here:\n```Python title=x\nx = 1\n```\nand\n~~~\ny\n~~~\n";
        assert_eq!(found(text), [("python".into(), "x = 1\n"), (String::new(), "y\n")]);
    }

    #[test]
    fn one_that_is_never_closed_ends_with_the_text() {
        assert_eq!(found("```c\nint x;"), [("c".into(), "int x;")]);
        assert_eq!(found("```"), [(String::new(), "")]);
    }

    #[test]
    fn a_longer_fence_holds_shorter_ones_and_code_in_a_line_is_none() {
        assert_eq!(found("````\n```\nx\n```\n````\n"), [(String::new(), "```\nx\n```\n")]);
        assert!(found("use ```x``` or\n```y``` here").is_empty());
        assert!(found("    ```\ncode indented by four\n").is_empty());
    }
}
