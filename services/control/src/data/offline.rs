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
    let (bytes, repeated) = blank_repeated_lines(bytes);
    let prompts = read_prompts(file, &bytes)?;
    let again = find_duplicates(&prompts);
    let lines: std::collections::BTreeSet<usize> = again.iter().map(|(line, _)| *line).collect();
    let kept = prompts.prompts.iter().filter(|numbered| !lines.contains(&numbered.line));
    let kept = PromptFile::from_prompts(kept.cloned().collect()).to_bytes();
    Ok((kept, lines.len() + repeated))
}

/// Empties lines that repeat an earlier one, ids included, and returns their number. Other lines
/// keep their numbers.
fn blank_repeated_lines(bytes: &Bytes) -> (Bytes, usize) {
    let (mut seen, mut repeated) = (std::collections::BTreeSet::new(), 0);
    let lines = bytes.split(|byte| *byte == b'\n').map(|line| {
        if seen.insert(line.trim_ascii()) || line.trim_ascii().is_empty() {
            return line;
        }
        repeated += 1;
        &[]
    });
    let lines: Vec<&[u8]> = lines.collect();
    (lines.join(&b'\n').into(), repeated)
}

fn read_prompts(file: &str, bytes: &Bytes) -> Result<PromptFile, DataError> {
    PromptFile::read(bytes, ChatFormat::default())
        .map_err(|source| DataError::Prompts { file: file.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_lines_are_removed_and_repeated_ids_are_not() {
        let file = |lines: &[&str]| Bytes::from(lines.join("\n"));
        let one = r#"{"id": "a", "prompt": "1+1", "answer": "2"}"#;
        let other = r#"{"id": "a", "prompt": "1+2", "answer": "3"}"#;
        let (kept, removed) =
            remove_duplicate_prompts("p.jsonl", &file(&[one, "", one, "", one])).unwrap();
        assert_eq!((removed, kept.iter().filter(|byte| **byte == b'\n').count()), (2, 1));
        let error = remove_duplicate_prompts("p.jsonl", &file(&[one, one, other])).unwrap_err();
        let error = wire::format_error_chain(&error);
        assert!(error.contains("line 3") && error.contains("used in line 1"), "{error}");
    }
}
