//! The reasons why no data is generated.

use std::{io, path::PathBuf};

use bounded_http::CompletionHttpError;

/// The reason why a generation ended early. What it has is kept.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    #[error(
        "{} has samples of another plan: changed {parts}; restore that, or choose another --out \
         (D120)", directory.display()
    )]
    OtherPlan { directory: PathBuf, parts: String },
    #[error(
        "{} cannot be continued: line {line}: {problem}; choose another --out, or remove this file \
         (D120)", path.display()
    )]
    Progress { path: PathBuf, line: usize, problem: String },
    #[error("another command writes to {}; wait for its end (D120)", directory.display())]
    InUse { directory: PathBuf },
    #[error("write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("a request failed at attempt {tries}; the same command continues with what there is")]
    Endpoint {
        tries: u32,
        #[source]
        source: CompletionHttpError,
    },
    #[error("the endpoint refuses each request: {message} (E109)")]
    Refused { message: String },
    #[error("the verifier fails with each sample: {message} (E117)")]
    Verifier { message: String },
}
