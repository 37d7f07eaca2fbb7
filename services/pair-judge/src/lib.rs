//! A judge of pairs of answers: a program of the user, or a model behind an endpoint. It sees a
//! prompt with an answer of each of two models, in a random order, and prefers one or none.
//!
//! The core is pure: `shown_pairs` orders the answers, `preference` reads what the judge replies,
//! [`JudgedAnswers`] are the scores that follow. The shell, [`PairJudge`], asks several pairs at a
//! time, and no more once a paired test has decided. It knows neither runs nor checkpoints. The
//! program runs as the user who names it, without a sandbox.

mod command_judge;
mod endpoint_judge;
mod error;
mod judge;
mod judged_answers;
mod preference;
mod shown_pairs;

pub use error::JudgeError;
pub use judge::PairJudge;
pub use judged_answers::JudgedAnswers;

#[doc(hidden)]
pub mod fuzzing {
    /// Parses bytes as a line of a program, and as the text of a model.
    pub fn fuzz_reply(input: &[u8]) {
        if let Ok(line) = serde_json::from_slice(input) {
            let _ = crate::preference::parse_object(&line);
        }
        let _ = crate::preference::parse_text(&String::from_utf8_lossy(input));
    }
}
