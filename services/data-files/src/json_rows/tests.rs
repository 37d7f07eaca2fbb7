use std::{io::Write, sync::Arc};

use flate2::{Compression, write::GzEncoder};
use parquet::{
    data_type::{ByteArray, ByteArrayType},
    file::{
        metadata::ParquetMetaDataWriter,
        properties::WriterProperties,
        reader::{FileReader, SerializedFileReader},
        writer::SerializedFileWriter,
    },
    schema::parser::parse_message_type,
};
use serde_json::{Value, json};

use super::*;

const FEW: DataLimits = DataLimits {
    text_bytes: 100_000,
    rows: 1000,
    page_bytes: 50_000,
    values: 5000,
    list_items: 1000,
};

fn golden(name: &str) -> Bytes {
    let path = golden::small_set().root.join("rows").join(name);
    std::fs::read(path).unwrap().into()
}

fn read(name: &str, bytes: &[u8]) -> Result<Vec<(String, Value)>, String> {
    let rows = JsonRows::read(name, &Bytes::copy_from_slice(bytes), &FEW);
    let rows = rows.map_err(|error| error.to_string())?;
    let parsed = rows.parse_rows().unwrap().map(|line| {
        let line = line.unwrap();
        (line.place.to_string(), Value::Object(line.fields))
    });
    Ok(parsed.collect())
}

fn refuse(name: &str, bytes: &[u8]) -> String {
    read(name, bytes).unwrap_err()
}

/// Writes a column of texts with the library, in row groups.
fn write_parquet(groups: &[&[&str]]) -> Vec<u8> {
    let schema =
        Arc::new(parse_message_type("message m { required binary prompt (UTF8); }").unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    for texts in groups {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let texts: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

#[test]
fn tables_have_the_rows_that_pyarrow_wrote() {
    let mut expected: Vec<Value> = serde_json::from_slice(&golden("types.json")).unwrap();
    for row in &mut expected {
        row.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    }
    let rows = read("types.parquet", &golden("types.parquet")).unwrap();
    let places: Vec<&str> = rows.iter().map(|(place, _)| place.as_str()).collect();
    assert_eq!(places, ["row 1", "row 2", "row 3"]);
    assert_eq!(rows.into_iter().map(|(_, row)| row).collect::<Vec<_>>(), expected);
    // The content shows the format, whatever the name is.
    let nested = read("conversations", &golden("conversations.parquet")).unwrap();
    assert_eq!(nested[1].1["conversations"][3], json!({"from": "gpt", "value": "6"}));
    let pages = read("pages-v2.parquet", &golden("pages-v2.parquet")).unwrap();
    assert_eq!((pages.len(), &pages[99].1["prompt"]), (100, &json!("number 99")));
}

#[test]
fn row_groups_are_read_in_their_order() {
    let rows = read("a.parquet", &write_parquet(&[&["a", "b"], &[], &["c"]])).unwrap();
    let texts: Vec<&Value> = rows.iter().map(|(_, row)| &row["prompt"]).collect();
    assert_eq!(texts, ["a", "b", "c"]);
    assert_eq!(rows[2].0, "row 3");
}

#[test]
fn a_parquet_file_that_cannot_be_read_says_why() {
    let table = golden("types.parquet");
    for end in (0..table.len()).step_by(37) {
        let error = refuse("t.parquet", &table[..end]);
        assert!(error.starts_with("it cannot be read as parquet: "), "{end}: {error}");
    }
    for (name, words) in [
        ("delta.parquet", "column \"prompt\" has the encoding DELTA_BYTE_ARRAY"),
        ("gzip.parquet", "compressed with GZIP"),
        ("image.parquet", "row 2, column \"image\": its bytes are not UTF-8"),
    ] {
        let error = refuse(name, &golden(name));
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_damaged_parquet_file_is_read_or_refused() {
    // Panics of the library are caught; a backtrace of each would take minutes.
    std::panic::set_hook(Box::new(|_| {}));
    let table = golden("conversations.parquet");
    for at in 0..table.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = table.to_vec();
            damaged[at] ^= flip;
            let _ = read("t.parquet", &damaged);
        }
    }
}

#[test]
fn a_parquet_file_that_is_larger_than_it_looks_is_refused() {
    // A dictionary and runs: a few bytes for each of the many rows.
    let long = "x".repeat(1000);
    let many: Vec<&str> = vec![&long; 900];
    let small = write_parquet(&[&many]);
    assert!(small.len() < 3000, "{} bytes", small.len());
    assert!(refuse("bomb.parquet", &small).contains("more than 100000 bytes of text"));
    let rows: Vec<&str> = vec!["x"; 1001];
    assert!(refuse("rows.parquet", &write_parquet(&[&rows])).contains("more than 1000 rows"));
    let halves = write_parquet(&[&rows[..600], &rows[..600]]);
    assert!(refuse("rows.parquet", &halves).contains("more than 1000 rows"));
}

/// Writes a column of lists of texts with the library, in row groups of one list each.
fn write_lists(lists: &[&[&str]]) -> Vec<u8> {
    write_list_columns(&["parts"], lists)
}

/// Writes columns that have the same lists of texts, in row groups of one list each.
fn write_list_columns(names: &[&str], lists: &[&[&str]]) -> Vec<u8> {
    let columns: String =
        names.iter().map(|name| format!("repeated binary {name} (UTF8); ")).collect();
    let schema = Arc::new(parse_message_type(&format!("message m {{ {columns}}}")).unwrap());
    let properties = Arc::new(WriterProperties::builder().build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    for texts in lists {
        let mut group = writer.next_row_group().unwrap();
        let definitions = vec![1; texts.len()];
        let repetitions: Vec<i16> = (0..texts.len()).map(|at| i16::from(at > 0)).collect();
        let texts: Vec<ByteArray> = texts.iter().map(|text| ByteArray::from(*text)).collect();
        let levels = (Some(&definitions[..]), Some(&repetitions[..]));
        while let Some(mut column) = group.next_column().unwrap() {
            column.typed::<ByteArrayType>().write_batch(&texts, levels.0, levels.1).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

#[test]
fn a_row_of_a_parquet_file_is_bounded_before_it_is_built() {
    let (long, short) = ("x".repeat(1000), "y".repeat(10));
    let many: Vec<&str> = vec![&long; 900];
    let bomb = write_lists(&[&[&short], &many]);
    assert!(bomb.len() < 3000, "{} bytes", bomb.len());
    let error = refuse("bomb.parquet", &bomb);
    assert!(error.starts_with("row group 1: row 1 has more than 100000 bytes"), "{error}");
    let items: Vec<&str> = vec!["x"; 1002];
    let error = refuse("items.parquet", &write_lists(&[&["a"], &items]));
    assert!(error.starts_with("row group 1: its lists have 1001 items"), "{error}");
    assert!(error.contains("smaller row groups (D105)"), "{error}");
    // The dictionary and the items would allow more than there is.
    let mut mixed: Vec<&str> = vec![&short; 900];
    mixed.push(&long);
    let rows = read("mixed.parquet", &write_lists(&[&mixed])).unwrap();
    assert_eq!(rows[0].1["parts"].as_array().unwrap().len(), 901);
}

/// Returns the file with a footer that declares this number of rows in each row group.
fn declare_rows(bytes: &[u8], rows: i64) -> Vec<u8> {
    let reader = SerializedFileReader::new(Bytes::copy_from_slice(bytes)).unwrap();
    let mut builder = reader.metadata().clone().into_builder();
    let groups = builder.take_row_groups().into_iter();
    let groups = groups.map(|group| group.into_builder().set_num_rows(rows).build().unwrap());
    let metadata = builder.set_row_groups(groups.collect()).build();
    let footer = bytes.len() - 8;
    let length = u32::from_le_bytes(bytes[footer..footer + 4].try_into().unwrap()) as usize;
    let mut changed = bytes[..footer - length].to_vec();
    ParquetMetaDataWriter::new(&mut changed, &metadata).finish().unwrap();
    changed
}

#[test]
fn a_row_is_bounded_whatever_number_of_rows_is_declared() {
    let long = "x".repeat(1000);
    let bomb = write_lists(&[&vec![long.as_str(); 900]]);
    let error = refuse("bomb.parquet", &declare_rows(&bomb, 900));
    assert!(error.starts_with("row group 0: row 1 has more than 100000 bytes"), "{error}");
}

#[test]
fn a_row_is_bounded_by_all_of_its_columns() {
    let long = "x".repeat(1000);
    let texts = [long.as_str(); 60];
    let lists = [&texts[..]];
    let rows = read("one.parquet", &write_lists(&lists)).unwrap();
    assert_eq!(rows[0].1["parts"].as_array().unwrap().len(), 60);
    let error = refuse("two.parquet", &write_list_columns(&["a", "b"], &lists));
    assert!(error.starts_with("row group 0: row 1 has more than 100000 bytes"), "{error}");
}

#[test]
fn a_declared_number_of_rows_is_not_believed() {
    std::panic::set_hook(Box::new(|_| {}));
    let mut bytes = write_parquet(&[&["a", "b", "c"]]);
    // The footer has the number of rows of the file and the group as zigzag integers: 3 is 6.
    let footer = bytes.len() - 8;
    let length = u32::from_le_bytes(bytes[footer..footer + 4].try_into().unwrap()) as usize;
    let start = footer - length;
    for at in start..footer {
        for declared in [0x7e, 0x0e, 0x02] {
            let before = bytes[at];
            if before == 6 {
                bytes[at] = declared;
                let _ = read("t.parquet", &bytes);
                bytes[at] = before;
            }
        }
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_row() {
    for (name, text) in
        [("t.jsonl", "\u{feff}{\"prompt\": \"a\"}\n"), ("t.json", "\u{feff}[{\"prompt\": \"a\"}]")]
    {
        assert_eq!(read(name, text.as_bytes()).unwrap()[0].1, json!({"prompt": "a"}), "{name}");
    }
}

#[test]
fn csv_rows_have_the_lines_of_the_file() {
    let table = "\u{feff}prompt,answer,note\r\n\"1+1\n=\",2,\r\n\r\n\"say \"\"hi\"\"\",,x\r\n";
    let rows = read("t.csv", table.as_bytes()).unwrap();
    let expected = [
        ("line 2".to_owned(), json!({"prompt": "1+1\n=", "answer": "2"})),
        ("line 5".to_owned(), json!({"prompt": "say \"hi\"", "note": "x"})),
    ];
    assert_eq!(rows, expected);
    let numbered = read("t.csv", b",prompt\n0,a\n").unwrap();
    assert_eq!(numbered[0].1, json!({"prompt": "a"}));
    let tabs = read("T.TSV", b"prompt\tanswer\na, b\t1").unwrap();
    assert_eq!(tabs, [("line 2".to_owned(), json!({"prompt": "a, b", "answer": "1"}))]);
}

#[test]
fn a_wrong_csv_file_is_refused_with_line_and_remedy() {
    for (table, words) in [
        (&b"prompt,answer\na,b,c\n"[..], &["line 2", "3 cells and the header 2", "quotation"][..]),
        (b"a,b\n\"x\ny\",1\n2\n", &["line 4", "1 cells"]),
        (b"prompt,prompt\na,b\n", &["two columns are called \"prompt\""]),
        (b"prompt\ncaf\xe9\n", &["line 2, column 4", "0xe9", "iconv"]),
        ("a\n".repeat(1002).as_bytes(), &["more than 1000 rows"]),
        (["a", &"b".repeat(100_000)].join("\n").as_bytes(), &["more than 100000 bytes of text"]),
        ([&["x"; 1001].join(","), ""].join("\n").as_bytes(), &["1001 columns"]),
    ] {
        let error = refuse("t.csv", table);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn a_json_array_is_read_item_by_item() {
    let rows = read("t.json", b" [\n {\"prompt\": \"a\"},\n {\"prompt\": [1]}\n]\n").unwrap();
    assert_eq!(rows[1], ("row 2".to_owned(), json!({"prompt": [1]})));
    // Many files of JSON lines have this name.
    assert_eq!(read("t.json", b"{\"prompt\": \"a\"}\n").unwrap()[0].0, "line 1");
    for (text, words) in [
        (&b"[{}, 7]"[..], "row 2: expected an object"),
        (b"[{\"a\": 1}, {\"a\" 2}]", "line 1 column 17"),
        (b"[{}", "EOF"),
        (b"[{}] []", "trailing characters"),
        (b"[{\"a\": \"\xff\"}]", "column 9: the byte 0xff"),
        (["[{}", &",{}".repeat(1000), "]"].concat().as_bytes(), "more than 1000 rows"),
        (
            ["[{\"a\": [0", &",0".repeat(1_000_001), "]}]"].concat().as_bytes(),
            "row 1: it has more than 1000000 values",
        ),
    ] {
        let error = refuse("t.json", text);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn compressed_files_are_read_up_to_a_limit() {
    let compress = |content: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    };
    let lines = compress(b"{\"prompt\": \"a\"}\n");
    assert_eq!(read("t.jsonl.gz", &lines).unwrap().len(), 1);
    assert_eq!(read("t.csv.gz", &compress(b"prompt\na\n")).unwrap()[0].0, "line 2");
    assert!(refuse("t.jsonl.gz", &compress(&[b' '; 100_001])).contains("more than 100000 bytes"));
    assert!(refuse("t.jsonl.gz", &lines[..lines.len() - 9]).contains("as gzip"));
}

fn shape(rows: &JsonRows, mapping: &[(&str, &str)]) -> Result<ShapedRows, String> {
    let mapping =
        mapping.iter().map(|(field, column)| ((*field).into(), (*column).into())).collect();
    let shaped = rows.shape_rows(&mapping, DataPurpose::Examples, &FEW);
    shaped.map_err(|error| error.to_string())
}

fn lines(text: &str) -> JsonRows {
    Bytes::from(text.to_owned()).into()
}

#[test]
fn rows_are_shaped_and_keep_their_places() {
    let own = lines("{\"prompt\":\"a\",  \"completion\":\"b\"}\n\n{\"text\":\"c\"}\nno JSON\n");
    let shaped = shape(&own, &[]).unwrap();
    assert_eq!(shaped.rows, own);
    assert_eq!(shaped.shapes, [(RowShape::PromptCompletion, 1), (RowShape::Text, 1)].into());

    let mixed = lines(
        "\n{\"instruction\":\"a\",\"output\":\"b\"}\n\n{ \"text\": \"c\" }\n{\"x\":\n{\"instruction\":1}",
    );
    let shaped = shape(&mixed, &[]).unwrap();
    // The reader of examples refuses the line that is no JSON.
    let expected = "\n{\"completion\":\"b\",\"prompt\":\"a\"}\n\n{ \"text\": \"c\" }\n{\"x\":\n{\"instruction\":1}\n";
    assert_eq!(shaped.rows.lines, expected);
    assert_eq!(shaped.columns["instruction"], 1);

    let wrong = shape(&lines("\n{\"instruction\":1,\"output\":\"a\"}"), &[]).unwrap_err();
    assert!(wrong.starts_with("line 2, column \"instruction\""), "{wrong}");
}

#[test]
fn columns_are_renamed_before_shapes_are_recognised() {
    let rows =
        lines("{\"instruction\":\"a\",\"output\":\"b\"}\n{\"instruction\":\"c\",\"output\":\"d\"}");
    let shaped = shape(&rows, &[("prompt", "instruction"), ("completion", "output")]).unwrap();
    assert_eq!(shaped.shapes, [(RowShape::PromptCompletion, 2)].into());
    assert_eq!(shaped.columns.keys().collect::<Vec<_>>(), ["instruction", "output"]);
    let error = shape(&rows, &[("prompt", "Instruction")]).unwrap_err();
    assert!(error.ends_with("the columns are \"instruction\", \"output\" (D112)"), "{error}");
}

#[test]
fn parts_of_a_table_are_numbered_through() {
    let table = JsonRows::read("a.parquet", &write_parquet(&[&["a", "b"]]).into(), &FEW).unwrap();
    let joined = JsonRows::join_parts([table, lines("\n{\"prompt\":\"c\"}")], &FEW).unwrap();
    let places: Vec<String> =
        joined.parse_rows().unwrap().map(|row| row.unwrap().place.to_string()).collect();
    assert_eq!(places, ["row 1", "row 2", "row 3"]);
    let large = lines(&format!("{{\"a\":\"{}\"}}\n", "x".repeat(60_000)));
    let error = JsonRows::join_parts([large.clone(), large], &FEW).unwrap_err().to_string();
    assert!(error.contains("100000 bytes of text"), "{error}");
}
