//! Runs the commands of the guides in `docs/`.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use e2e::{
    Host, Lan, PythonEnv,
    pages::{Block, runnable_blocks},
    wait_until, write_executable,
};
use s3_server::S3Server;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);
/// Output of a terminal that stays open, as soon as its program is ready.
const READY: [&str; 4] =
    ["the fleet is up", "joined the fleet", "Server is ready", "the gateway answers gRPC calls"];

/// The directories of the program, its nats-server and other tools.
fn tools() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("a root");
    let beside = e2e::program_path().parent().expect("a directory").to_owned();
    vec![beside, root.join(".tools")]
}

fn path(first: &[PathBuf]) -> String {
    let own = std::env::var("PATH").unwrap_or_default();
    let all = first.iter().map(|path| path.display().to_string()).chain([own]);
    all.collect::<Vec<_>>().join(":")
}

#[test]
fn the_commands_of_the_single_host_guides_work() {
    for (page, expected) in [
        ("STRIX-HALO.md", ["Strix Halo, 128 GB", "3 prompts"]),
        ("MI50.md", ["MI50, 32 GB", "fits"]),
        ("MIGRATE.md", ["used load_in_4bit", "used raft.num_cycles: raft.cycles: 6"]),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut output_text = String::new();
        for block in runnable_blocks(page) {
            match block {
                Block::File { name, text } => fs::write(directory.path().join(name), text).unwrap(),
                Block::Run { script, .. } => {
                    let output = Command::new("bash")
                        .args(["-euo", "pipefail", "-c", &script])
                        .current_dir(directory.path())
                        .env("PATH", path(&tools()))
                        .output()
                        .unwrap();
                    output_text +=
                        &String::from_utf8_lossy(&[output.stdout, output.stderr].concat());
                    assert!(output.status.success(), "{page}: {script}{output_text}");
                }
            }
        }
        for words in expected {
            assert!(output_text.contains(words), "{page}: no {words:?} in {output_text}");
        }
        assert!(!output_text.contains("unknown"), "{page}: {output_text}");
    }
}

/// The hosts of the tutorial, with their open terminals.
struct TutorialHosts {
    lan: Lan,
    s3: S3Server,
    /// The join token, once it was printed.
    token: String,
    terminals: Vec<(String, Child)>,
    path: String,
    directory: TempDir,
}

impl TutorialHosts {
    fn create() -> Option<Self> {
        let python = PythonEnv::with_aws()?;
        let directory = tempfile::tempdir().expect("a directory");
        let hosts = ["laptop", "box-2", "box-3", "nats-1", "nats-2", "nats-3"];
        let lan = Lan::create(&hosts, directory.path())?;
        let s3 = S3Server::start_on(lan.local_address()).expect("an S3 server");
        let own = directory.path().join("bin");
        fs::create_dir(&own).expect("a directory");
        // These hosts have no sshd, so a script replaces scp.
        let copy = "#!/bin/bash\nset -eu\nto=${@: -1}\nset -- \"${@:1:$#-1}\"\nshift\n\
                    cp -rp \"$@\" \"$TOWN/${to%%:*}/${to#*:}\"\n";
        write_executable(&own.join("scp"), copy);
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let deploy = root.canonicalize().expect("a root").join("deploy");
        std::os::unix::fs::symlink(deploy, lan.host("laptop").home().join("deploy"))
            .expect("a link");
        let aws = python.command("aws").get_program().to_owned();
        let aws = Path::new(&aws).parent().expect("a directory").to_owned();
        let path = path(&[vec![own, aws], tools()].concat());
        Some(Self { lan, s3, token: String::new(), terminals: Vec::new(), path, directory })
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

    /// Runs a block on a host and waits for its end.
    fn run(&mut self, host: &str, script: &str) -> String {
        let began = Instant::now();
        let on = self.lan.host(host);
        let mut command = on.command("bash");
        self.prepare(on, script, &mut command);
        let output = command.stdin(Stdio::null()).output().expect("bash");
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let shown_script = script.trim().replace('\n', "\n$ ");
        println!("{host} $ {shown_script}\n{stdout}{stderr}({:.1?})\n", began.elapsed());
        assert!(output.status.success(), "{host}: {}\n{}", output.status, self.terminal_logs());
        if let Some(token) = stdout.lines().find(|line| line.starts_with("flotilla1.")) {
            self.token = token.to_owned();
        }
        stdout
    }

    /// Starts a block in a terminal that stays open, and waits until it is ready.
    fn start_terminal(&mut self, host: &str, script: &str) {
        println!("{host} $ {}\n", script.trim());
        let on = self.lan.host(host);
        let log = self.directory.path().join(format!("{host}-{}.said", self.terminals.len()));
        let started = on.start_script(|command| self.prepare(on, script, command), &log);
        self.terminals.push((host.to_owned(), started.expect("bash")));
        wait_until(&format!("{host}: {script}"), LIMIT, || {
            let log = fs::read_to_string(&log).ok()?;
            READY.iter().any(|words| log.contains(words)).then_some(())
        });
    }

    fn terminal_logs(&self) -> String {
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

impl Drop for TutorialHosts {
    fn drop(&mut self) {
        let _ = std::io::stdout().flush();
        for (_, terminal) in &mut self.terminals {
            let _ = terminal.kill();
            let _ = terminal.wait();
        }
    }
}

#[test]
fn the_tutorial_goes_from_one_laptop_to_a_cluster() {
    let Some(mut hosts) = TutorialHosts::create() else { return };
    let mut outputs = Vec::new();
    for block in runnable_blocks("TUTORIAL.md") {
        match block {
            Block::Run { host, stays_open: true, script } => hosts.start_terminal(&host, &script),
            Block::Run { host, script, .. } => outputs.push(hosts.run(&host, &script)),
            Block::File { name, .. } => panic!("{name} is for no host"),
        }
    }
    let outputs = outputs.concat();
    for words in ["adapter_model.safetensors", "box-2", "box-3", "raft-2"] {
        assert!(outputs.contains(words), "no {words:?} was seen");
    }
    // The agents requested files from the bucket directly, without its key.
    assert!(hosts.s3.requests().iter().any(|request| request.starts_with("GET ")));
}
