//! Records of skipped tests: a file each in `skip-records` of the target directory.

use std::{
    collections::BTreeSet,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
};

/// A test that did not run in full, because the machine lacks something.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SkippedTest {
    /// `binary test`, for example `e2e::all page::a_run_is_shown`.
    pub test: String,
    /// The program or right that is absent.
    pub lacking: String,
    /// How to get it.
    pub remedy: String,
}

impl fmt::Display for SkippedTest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: no {}; {}", self.test, self.lacking, self.remedy)
    }
}

/// Records that the current test is skipped, or a part of it. The test returns after this call or
/// leaves that part out.
pub fn skip_test(lacking: &str, remedy: &str) {
    let skipped = SkippedTest {
        test: current_test_name(),
        lacking: lacking.to_owned(),
        remedy: remedy.to_owned(),
    };
    println!("skipped: {skipped}");
    let mut hasher = DefaultHasher::new();
    skipped.hash(&mut hasher);
    let directory = records_directory();
    let path = directory.join(format!("{:016x}", hasher.finish()));
    let SkippedTest { test, lacking, remedy } = skipped;
    std::fs::create_dir_all(&directory)
        .and_then(|()| std::fs::write(path, format!("{test}\n{lacking}\n{remedy}\n")))
        .expect("the target directory can be written");
}

/// Returns the skipped tests since `clear_skipped_tests`. Fails if a record cannot be read.
pub fn read_skipped_tests() -> io::Result<BTreeSet<SkippedTest>> {
    let entries = match std::fs::read_dir(records_directory()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    entries.map(|entry| read_record(&entry?.path())).collect()
}

fn read_record(path: &Path) -> io::Result<SkippedTest> {
    let text = std::fs::read_to_string(path)?;
    let mut lines = text.lines().map(str::to_owned);
    let mut next_line = || {
        lines
            .next()
            .ok_or_else(|| io::Error::other(format!("{}: a line is absent", path.display())))
    };
    Ok(SkippedTest { test: next_line()?, lacking: next_line()?, remedy: next_line()? })
}

/// Removes all records. Call it before a run.
pub fn clear_skipped_tests() -> io::Result<()> {
    match std::fs::remove_dir_all(records_directory()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// The skips that are accepted: lines of test, `|`, what it lacks, `|`, and the reason. The test `*`
/// stands for all tests. Lines that begin with `#` are comments.
pub struct AllowedSkips(BTreeSet<(String, String)>);

impl AllowedSkips {
    /// Parses a list. Fails with the first line that is not of this form or gives no reason.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let parse_line = |line: &str| match line.split('|').map(str::trim).collect::<Vec<_>>()[..] {
            [test, lacking, reason] if !reason.is_empty() => {
                Ok((test.to_owned(), lacking.to_owned()))
            }
            _ => Err(format!("{line:?} is not: test | what it lacks | reason")),
        };
        lines.map(parse_line).collect::<Result<_, _>>().map(Self)
    }

    pub fn contains(&self, skipped: &SkippedTest) -> bool {
        let allows = |test: &str| self.0.contains(&(test.to_owned(), skipped.lacking.clone()));
        allows(&skipped.test) || allows("*")
    }
}

/// Returns the binary and the name of the current test, as nextest writes them and passes them in
/// the environment. For `cargo test` they follow from the package, the executable and the thread.
fn current_test_name() -> String {
    let variable = |name| std::env::var(name).ok();
    match (variable("NEXTEST_BINARY_ID"), variable("NEXTEST_TEST_NAME")) {
        (Some(binary), Some(test)) => format!("{binary} {test}"),
        _ => {
            let package = variable("CARGO_PKG_NAME").unwrap_or_default();
            let program = current_program();
            let stem = program.file_stem().unwrap_or_default().to_string_lossy();
            // Cargo appends a hash.
            let target = stem.rsplit_once('-').map_or(&*stem, |(target, _)| target);
            let binary = match target == package.replace('-', "_") {
                true => package,
                false => format!("{package}::{target}"),
            };
            format!("{binary} {}", std::thread::current().name().unwrap_or("unknown"))
        }
    }
}

/// Returns `skip-records` in the target directory. Programs lie in `target/PROFILE`, tests in
/// `target/PROFILE/deps`.
fn records_directory() -> PathBuf {
    let program = current_program();
    let mut directory = program.parent().expect("a program lies in a directory");
    if directory.ends_with("deps") {
        directory = directory.parent().expect("deps lies in a directory");
    }
    directory.join("skip-records")
}

fn current_program() -> PathBuf {
    std::env::current_exe().expect("a program has a path")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_is_allowed_only_for_its_test_and_its_reason() {
        let list =
            "# comment\n\ne2e::all partition::a_cut | tc netem | kernels in containers lack it\n";
        let allowed = AllowedSkips::parse(list).unwrap();
        let skipped = |test: &str, lacking: &str| SkippedTest {
            test: test.to_owned(),
            lacking: lacking.to_owned(),
            remedy: "install it".to_owned(),
        };
        assert!(allowed.contains(&skipped("e2e::all partition::a_cut", "tc netem")));
        assert!(!allowed.contains(&skipped("e2e::all partition::a_cut", "root")));
        assert!(!allowed.contains(&skipped("e2e::all partition::b_cut", "tc netem")));
        let allowed = AllowedSkips::parse("* | torch | 2 GB").unwrap();
        assert!(allowed.contains(&skipped("trainer::pytorch resumes", "torch")));
        assert!(!allowed.contains(&skipped("trainer::pytorch resumes", "root")));
        assert!(AllowedSkips::parse("a test | a tool |").is_err());
        assert!(AllowedSkips::parse("a test | a tool").is_err());
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        std::fs::write(&path, "a::b c\npromtool\ninstall it\n").unwrap();
        let read = read_record(&path).unwrap();
        assert_eq!(read.to_string(), "a::b c: no promtool; install it");
        std::fs::write(&path, "a::b c\n").unwrap();
        assert!(read_record(&path).is_err());
    }
}
