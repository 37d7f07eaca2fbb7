//! A cell of its own, for tests of this crate and of those that use it. With the argument `open`
//! it opens a sandbox of such cells and says what it found.

use sandbox::{Launch, Policy, Sandbox};

fn main() {
    if std::env::args().nth(1).as_deref() != Some("open") {
        sandbox::serve_cell()
    }
    let Ok(program) = std::env::current_exe() else { std::process::exit(2) };
    match Sandbox::open(Launch { program, arguments: Vec::new() }, Policy::default()) {
        Ok(sandbox) => println!("{}", sandbox.layers()),
        Err(unfit) => {
            eprintln!("{unfit}");
            std::process::exit(1)
        }
    }
}
