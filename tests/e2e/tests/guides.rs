//! What the book tells people to type, typed.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use e2e::{
    Host, Lan, Python,
    pages::{Block, blocks},
    until,
};
use s3_server::S3Server;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);
/// What is said in a terminal that stays, once it works.
const READY: [&str; 4] =
    ["the fleet is up", "joined the fleet", "Server is ready", "the gateway answers gRPC calls"];

/// Where the program, its nats-server and other tools are.
fn tools() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a root");
    let beside = e2e::binary().parent().expect("a directory").to_owned();
    vec![beside, root.join(".tools")]
}

fn path(first: &[PathBuf]) -> String {
    let own = std::env::var("PATH").unwrap_or_default();
    let all = first.iter().map(|path| path.display().to_string()).chain([own]);
    all.collect::<Vec<_>>().join(":")
}

#[test]
fn guides_for_one_box_do_what_they_say() {
    for (page, told) in [
        ("STRIX-HALO.md", ["Strix Halo, 128 GB", "3 prompts"]),
        ("MI50.md", ["MI50, 32 GB", "fits"]),
        ("HALO-FORGE.md", ["used raft.num_cycles", "cycles: 6"]),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut said = String::new();
        for block in blocks(page) {
            match block {
                Block::File { name, text } => fs::write(directory.path().join(name), text).unwrap(),
                Block::Run { script, .. } => {
                    let output = Command::new("bash")
                        .args(["-euo", "pipefail", "-c", &script])
                        .current_dir(directory.path())
                        .env("PATH", path(&tools()))
                        .output()
                        .unwrap();
                    said += &String::from_utf8_lossy(&[output.stdout, output.stderr].concat());
                    assert!(output.status.success(), "{page}: {script}{said}");
                }
            }
        }
        for words in told {
            assert!(said.contains(words), "{page}: no {words:?} in {said}");
        }
        assert!(!said.contains("unknown"), "{page}: {said}");
    }
}

/// The tutorial's hosts, and whoever types.
struct Town {
    lan: Lan,
    s3: S3Server,
    /// The line that lets boxes in, once it was printed.
    token: String,
    open: Vec<(String, Child)>,
    path: String,
    directory: TempDir,
}

impl Town {
    fn found() -> Option<Self> {
        let python = Python::with_aws()?;
        let directory = tempfile::tempdir().expect("a directory");
        let hosts = ["laptop", "box-2", "box-3", "nats-1", "nats-2", "nats-3"];
        let lan = Lan::of(&hosts, directory.path())?;
        let s3 = S3Server::start_on(lan.here()).expect("an S3 server");
        let own = directory.path().join("bin");
        fs::create_dir(&own).expect("a directory");
        // There is no sshd on these hosts; what is copied arrives all the same.
        let copy = "#!/bin/bash\nset -eu\nto=${@: -1}\nset -- \"${@:1:$#-1}\"\nshift\n\
                    cp -rp \"$@\" \"$TOWN/${to%%:*}/${to#*:}\"\n";
        let scp = own.join("scp");
        fs::write(&scp, copy).expect("a script");
        fs::set_permissions(&scp, fs::Permissions::from_mode(0o755)).expect("a mode");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let deploy = root.canonicalize().expect("a root").join("deploy");
        std::os::unix::fs::symlink(deploy, lan.on("laptop").home().join("deploy")).expect("a link");
        let aws = python.program("aws").get_program().to_owned();
        let aws = Path::new(&aws).parent().expect("a directory").to_owned();
        let path = path(&[vec![own, aws], tools()].concat());
        Some(Self { lan, s3, token: String::new(), open: Vec::new(), path, directory })
    }

    fn prepare(&self, host: &Host, script: &str, command: &mut Command) {
        command.args(["-euo", "pipefail", "-c", script]).env("PATH", &self.path);
        command.env("TOWN", self.directory.path()).env("FLOTILLA_TOKEN", &self.token);
        for name in ["FLOTILLA_DIR", "FLOTILLA_NATS"] {
            command.env_remove(name);
        }
        if host.home().ends_with("laptop") {
            command.envs(self.s3.env()).env("AWS_ALLOW_HTTP", "true");
            command.env("AWS_ENDPOINT_URL", &self.s3.env()["AWS_ENDPOINT"]);
        }
    }

    /// Types it, and waits for its end.
    fn run(&mut self, host: &str, script: &str) -> String {
        let began = Instant::now();
        let on = self.lan.on(host);
        let mut command = on.command("bash");
        self.prepare(on, script, &mut command);
        let output = command.stdin(Stdio::null()).output().expect("bash");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let told = String::from_utf8_lossy(&output.stderr);
        let typed = script.trim().replace('\n', "\n$ ");
        println!("{host} $ {typed}\n{said}{told}({:.1?})\n", began.elapsed());
        assert!(output.status.success(), "{host}: {}\n{}", output.status, self.logs());
        if let Some(token) = said.lines().find(|line| line.starts_with("flotilla1.")) {
            self.token = token.to_owned();
        }
        said
    }

    /// Types it into a terminal that stays, and waits until it works.
    fn stay(&mut self, host: &str, script: &str) {
        println!("{host} $ {}\n", script.trim());
        let on = self.lan.on(host);
        let said = self.directory.path().join(format!("{host}-{}.said", self.open.len()));
        let started = on.start(|command| self.prepare(on, script, command), &said);
        self.open.push((host.to_owned(), started.expect("bash")));
        until(&format!("{host}: {script}"), LIMIT, || {
            let said = fs::read_to_string(&said).ok()?;
            READY.iter().any(|words| said.contains(words)).then_some(())
        });
    }

    fn logs(&self) -> String {
        let mut logs = String::new();
        for entry in fs::read_dir(self.directory.path()).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|it| it == "said") {
                let text = fs::read_to_string(entry.path()).unwrap_or_default();
                let end: Vec<&str> = text.lines().rev().take(20).collect();
                let end: Vec<&str> = end.into_iter().rev().collect();
                logs += &format!("{}:\n{}\n", entry.path().display(), end.join("\n"));
            }
        }
        logs
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        let _ = std::io::stdout().flush();
        for (_, terminal) in &mut self.open {
            let _ = terminal.kill();
            let _ = terminal.wait();
        }
    }
}

#[test]
fn the_tutorial_goes_from_one_laptop_to_a_cluster() {
    let Some(mut town) = Town::found() else { return };
    let mut said = Vec::new();
    for block in blocks("TUTORIAL.md") {
        match block {
            Block::Run { host, stays: true, script } => town.stay(&host, &script),
            Block::Run { host, script, .. } => said.push(town.run(&host, &script)),
            Block::File { name, .. } => panic!("{name} is nobody's"),
        }
    }
    let said = said.concat();
    for words in ["adapter_model.safetensors", "box-2", "box-3", "raft-2"] {
        assert!(said.contains(words), "no {words:?} was seen");
    }
    // The files went to the bucket, and the boxes asked it themselves, without its key.
    assert!(town.s3.requests().iter().any(|request| request.starts_with("GET ")));
}
