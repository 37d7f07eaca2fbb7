//! The Debian package that `make release` builds: its files exist and fit together.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use deploy::{file_name, output_text, read_file, root, run_command};
use serde_json::Value;

fn metadata() -> Value {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root()).args(["metadata", "--format-version=1", "--no-deps", "--offline"]);
    let output = run_command(&mut command);
    let all: Value = serde_json::from_slice(&output.stdout).expect("cargo's metadata");
    let packages = all["packages"].as_array().expect("packages");
    let package = packages.iter().find(|package| package["name"] == "flotilla").expect("flotilla");
    package["metadata"]["deb"].clone()
}

/// Returns source, destination and mode of each file.
fn assets(deb: &Value) -> Vec<[String; 3]> {
    let assets = deb["assets"].as_array().expect("assets");
    let text = |asset: &Value, one: usize| asset[one].as_str().expect("a text").to_owned();
    assets.iter().map(|asset| std::array::from_fn(|one| text(asset, one))).collect()
}

#[test]
fn all_files_of_the_package_exist_or_are_built() {
    let deb = metadata();
    let makers = read_file("Makefile") + &read_file("deploy/build-release.sh");
    let crate_directory = root().join("services/flotilla");
    for [source, destination, mode] in assets(&deb) {
        assert!(!destination.starts_with('/'), "{destination}");
        if source.starts_with("target/") || source.starts_with("../../target/") {
            let (directory, name) = source.rsplit_once('/').expect("a name");
            // For a wildcard the directory is created.
            let target =
                if name.starts_with('*') { directory.trim_start_matches("../") } else { name };
            assert!(makers.contains(target) || name == "flotilla", "nobody makes {source}");
            continue;
        }
        let path = crate_directory.join(&source);
        let (directory, name) = (path.parent().expect("a directory"), path.file_name());
        let name = name.expect("a name").to_string_lossy();
        let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{source}: {error}"));
        let ending = name.strip_prefix('*');
        let found = entries.flatten().filter(|entry| {
            let entry = entry.file_name().to_string_lossy().into_owned();
            ending.map_or(entry == name, |ending| entry.ends_with(ending))
        });
        assert!(found.count() > 0, "{source} is not there");
        let modes = ["644", "600", "755"];
        assert!(modes.contains(&mode.as_str()), "{source}: {mode}");
    }
    for script in ["postinst", "prerm"] {
        let path = crate_directory.join(deb["maintainer-scripts"].as_str().expect("a path"));
        let text = fs::read_to_string(path.join(script)).expect("a script");
        assert!(text.starts_with("#!/bin/sh\nset -e\n"), "{script}");
    }
}

#[test]
fn units_find_the_program_and_the_settings_where_the_package_puts_them() {
    let deb = metadata();
    let installed: Vec<String> = assets(&deb)
        .into_iter()
        .map(|[source, destination, _]| {
            let name = source.rsplit('/').next().expect("a name");
            let whole = if destination.ends_with('/') { destination + name } else { destination };
            format!("/{whole}")
        })
        .collect();
    assert!(installed.contains(&"/usr/bin/flotilla".to_owned()));
    for name in ["flotilla-agent", "flotilla-up", "flotilla-coordinator"] {
        let unit = format!("/usr/lib/systemd/system/{name}.service");
        assert!(installed.contains(&unit), "{unit} is not installed");
        let text = read_file(format!("deploy/systemd/{name}.service"));
        assert!(text.contains("ExecStart=/usr/bin/flotilla "), "{name}");
        let settings = text.lines().find_map(|line| line.strip_prefix("EnvironmentFile=-"));
        let settings = settings.expect("settings").to_owned();
        assert!(installed.contains(&settings), "{settings} is not installed");
        let conf_files = deb["conf-files"].as_array().expect("conf-files");
        assert!(conf_files.contains(&settings.as_str().into()), "{settings} would be overwritten");
        let documentation =
            text.lines().find_map(|line| line.strip_prefix("Documentation=file://"));
        assert!(installed.contains(&documentation.expect("documentation").to_owned()), "{name}");
    }
    // The place where the program looks for it, beside `bin`.
    let server = "lib/flotilla/nats-server";
    assert!(installed.contains(&format!("/usr/{server}")), "{server} is not installed");
    assert!(read_file("services/bus/src/server/binary.rs").contains(&format!("\"{server}\"")));
    assert!(installed.contains(&"/usr/share/doc/flotilla/LICENSE-nats-server".to_owned()));
    // Settings may contain secrets.
    for [source, _, mode] in assets(&deb).iter().filter(|asset| asset[0].ends_with(".env")) {
        assert_eq!(mode, "600", "{source}");
    }
}

/// Returns the files of the last release that end so, if one was built.
fn release_files(ending: &str) -> Vec<PathBuf> {
    let files = fs::read_dir(root().join("target/release-files")).into_iter().flatten().flatten();
    files.map(|it| it.path()).filter(|path| file_name(path).ends_with(ending)).collect()
}

/// Copies the libraries that a program is linked with, which are the C library's, to another root.
fn copy_libraries(program: &Path, other_root: &Path) {
    let output = run_command(Command::new("ldd").arg(program));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
    for path in paths.map(Path::new) {
        let copy = other_root.join(path.strip_prefix("/").expect("an absolute path"));
        fs::create_dir_all(copy.parent().expect("a directory")).expect("a directory");
        fs::copy(path, copy).expect("a library");
    }
    assert!(text.contains("libc.so"), "{text}");
}

#[test]
fn the_program_of_the_package_runs_with_nothing_but_the_c_library() {
    // Packages for other machines may be beside it.
    let ending = if cfg!(target_arch = "aarch64") { "_arm64.deb" } else { "_amd64.deb" };
    let packages = release_files(ending).into_iter();
    let newest = packages.max_by_key(|path| path.metadata().and_then(|it| it.modified()).ok());
    let Some(package) = newest else {
        requirements::skip_test("a Debian package", "run make release PARTS=deb");
        return;
    };
    if !requirements::require_root() {
        return;
    }
    let there = tempfile::tempdir().expect("a temporary directory");
    let unpacked = run_command(Command::new("dpkg-deb").arg("-x").arg(&package).arg(there.path()));
    assert!(unpacked.status.success(), "{unpacked:?}");
    copy_libraries(&there.path().join("usr/bin/flotilla"), there.path());
    let run = |program: &str, argument: &str| {
        let mut command = Command::new("chroot");
        let output = run_command(command.arg(there.path()).args([program, argument]));
        assert!(output.status.success(), "{program} {argument}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    for (program, start) in
        [("/usr/bin/flotilla", "flotilla "), ("/usr/lib/flotilla/nats-server", "nats-server: v2.")]
    {
        let version = run(program, "--version");
        assert!(version.starts_with(start), "{version}");
    }
    assert!(run("/usr/bin/flotilla", "topics").lines().count() > 10);
    for [_, destination, _] in assets(&metadata()) {
        let place = there.path().join(&destination);
        let is_there = match destination.strip_suffix('/') {
            Some(_) => Path::read_dir(&place).is_ok_and(|mut entries| entries.next().is_some()),
            None => place.metadata().is_ok_and(|about| about.len() > 0),
        };
        assert!(is_there, "{destination} is not in the package");
    }
}

/// Returns the crates that the program is linked with, and the macros that it is built with, as
/// `name version`.
fn linked_crates() -> BTreeSet<String> {
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--package=flotilla", "--edges=no-build,no-dev", "--prefix=none"]);
    let output = run_command(tree.args(["--locked", "--offline"]).current_dir(root()));
    assert!(output.status.success(), "{}", output_text(&output));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = printed.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>());
    words.map(|words| words.join(" ").replace(" v", " ")).collect()
}

/// Returns all crates of Cargo.lock, as `name version`.
fn locked_crates() -> BTreeSet<String> {
    let lock: toml::Table = read_file("Cargo.lock").parse().expect("TOML");
    let packages = lock["package"].as_array().expect("packages").iter();
    let text = |it: &toml::Value, key: &str| it[key].as_str().expect("a text").to_owned();
    packages.map(|it| format!("{} {}", text(it, "name"), text(it, "version"))).collect()
}

#[test]
fn the_bill_of_materials_is_cyclonedx_and_lists_the_crates_of_the_program() {
    let modified = |path: &Path| path.metadata().and_then(|about| about.modified()).ok();
    let lock = modified(&root().join("Cargo.lock"));
    let mut bills = release_files("sbom.cdx.json");
    // Not one of older crates.
    bills.retain(|path| modified(path) >= lock);
    let Some(path) = bills.pop() else {
        requirements::skip_test("a bill of materials", "run make release");
        return;
    };
    let bill = fs::read(path).expect("a file");
    let bill: Value = serde_json::from_slice(&bill).expect("JSON");
    assert_eq!(bill["bomFormat"], "CycloneDX");
    assert_eq!(bill["specVersion"], "1.5");
    assert!(bill["version"].as_u64().is_some_and(|version| version >= 1));
    assert!(bill["serialNumber"].as_str().is_none_or(|it| it.starts_with("urn:uuid:")));

    let text =
        |it: &Value, key: &str| it[key].as_str().unwrap_or_else(|| panic!("{it}")).to_owned();
    let own = &bill["metadata"]["component"];
    assert_eq!(text(own, "name"), "flotilla");
    let (mut references, mut listed) = (BTreeSet::new(), BTreeSet::new());
    for component in bill["components"].as_array().expect("components").iter().chain([own]) {
        assert!(["application", "library"].contains(&text(component, "type").as_str()));
        assert!(references.insert(text(component, "bom-ref")), "listed twice: {component}");
        assert!(text(component, "purl").starts_with("pkg:cargo/"), "{component}");
        listed.insert(format!("{} {}", text(component, "name"), text(component, "version")));
    }
    for dependency in bill["dependencies"].as_array().expect("dependencies") {
        assert!(references.contains(&text(dependency, "ref")), "{dependency}");
        for on in dependency["dependsOn"].as_array().into_iter().flatten() {
            assert!(references.contains(on.as_str().expect("a text")), "{on}");
        }
    }
    let linked = linked_crates();
    assert!(linked.len() > 200, "these are not all: {}", linked.len());
    assert_eq!(linked.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(listed.difference(&locked_crates()).collect::<Vec<_>>(), Vec::<&String>::new());
}
