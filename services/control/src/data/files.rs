//! Files of prompts or examples on their own, without a fleet or a model.

use bytes::Bytes;
use wire::v1::DataFile;

use super::{
    error::DataError,
    examples::Examples,
    prompts::{Manner, Prompts},
    split::{Held, duplicates, split},
    statistics,
};

/// What there is to be told of a file: of prompts, or where its lines have completions, examples.
///
/// # Errors
/// The first line that is neither.
pub fn file_report(file: &str, bytes: &Bytes) -> Result<(DataFile, Vec<String>), DataError> {
    if let Ok(examples) = Examples::read(bytes, Manner::default())
        && ["completion", "response"].iter().any(|name| examples.fields.contains_key(*name))
    {
        return Ok((statistics::of_examples("", file, &examples), Vec::new()));
    }
    let prompts = read(file, bytes)?;
    let warnings = statistics::repeated(file, &prompts).into_iter().collect();
    Ok((statistics::of_prompts("", file, &prompts), warnings))
}

/// What is trained on, and what is held out, as a run with that seed would have it.
///
/// # Errors
/// When it is no file of prompts, or one side would be empty.
pub fn split_file(
    file: &str,
    bytes: &Bytes,
    held: Held,
    seed: u64,
) -> Result<[(Bytes, usize); 2], DataError> {
    let prompts = read(file, bytes)?;
    let sides = split(&prompts, held, seed);
    let (train, heldout) =
        sides.map_err(|source| DataError::Split { file: file.to_owned(), source })?;
    Ok([&train, &heldout].map(|side| (side.bytes(), side.prompts.len())))
}

/// The file without the prompts that ask what an earlier one does, and how many these were.
///
/// # Errors
/// When it is no file of prompts.
pub fn dedup(file: &str, bytes: &Bytes) -> Result<(Bytes, usize), DataError> {
    let prompts = read(file, bytes)?;
    let again = duplicates(&prompts);
    let lines: std::collections::BTreeSet<usize> = again.iter().map(|(line, _)| *line).collect();
    let kept = prompts.prompts.iter().filter(|numbered| !lines.contains(&numbered.line));
    Ok((Prompts::part(kept.cloned().collect()).bytes(), lines.len()))
}

fn read(file: &str, bytes: &Bytes) -> Result<Prompts, DataError> {
    Prompts::read(bytes, Manner::default())
        .map_err(|source| DataError::Prompts { file: file.to_owned(), source })
}
