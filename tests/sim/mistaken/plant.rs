//! The build script of the mistaken cores: copies the source of a core, with its mistakes as
//! alternatives that a thread can choose. The shipped core has no trace of them.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

include!("mistakes.rs");

const CHOICE: &str = "
/// The mistake that this thread has planted.
pub mod planted {
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<&'static str> = const { Cell::new(\"\") };
    }

    pub fn plant_mistake(name: &'static str) {
        PLANTED.set(name);
    }

    pub(crate) fn is_planted(name: &str) -> bool {
        PLANTED.get() == name
    }
}
";

fn main() -> io::Result<()> {
    let read = |name: &str| env::var(name).expect("Cargo sets it");
    let core = match &*read("CARGO_PKG_NAME") {
        "mistaken-cycle" => "services/cycle/src",
        "mistaken-agent-core" => "agents/agent-core/src",
        other => panic!("{other} is no mistaken core"),
    };
    let root = Path::new(&read("CARGO_MANIFEST_DIR")).join("../../../..");
    println!("cargo::rerun-if-changed={}", root.join(core).display());
    println!("cargo::rerun-if-changed=../mistakes.rs");
    copy_files(&root, core, &PathBuf::from(read("OUT_DIR")).join("src"))
}

fn copy_files(root: &Path, from: &str, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(root.join(from))? {
        let entry = entry?;
        let name = entry.file_name().into_string().expect("names of source files are text");
        let (from, to) = (format!("{from}/{name}"), to.join(&name));
        if entry.file_type()?.is_dir() {
            copy_files(root, &from, &to)?;
        } else {
            let mut source = plant_mistakes(&from, fs::read_to_string(entry.path())?);
            if name == "lib.rs" {
                // An included file cannot document the crate.
                let lines = source.lines().filter(|line| !line.starts_with("//!"));
                source = lines.collect::<Vec<_>>().join("\n") + CHOICE;
            }
            fs::write(to, source)?;
        }
    }
    Ok(())
}

fn plant_mistakes(file: &str, source: String) -> String {
    CORE_MISTAKES.iter().filter(|mistake| mistake.file == file).fold(source, |source, mistake| {
        let CoreMistake { name, right, wrong, .. } = mistake;
        assert_eq!(source.matches(right).count(), 1, "{file} has to have {right:?} once");
        let choice =
            format!("(if crate::planted::is_planted({name:?}) {{ {wrong} }} else {{ {right} }})");
        source.replace(right, &choice)
    })
}
