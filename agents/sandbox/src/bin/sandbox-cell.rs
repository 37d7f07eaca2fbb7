//! A cell process for tests of this crate and of the crates that use it. With the argument `open`
//! it opens a sandbox of such cells and prints its layers. With `masked --hidden PATH… -- ARGV…` it
//! runs a program from which those paths are hidden.

use sandbox::{CellLaunch, PathVisibility, Sandbox};

fn main() {
    if std::env::args().nth(1).as_deref() == Some("masked") {
        run_masked_program()
    }
    if std::env::args().nth(1).as_deref() != Some("open") {
        sandbox::serve_cell()
    }
    let Ok(program) = std::env::current_exe() else { std::process::exit(2) };
    match Sandbox::open(CellLaunch { program, arguments: Vec::new() }, PathVisibility::default()) {
        Ok(sandbox) => println!("{}", sandbox.active_layers()),
        Err(unfit) => {
            eprintln!("{unfit}");
            std::process::exit(1)
        }
    }
}

fn run_masked_program() -> ! {
    let mut arguments = std::env::args_os().skip(2);
    let mut hidden = Vec::new();
    while arguments.next().is_some_and(|word| word == "--hidden") {
        hidden.extend(arguments.next().map(Into::into));
    }
    let argv: Vec<_> = arguments.collect();
    sandbox::run_masked(&hidden, &argv)
}
