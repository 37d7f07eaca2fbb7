//! Reads small text files of models, which may come from anyone.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

/// Reads a text file. Fails if it has more than `most` bytes.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let mut text = String::new();
    let read = File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if read as u64 > most {
        let problem = format!("it has more than {most} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, problem));
    }
    Ok(text)
}
