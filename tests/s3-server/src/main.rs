//! The server by itself, for `flotilla-bench store`: says what a client's environment must hold,
//! as a shell reads it, and serves until its input ends.

use std::io::{self, Read, Write};

use s3_server::S3Server;

fn main() -> io::Result<()> {
    let server = S3Server::start()?;
    let mut out = io::stdout().lock();
    for (name, value) in server.env() {
        writeln!(out, "export {name}={value}")?;
    }
    writeln!(out, "export S3_URL={}", server.url())?;
    out.flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
