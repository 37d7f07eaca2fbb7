//! Checks the headers of a parquet file's pages. The reader allocates as many bytes and values as
//! they declare, so a file of a kilobyte could take all memory.

use parquet::{
    basic::Type,
    file::metadata::{ColumnChunkMetaData, ParquetMetaData},
};

use crate::{
    error::DataFileError,
    line_writer::DataLimits,
    thrift::{ThriftField, read_fields},
};

/// The encoding in which values share their beginnings: a page of it may be any size once decoded.
const DELTA_BYTE_ARRAY: i64 = 7;
/// Bytes of the smallest value in a dictionary.
const DICTIONARY_VALUE_BYTES: u64 = 4;

/// The parts of a page's header on which memory depends.
#[derive(Debug, Default, PartialEq)]
struct PageHeader {
    uncompressed_bytes: i64,
    compressed_bytes: i64,
    values: i64,
    encoding: i64,
    is_dictionary: bool,
}

/// A column of a row group, both counted from 0, whose lists may repeat long texts of its
/// dictionary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RepeatedTexts {
    pub(crate) group: usize,
    pub(crate) column: usize,
}

/// Bytes and values of the pages so far, once decoded.
#[derive(Debug, Clone, Copy, Default)]
struct PageTotals {
    bytes: u64,
    values: u64,
}

/// Values in the data pages of a column chunk, and bytes of its dictionary.
#[derive(Debug, Clone, Copy, Default)]
struct ChunkSize {
    values: u64,
    dictionary_bytes: u64,
}

/// Requires that all pages together, and the lists of each row group, stay within the limits.
/// Returns the columns whose rows may still be of any size.
pub(crate) fn check_pages(
    bytes: &[u8],
    metadata: &ParquetMetaData,
    limits: &DataLimits,
) -> Result<Vec<RepeatedTexts>, DataFileError> {
    let (mut totals, mut repeated) = (PageTotals::default(), Vec::new());
    for (group, row_group) in metadata.row_groups().iter().enumerate() {
        let rows = u64::try_from(row_group.num_rows()).unwrap_or(0);
        let (mut all_items, mut longest_row, mut texts) = (0, 0_u64, Vec::new());
        for (column, chunk) in row_group.columns().iter().enumerate() {
            let size = check_chunk(bytes, chunk, limits, &mut totals)?;
            if chunk.column_descr().max_rep_level() == 0 {
                continue;
            }
            // Each row has a value, though its list is empty.
            all_items += size.values.saturating_sub(rows);
            if matches!(chunk.column_type(), Type::BYTE_ARRAY | Type::FIXED_LEN_BYTE_ARRAY) {
                // All values may be of one row: the number of rows is only declared.
                let longest = size.dictionary_bytes.saturating_mul(size.values.max(1));
                longest_row = longest_row.saturating_add(longest);
                texts.push(RepeatedTexts { group, column });
            }
        }
        if longest_row > limits.text_bytes as u64 {
            repeated.append(&mut texts);
        }
        if all_items > limits.list_items {
            let limit = limits.list_items;
            let problem = format!("its lists have {all_items} items, the limit is {limit}");
            return Err(DataFileError::RowGroup { group, problem });
        }
    }
    Ok(repeated)
}

fn check_chunk(
    bytes: &[u8],
    chunk: &ColumnChunkMetaData,
    limits: &DataLimits,
    totals: &mut PageTotals,
) -> Result<ChunkSize, DataFileError> {
    let column = chunk.column_path().string();
    let mut size = ChunkSize::default();
    let mut pages = chunk_bytes(bytes, chunk).ok_or_else(|| truncated(&column))?;
    while !pages.is_empty() {
        let header = read_page_header(&mut pages).ok_or_else(|| truncated(&column))?;
        let page = check_page(&header, &column, limits)?;
        totals.bytes += page.uncompressed_bytes;
        totals.values += page.values;
        if totals.bytes > limits.text_bytes as u64 {
            return Err(limits.too_many_bytes());
        }
        if totals.values > limits.values {
            return Err(DataFileError::TooLarge { limit: limits.values, unit: "values" });
        }
        if header.is_dictionary {
            size.dictionary_bytes += page.uncompressed_bytes;
        } else {
            size.values += page.values;
        }
        let compressed = usize::try_from(header.compressed_bytes).ok();
        let rest = compressed.and_then(|length| pages.get(length..));
        pages = rest.ok_or_else(|| truncated(&column))?;
    }
    Ok(size)
}

/// Bytes and values of a page once decoded.
struct PageSize {
    uncompressed_bytes: u64,
    values: u64,
}

fn check_page(
    header: &PageHeader,
    column: &str,
    limits: &DataLimits,
) -> Result<PageSize, DataFileError> {
    let size = |number: i64| u64::try_from(number).map_err(|_| truncated(column));
    let (uncompressed_bytes, values) = (size(header.uncompressed_bytes)?, size(header.values)?);
    if header.encoding == DELTA_BYTE_ARRAY && !header.is_dictionary {
        let problem = format!(
            "column {column:?} has the encoding DELTA_BYTE_ARRAY, whose size has no bound; write \
             it with dictionaries or plain"
        );
        return Err(DataFileError::Unreadable { format: "parquet", problem });
    }
    if uncompressed_bytes > limits.page_bytes as u64 {
        let limit = limits.page_bytes as u64;
        return Err(DataFileError::TooLarge { limit, unit: "bytes in one page" });
    }
    let entries_max = uncompressed_bytes / DICTIONARY_VALUE_BYTES;
    if header.is_dictionary && values > entries_max.max(1) {
        return Err(truncated(column));
    }
    Ok(PageSize { uncompressed_bytes, values })
}

fn truncated(column: &str) -> DataFileError {
    DataFileError::Unreadable {
        format: "parquet",
        problem: format!("the pages of column {column:?} are damaged or incomplete; copy it again"),
    }
}

fn chunk_bytes<'a>(bytes: &'a [u8], chunk: &ColumnChunkMetaData) -> Option<&'a [u8]> {
    let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
    let (start, length) =
        (usize::try_from(start).ok()?, usize::try_from(chunk.compressed_size()).ok()?);
    bytes.get(start..start.checked_add(length)?)
}

/// Reads the header at the start of `input`, which then begins with the page's bytes. Returns
/// `None` if it is damaged.
fn read_page_header(input: &mut &[u8]) -> Option<PageHeader> {
    let mut header = PageHeader::default();
    read_fields(input, &mut |path, field| {
        let ThriftField::Integer(number) = field else { return Some(()) };
        match path {
            [2] => header.uncompressed_bytes = number,
            [3] => header.compressed_bytes = number,
            // Data pages of both versions, and dictionaries.
            [5 | 8, 1] => header.values = number,
            [7, 1] => (header.values, header.is_dictionary) = (number, true),
            [5, 2] | [8, 4] => header.encoding = number,
            _ => {}
        }
        Some(())
    })?;
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_header_is_read_up_to_its_end() {
        // type 0, 300 bytes uncompressed, 7 compressed, 5 values in encoding 8, RLE levels.
        let header = [
            0x15, 0x00, 0x15, 0xd8, 0x04, 0x15, 0x0e, 0x2c, 0x15, 0x0a, 0x15, 0x10, 0x15, 0x06,
            0x15, 0x06, 0x00, 0x00,
        ];
        let mut input = &[&header[..], b"page"].concat()[..];
        let expected = PageHeader {
            uncompressed_bytes: 300,
            compressed_bytes: 7,
            values: 5,
            encoding: 8,
            is_dictionary: false,
        };
        assert_eq!(read_page_header(&mut input), Some(expected));
        assert_eq!(input, b"page");
        for end in 0..header.len() {
            assert_eq!(read_page_header(&mut &header[..end]), None, "{end} bytes");
        }
    }

    #[test]
    fn a_page_that_declares_too_much_is_refused() {
        let limits = DataLimits { page_bytes: 1000, ..DataLimits::default() };
        let check = |header: PageHeader| check_page(&header, "c", &limits).map(drop);
        let page = |bytes, values| PageHeader {
            uncompressed_bytes: bytes,
            values,
            ..PageHeader::default()
        };
        check(page(1000, 5000)).unwrap();
        for (header, words) in [
            (page(1001, 1), "1000 bytes in one page"),
            (page(-1, 1), "damaged"),
            (page(1, -1), "damaged"),
            (PageHeader { is_dictionary: true, ..page(400, 101) }, "damaged"),
            (PageHeader { encoding: DELTA_BYTE_ARRAY, ..page(1, 1) }, "DELTA_BYTE_ARRAY"),
        ] {
            let error = check(header).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
