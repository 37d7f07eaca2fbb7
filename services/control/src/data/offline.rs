//! Tools for files of prompts or examples that need neither a fleet nor a model.

use bytes::Bytes;
use spec::HeldoutSize;
use wire::v1::DataFile;

use super::{
    error::DataError,
    examples::ExampleFile,
    heldout_split::{find_duplicates, split_prompts},
    prompts::{ChatFormat, PromptFile},
    statistics,
};

/// Returns statistics of a file and warnings about it. The file contains examples if its lines have
/// completions, else prompts.
pub fn report_data_file(file: &str, bytes: &Bytes) -> Result<(DataFile, Vec<String>), DataError> {
    if let Ok(examples) = ExampleFile::read(bytes, ChatFormat::default())
        && ["completion", "response"].iter().any(|name| examples.field_counts.contains_key(*name))
    {
        return Ok((statistics::example_statistics("", file, &examples), Vec::new()));
    }
    let prompts = read_prompts(file, bytes)?;
    let warnings = statistics::duplicates_warning(file, &prompts).into_iter().collect();
    Ok((statistics::prompt_statistics("", file, &prompts), warnings))
}

/// Splits a file of prompts into the part to train on and the held-out part, each with its number
/// of prompts, as a run with the same seed does.
pub fn split_prompt_file(
    file: &str,
    bytes: &Bytes,
    held: HeldoutSize,
    seed: u64,
) -> Result<[(Bytes, usize); 2], DataError> {
    let prompts = read_prompts(file, bytes)?;
    let sides = split_prompts(&prompts, held, seed);
    let (train, heldout) =
        sides.map_err(|source| DataError::Split { file: file.to_owned(), source })?;
    Ok([&train, &heldout].map(|side| (side.to_bytes(), side.prompts.len())))
}

/// Returns the file without the prompts that ask the same as an earlier one, and the number of
/// removed prompts.
pub fn remove_duplicate_prompts(file: &str, bytes: &Bytes) -> Result<(Bytes, usize), DataError> {
    let prompts = read_prompts(file, bytes)?;
    let again = find_duplicates(&prompts);
    let lines: std::collections::BTreeSet<usize> = again.iter().map(|(line, _)| *line).collect();
    let kept = prompts.prompts.iter().filter(|numbered| !lines.contains(&numbered.line));
    Ok((PromptFile::from_prompts(kept.cloned().collect()).to_bytes(), lines.len()))
}

fn read_prompts(file: &str, bytes: &Bytes) -> Result<PromptFile, DataError> {
    PromptFile::read(bytes, ChatFormat::default())
        .map_err(|source| DataError::Prompts { file: file.to_owned(), source })
}
