//! Reads the files that fields of a spec name, and checks that texts are texts.

use bytes::Bytes;

use super::error::DataError;
use crate::{SpecFiles, SubmitError};

pub(crate) async fn read_spec_file(
    field: &str,
    file: &str,
    files: &SpecFiles,
) -> Result<Bytes, SubmitError> {
    let failed = |source| SubmitError::File { field: field.into(), source };
    files.read(file).await.map_err(failed)
}

/// Accepts UTF-8 text that is not empty.
pub(crate) fn check_text(field: &str, file: &str, bytes: &[u8]) -> Result<(), SubmitError> {
    let wrong = |error| Err(SubmitError::data_error(field, error));
    if bytes.is_empty() {
        return wrong(DataError::Empty { file: file.to_owned() });
    }
    match wire::decode_text(bytes) {
        Ok(_) => Ok(()),
        Err(source) => wrong(DataError::Encoding { file: file.to_owned(), source }),
    }
}
