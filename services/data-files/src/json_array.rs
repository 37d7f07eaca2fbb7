//! Reads a file that is one JSON array of objects.

use std::fmt;

use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::{Value, value::RawValue};
use wire::{ROW_VALUES_MAX, RowPlace};

use crate::{error::DataFileError, line_writer::LineWriter};

/// Writes the items one by one, so that the array is never in memory.
struct ItemVisitor<'a> {
    writer: &'a mut LineWriter,
    failure: &'a mut Option<DataFileError>,
}

impl<'de> Visitor<'de> for ItemVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element::<&RawValue>()? {
            let place = RowPlace::Row(self.writer.next_line());
            let wrong = |problem: String| Err(DataFileError::Row { place, problem });
            let written = if wire::exceeds_json_values(item.get().as_bytes(), ROW_VALUES_MAX) {
                wrong(format!("it has more than {ROW_VALUES_MAX} values; split it"))
            } else {
                match serde_json::from_str::<Value>(item.get()).map_err(A::Error::custom)? {
                    Value::Object(row) => self.writer.write_row(&row),
                    _ => wrong("expected an object such as {\"prompt\": \"2+2=\"}".to_owned()),
                }
            };
            if let Err(error) = written {
                *self.failure = Some(error);
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

pub(crate) fn read_json_array(bytes: &[u8], writer: &mut LineWriter) -> Result<(), DataFileError> {
    wire::decode_text(bytes)?;
    let mut failure = None;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let read = json
        .deserialize_seq(ItemVisitor { writer, failure: &mut failure })
        .and_then(|()| json.end());
    match (failure, read) {
        (Some(failure), _) => Err(failure),
        (None, Err(error)) => {
            Err(DataFileError::Unreadable { format: "a JSON array", problem: error.to_string() })
        }
        (None, Ok(())) => Ok(()),
    }
}
