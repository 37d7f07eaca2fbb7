//! Numbers as people and models write them.

/// Two numbers are equal within the larger of both bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NumberTolerance {
    pub absolute: f64,
    /// A fraction of the expected number's absolute value.
    pub relative: f64,
}

impl NumberTolerance {
    pub(crate) fn accepts_number(self, found: f64, expected: f64) -> bool {
        (found - expected).abs() <= self.absolute.max(self.relative * expected.abs())
    }
}

/// Parses `1,234.5`, `-3`, `1e-3`, `3/4`, `1 1/2`, `\frac{3}{4}`, `2\frac{1}{2}`, `$12`, `50%` (as
/// 50). Returns `None` for a sentence.
pub(crate) fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim().trim_matches('$').trim();
    let plain = text.replace("\\$", "").replace("\\%", "%").replace("\\,", "").replace("\\!", "");
    let plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac");
    let plain = plain.replace(['$', '€', '£', '_'], "").replace('−', "-");
    let plain = plain.trim().trim_end_matches('%').trim_end_matches('.').trim();
    let (negative, plain) = match plain.strip_prefix('-') {
        Some(rest) => (true, rest.trim_start()),
        None => (false, plain.strip_prefix('+').unwrap_or(plain)),
    };
    let value = match plain.find("\\frac") {
        Some(at) => parse_whole_part(&plain[..at])? + parse_latex_fraction(&plain[at..])?,
        None => parse_ratio(plain)?,
    };
    let value = if negative { -value } else { value };
    value.is_finite().then_some(value)
}

/// Returns 0 for an empty text, which may precede a fraction.
fn parse_whole_part(text: &str) -> Option<f64> {
    if text.trim().is_empty() { Some(0.0) } else { parse_digits(text.trim()) }
}

/// Allows no text behind `\frac{a}{b}`.
fn parse_latex_fraction(text: &str) -> Option<f64> {
    let rest = text.strip_prefix("\\frac")?.trim_start().strip_prefix('{')?;
    let (above, rest) = rest.split_once('}')?;
    let rest = rest.trim_start().strip_prefix('{')?;
    let (below, after) = rest.split_once('}')?;
    let (above, below) = (parse_signed(above)?, parse_signed(below)?);
    after.trim().is_empty().then_some(above / below)
}

/// Parses `a`, `a/b` or `w a/b`.
fn parse_ratio(text: &str) -> Option<f64> {
    let Some((above, below)) = text.split_once('/') else { return parse_digits(text) };
    let (above, below) = (above.trim(), parse_signed(below)?);
    let (before, above) = above.rsplit_once(char::is_whitespace).unwrap_or(("", above));
    Some(parse_whole_part(before)? + parse_digits(above)? / below)
}

/// Allows a minus sign before the digits.
fn parse_signed(text: &str) -> Option<f64> {
    let text = text.trim();
    match text.strip_prefix('-') {
        Some(rest) => parse_digits(rest).map(|value| -value),
        None => parse_digits(text),
    }
}

/// Allows thousands separators, a decimal point and an exponent, but no sign and no word such as
/// `inf`.
fn parse_digits(text: &str) -> Option<f64> {
    let starts = text.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    let legal = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | 'e' | 'E' | '+' | '-');
    if !starts || !text.chars().all(legal) {
        return None;
    }
    let whole = text.split(['.', 'e', 'E']).next().unwrap_or_default();
    let mut groups = whole.split(',');
    let first = groups.next().map_or(0, str::len);
    let grouped =
        !whole.contains(',') || ((1..=3).contains(&first) && groups.all(|g| g.len() == 3));
    if !grouped || text[whole.len()..].contains(',') {
        return None;
    }
    text.replace(',', "").parse().ok()
}

/// Finds the number in the last `\boxed{}`, else behind the last `####`, else the last number.
pub(crate) fn find_answer(text: &str) -> Option<f64> {
    if let Some(inside) = last_boxed(text) {
        return parse_number(inside).or_else(|| last_number(inside));
    }
    if let Some((_, after)) = text.rsplit_once("####") {
        let line = after.trim_start().lines().next().unwrap_or_default();
        return parse_number(line).or_else(|| first_number(line));
    }
    last_number(text)
}

/// Includes nested braces.
fn last_boxed(text: &str) -> Option<&str> {
    let start = text.rfind("\\boxed{")? + "\\boxed{".len();
    let mut depth = 1_usize;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&text[start..start + at]);
        }
    }
    None
}

fn last_number(text: &str) -> Option<f64> {
    split_words(text).rev().find_map(number_in_word)
}

fn first_number(text: &str) -> Option<f64> {
    split_words(text).find_map(number_in_word)
}

/// Splits at characters that cannot be part of a number, a fraction or a LaTeX fraction.
fn split_words(text: &str) -> impl DoubleEndedIterator<Item = &str> {
    let part_of = |c: char| {
        c.is_ascii_digit()
            || matches!(c, '.' | ',' | '-' | '−' | '+' | '/' | 'e' | 'E' | '\\' | '{' | '}')
            || matches!(c, 'f' | 'r' | 'a' | 'c')
    };
    text.split(move |c: char| !part_of(c))
}

/// Allows punctuation or the end of another word around the number (`face3`).
fn number_in_word(word: &str) -> Option<f64> {
    if let Some(at) = word.find("\\frac") {
        let start = word[..at].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
        let end = word.rfind('}').map_or(word.len(), |at| at + 1);
        let signed = word[..start].ends_with('-');
        let value = parse_number(word.get(start..end)?)?;
        return Some(if signed { -value } else { value });
    }
    let digit = |c: char| c.is_ascii_digit();
    let end = word.rfind(digit)? + 1;
    let begin = word.find(digit)?;
    let prefix = &word[..begin];
    let begin = begin - usize::from(prefix.ends_with('.'));
    let lone = |mark: &str| {
        let before = word[..begin].strip_suffix(mark);
        before.is_some_and(|rest| !rest.ends_with(|c: char| c.is_alphanumeric()))
    };
    let value = parse_number(&word[begin..end]).or_else(|| {
        // Several numbers in one word, such as 3-4 or 1,2: the last one counts.
        let apart = |c: char| !(c.is_ascii_digit() || c == '.');
        word[begin..end].rsplit(apart).find_map(parse_number)
    })?;
    Some(if lone("-") || lone("−") { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(found: Option<f64>, expected: Option<f64>) -> bool {
        match (found, expected) {
            (Some(found), Some(expected)) => (found - expected).abs() < 1e-9,
            (None, None) => true,
            _ => false,
        }
    }

    #[test]
    fn a_number_is_read_however_it_is_written() {
        for (text, expected) in [
            ("1,234.5", 1234.5),
            ("-3", -3.0),
            ("− 3", -3.0),
            ("+7", 7.0),
            ("1e-3", 0.001),
            ("6.02E+2", 602.0),
            ("3/4", 0.75),
            ("-3/4", -0.75),
            ("1 1/2", 1.5),
            (r"\frac{3}{4}", 0.75),
            (r"-\dfrac{1}{2}", -0.5),
            (r"2\frac{1}{2}", 2.5),
            (r"\frac{-1}{4}", -0.25),
            ("$12.50", 12.5),
            (r"\$1,000", 1000.0),
            ("50%", 50.0),
            (r"50\%", 50.0),
            ("42.", 42.0),
            ("$7$", 7.0),
            (".5", 0.5),
        ] {
            assert!(same(parse_number(text), Some(expected)), "{text}: {:?}", parse_number(text));
        }
        for text in ["", "x", "inf", "nan", "1/0", "1,23", "12 apples", r"\frac{1}{0}", "1-2"] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }

    #[test]
    fn an_answer_is_boxed_or_marked_or_last() {
        for (text, expected) in [
            (r"2 and \boxed{3}, so \boxed{\frac{7}{2}} in 9 steps", Some(3.5)),
            (r"\boxed{x = 12}", Some(12.0)),
            ("5 + 5 = 10\n#### 10\n", Some(10.0)),
            ("#### $1,234 dollars", Some(1234.0)),
            ("so it is 1,234.50.", Some(1234.5)),
            ("between 3 and -7", Some(-7.0)),
            ("the range is 3-4", Some(4.0)),
            ("x=-5.", Some(-5.0)),
            ("a face3", Some(3.0)),
            (r"thus 1\frac{1}{2}.", Some(1.5)),
            ("about 2.5e-3 m", Some(0.0025)),
            ("42 apples", Some(42.0)),
            ("no number here", None),
            (r"\boxed{", None),
            ("####", None),
        ] {
            assert!(same(find_answer(text), expected), "{text}: {:?}", find_answer(text));
        }
    }

    #[test]
    fn either_tolerance_will_do() {
        let tolerance = NumberTolerance { absolute: 0.01, relative: 0.001 };
        assert!(
            tolerance.accepts_number(0.009, 0.0) && tolerance.accepts_number(10_009.0, 10_000.0)
        );
        assert!(
            !tolerance.accepts_number(0.02, 0.0) && !tolerance.accepts_number(10_011.0, 10_000.0)
        );
    }
}
