//! Files of rows.

use bytes::Bytes;
use data_files::{ColumnMapping, DataLimits, DataPurpose, JsonRows};

use crate::lines;

/// So little that all of it fits in the memory of a small input.
const LIMITS: DataLimits = DataLimits {
    text_bytes: 1 << 20,
    rows: 10_000,
    page_bytes: 1 << 18,
    values: 20_000,
    list_items: 10_000,
};

/// The name of a file, and its content in the next lines. Rows that are read can be parsed.
pub(super) fn tables(input: &[u8]) {
    let (name, content) = lines::split_first_line(input);
    let (name, content) = (String::from_utf8_lossy(name), Bytes::copy_from_slice(content));
    let Ok(rows) = JsonRows::read(&name, &content, &LIMITS) else { return };
    for purpose in [DataPurpose::Prompts, DataPurpose::Examples] {
        let shaped = rows.shape_rows(&ColumnMapping::new(), purpose, &LIMITS);
        let Ok(shaped) = shaped else { continue };
        let parsed = shaped.rows.parse_rows().expect("JSON lines are text").flatten().count();
        let original = rows.parse_rows().expect("JSON lines are text").flatten().count();
        assert_eq!(parsed, original, "shapes change no number of rows");
    }
}
