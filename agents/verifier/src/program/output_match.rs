//! The comparison of a program's output with the expected output.

use wire::v1::verifier::{self, Match};

use crate::judge::{NumberTolerance, parse_number};

#[derive(Debug, Clone, Copy)]
pub(super) struct OutputMatcher {
    matching: Match,
    tolerance: NumberTolerance,
}

impl From<Option<&verifier::Output>> for OutputMatcher {
    fn from(output: Option<&verifier::Output>) -> Self {
        let matching = match output.map_or(Match::Unspecified, verifier::Output::r#match) {
            Match::Unspecified => Match::Lines,
            matching => matching,
        };
        let tolerance = output.map_or(0.0, |output| output.tolerance);
        Self { matching, tolerance: NumberTolerance { absolute: tolerance, relative: tolerance } }
    }
}

impl OutputMatcher {
    pub(super) fn matches_expected(self, printed: &[u8], expected: &str) -> bool {
        let text = String::from_utf8_lossy(printed);
        match self.matching {
            Match::Exact => printed == expected.as_bytes(),
            Match::Lines | Match::Unspecified => {
                normalized_lines(&text).eq(normalized_lines(expected))
            }
            Match::Words => text.split_whitespace().eq(expected.split_whitespace()),
            Match::Numbers => self.numbers_match(&text, expected),
        }
    }

    /// Compares word by word; numbers may differ by the tolerance.
    fn numbers_match(self, printed: &str, expected: &str) -> bool {
        let (mut printed, mut expected) = (printed.split_whitespace(), expected.split_whitespace());
        loop {
            match (printed.next(), expected.next()) {
                (None, None) => return true,
                (Some(found), Some(wanted)) if self.words_match(found, wanted) => {}
                _ => return false,
            }
        }
    }

    fn words_match(self, found: &str, wanted: &str) -> bool {
        let close =
            || Some(self.tolerance.accepts_number(parse_number(found)?, parse_number(wanted)?));
        found == wanted || close() == Some(true)
    }
}

/// Drops trailing white space and empty lines at the end.
fn normalized_lines(text: &str) -> impl Iterator<Item = &str> {
    text.trim_end().lines().map(str::trim_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(matching: Match, printed: &str, expected: &str) -> bool {
        let output = verifier::Output { r#match: matching.into(), tolerance: 0.01 };
        OutputMatcher::from(Some(&output)).matches_expected(printed.as_bytes(), expected)
    }

    #[test]
    fn each_way_to_compare_forgives_what_it_says() {
        for (matching, printed, expected, same) in [
            (Match::Exact, "a\n", "a\n", true),
            (Match::Exact, "a\n", "a", false),
            (Match::Lines, "a  \r\nb\n\n", "a\nb", true),
            (Match::Lines, " a", "a", false),
            (Match::Lines, "a\n\nb", "a\nb", false),
            (Match::Words, " a\n\nb ", "a b", true),
            (Match::Words, "ab", "a b", false),
            (Match::Numbers, "x 1.001\n", "x 1", true),
            (Match::Numbers, "x 1.1", "x 1", false),
            (Match::Numbers, "1 2", "1", false),
        ] {
            assert_eq!(is(matching, printed, expected), same, "{printed:?} {expected:?}");
        }
    }
}
