//! The server as a program, for `flotilla-bench store`. Prints the environment variables of a
//! client in shell syntax, and serves until the end of its input.

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
