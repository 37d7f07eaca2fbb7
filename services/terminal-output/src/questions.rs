//! Questions to the person at a terminal. The answers are lines of stdin.

use std::io::{BufRead, Write};

use anyhow::{Context, bail};

use crate::{escape_line, is_interactive_terminal, print_message};

/// The answers to a question before it is given up.
const ANSWERS_MAX: usize = 5;

/// A question with a line as its answer.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub text: &'a str,
    /// Taken for an empty answer.
    pub default: Option<&'a str>,
    /// Advice if there is no answer, such as an option to pass.
    pub remedy: &'a str,
}

impl Question<'_> {
    /// Returns the answer, or the default if it is empty. Asks again after an answer that `check`
    /// refuses.
    pub fn ask(&self, check: impl Fn(&str) -> anyhow::Result<()>) -> anyhow::Result<String> {
        let shown = self.default.map_or(String::new(), |default| format!(" [{default}]"));
        for _ in 0..ANSWERS_MAX {
            let given = read_answer(&format!("{}{shown}: ", self.text))?;
            let answer = match (given, self.default) {
                (Some(answer), _) if !answer.is_empty() => answer,
                (Some(_), Some(default)) => default.to_owned(),
                _ => break,
            };
            match check(&answer) {
                Ok(()) => return Ok(answer),
                Err(error) => print_message(&format!("{error:#}")),
            }
        }
        bail!("no answer: {} (A102)", self.remedy)
    }

    /// Returns the default without a question.
    pub fn use_default(&self) -> anyhow::Result<String> {
        self.default.map(str::to_owned).with_context(|| format!("{} (A102)", self.remedy))
    }
}

/// Returns true if the answer to a question is yes. Without a terminal, nothing is confirmed.
pub fn confirm_question(question: &str) -> anyhow::Result<bool> {
    if !is_interactive_terminal() {
        return Ok(false);
    }
    for _ in 0..ANSWERS_MAX {
        let answer = read_answer(&format!("{question} [Y/n] "))?;
        match answer.map(|answer| answer.to_lowercase()).as_deref() {
            Some("" | "y" | "yes") => return Ok(true),
            None | Some("n" | "no") => return Ok(false),
            Some(_) => print_message("answer y or n"),
        }
    }
    Ok(false)
}

/// Returns `None` at the end of the input.
fn read_answer(question: &str) -> anyhow::Result<Option<String>> {
    print_question(question);
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).context("read the answer")?;
    Ok((read > 0).then(|| line.trim().to_owned()))
}

/// Prints a question on stderr, without ending the line.
fn print_question(question: &str) {
    let mut stderr = std::io::stderr().lock();
    // A question that cannot be shown is not answered.
    let _ = stderr.write_all(escape_line(question).as_bytes()).and_then(|()| stderr.flush());
}
