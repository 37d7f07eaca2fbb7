//! Honest programs find what they need, in a room of their own.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use requirements::{require_program, require_system_program};
use sandbox::{
    CellLaunch, ConnectedProgram, PathVisibility, ProgramEnd, ProgramLimits, ProgramResult,
    Sandbox, SandboxCell, SandboxLayer, SandboxProgram,
};

fn launch() -> CellLaunch {
    CellLaunch { program: env!("CARGO_BIN_EXE_sandbox-cell").into(), arguments: Vec::new() }
}

fn cell(policy: PathVisibility) -> SandboxCell {
    Sandbox::open(launch(), policy).unwrap().start_cell().unwrap()
}

fn program(argv: &[&str]) -> SandboxProgram {
    SandboxProgram {
        argv: argv.iter().map(|&part| part.to_owned()).collect(),
        ..SandboxProgram::default()
    }
}

/// Returns limits that a slow host meets as well.
fn limits() -> ProgramLimits {
    ProgramLimits { wall: Duration::from_secs(60), ..ProgramLimits::default() }
}

fn text(ended: &ProgramResult) -> String {
    let ProgramResult { how, stdout, stderr, .. } = ended;
    let (stdout, stderr) = (String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr));
    format!("{how:?} {stdout}{stderr}")
}

/// Returns the output of a shell script in a new room.
fn shell(cell: &mut SandboxCell, script: &str) -> String {
    let mut room = cell.create_room::<&str, &[u8]>(&[]).unwrap();
    text(&room.run(&program(&["sh", "-c", script]), &limits()).unwrap())
}

const BUSY: &str = r#"
import multiprocessing, os, pathlib, subprocess, sys, tempfile, threading

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.Pool(3) as pool:
        print(sum(pool.map(square, range(10))))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(sum(pool.map(square, range(10))))
    found = []
    threads = [threading.Thread(target=lambda: found.append(1)) for _ in range(20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(len(found))
    print(subprocess.run(["sh", "-c", "echo from a child | cat"], capture_output=True, text=True).stdout.strip())
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("x"); file.flush()
        print(pathlib.Path(file.name).read_text())
    print(os.getcwd(), pathlib.Path.home(), os.cpu_count() > 0, sys.stdin.read())
"#;

#[test]
fn python_has_processes_threads_children_and_files() {
    if require_system_program("python3").is_none() {
        return;
    }
    let mut cell = cell(PathVisibility::default());
    let mut room = cell.create_room(&[("busy.py", BUSY)]).unwrap();
    let busy = SandboxProgram { stdin: b"input".to_vec(), ..program(&["python3", "busy.py"]) };
    let said = text(&room.run(&busy, &limits()).unwrap());
    let wanted = "Exited(0) 285\n285\n20\nfrom a child\nx\n/room/work /room/work True input\n";
    assert_eq!(said, wanted);
}

#[test]
fn a_compiler_compiles_and_its_product_runs_with_each_input() {
    if require_system_program("gcc").is_none() {
        return;
    }
    let mut cell = cell(PathVisibility::default());
    let source =
        "#include <stdio.h>\nint main(void) { int n; scanf(\"%d\", &n); printf(\"%d\", 2 * n); }";
    let mut room = cell.create_room(&[("src/double.c", source)]).unwrap();
    let gcc = program(&["gcc", "-O2", "-o", "double", "src/double.c"]);
    let compiled = room.run(&gcc, &limits()).unwrap();
    assert_eq!(compiled.how, ProgramEnd::Exited(0), "{}", text(&compiled));
    for number in [1, 21] {
        let run = SandboxProgram { stdin: number.to_string().into(), ..program(&["./double"]) };
        assert_eq!(text(&room.run(&run, &limits()).unwrap()), format!("Exited(0) {}", 2 * number));
    }
}

#[test]
fn a_toolchain_elsewhere_is_shown_where_it_is() {
    if require_program("rustc").is_none() || require_system_program("cc").is_none() {
        return;
    }
    let sysroot = rust_sysroot();
    let rustc = sysroot.join("bin/rustc");
    let mut cell = cell(PathVisibility { read_only: vec![sysroot], hidden: Vec::new() });
    let source = "fn main() { println!(\"{}\", std::env::args().count()); }";
    let mut room = cell.create_room(&[("main.rs", source)]).unwrap();
    let compiled = room.run(&program(&[rustc.to_str().unwrap(), "main.rs"]), &limits()).unwrap();
    assert_eq!(compiled.how, ProgramEnd::Exited(0), "{}", text(&compiled));
    let ended = room.run(&program(&["./main", "a", "b"]), &limits()).unwrap();
    assert_eq!(text(&ended), "Exited(0) 3\n");
}

fn rust_sysroot() -> PathBuf {
    let output = std::process::Command::new("rustc").args(["--print", "sysroot"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().into()
}

#[test]
fn what_is_hidden_is_not_seen_even_below_what_is_shown() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir(path("agent")).unwrap();
    for file in ["tool", "key", "agent/key"] {
        std::fs::write(path(file), "content of it").unwrap();
    }
    let hidden = vec![path("agent"), path("key"), path("not there")];
    let read_only = vec![directory.path().to_owned()];
    let mut sandbox = cell(PathVisibility { read_only, hidden: hidden.clone() });
    let at = directory.path().display();
    let said = shell(
        &mut sandbox,
        &format!("cat {at}/tool; ls -A {at}/agent; cat {at}/key {at}/agent/key"),
    );
    assert_eq!(said.matches("content of it").count(), 1, "{said}");
    assert!(shell(&mut sandbox, &format!("echo x > {at}/tool")).contains("Read-only"));
    // Showing and hiding the same path is an error.
    let unfit =
        Sandbox::open(launch(), PathVisibility { read_only: vec![path("agent/key")], hidden });
    let unfit = unfit.unwrap_err();
    assert_eq!(unfit.layer, SandboxLayer::View);
    assert!(unfit.problem.contains("which is hidden"), "{unfit}");
}

#[test]
fn a_box_that_cannot_says_which_layer_and_what_to_do() {
    let missing = PathVisibility { read_only: vec!["/not/there".into()], hidden: Vec::new() };
    let unfit = Sandbox::open(launch(), missing).unwrap_err().to_string();
    assert!(unfit.contains("read-only view: /not/there: "), "{unfit}");
    // A program that is no cell does not answer as one.
    let launch = CellLaunch { program: "/bin/true".into(), arguments: Vec::new() };
    let unfit = Sandbox::open(launch, PathVisibility::default()).unwrap_err();
    assert_eq!(unfit.layer, SandboxLayer::Cell, "{unfit}");
}

#[test]
fn a_program_that_is_not_there_is_no_failure_of_the_sandbox() {
    let mut cell = cell(PathVisibility::default());
    let mut room = cell.create_room::<&str, &[u8]>(&[]).unwrap();
    for argv in [&["no-such-tool"][..], &["./missing"], &["/room"], &[]] {
        let ended = room.run(&program(argv), &limits()).unwrap();
        assert!(matches!(ended.how, ProgramEnd::NotStarted(_)), "{argv:?}: {ended:?}");
    }
    assert_eq!(room.run(&program(&["true"]), &limits()).unwrap().how, ProgramEnd::Exited(0));
}

#[test]
fn files_outside_the_room_are_refused_and_the_cell_goes_on() {
    let mut cell = cell(PathVisibility::default());
    for path in ["../x", "/etc/x", "a/../../x", ""] {
        assert!(cell.create_room(&[(path, "x")]).is_err(), "{path}");
    }
    assert!(shell(&mut cell, "ls -A").starts_with("Exited(0)"));
}

#[test]
fn a_room_keeps_files_for_its_own_programs_only() {
    let mut cell = cell(PathVisibility::default());
    let mut room = cell.create_room(&[("a/given", "x")]).unwrap();
    let write = program(&["sh", "-c", "echo y > kept; touch /tmp/kept /dev/shm/kept"]);
    assert_eq!(room.run(&write, &limits()).unwrap().how, ProgramEnd::Exited(0));
    let list = program(&["sh", "-c", "ls a; cat kept; ls /tmp /dev/shm/"]);
    let said = text(&room.run(&list, &limits()).unwrap());
    assert!(
        said.starts_with("Exited(0) given\ny\n") && said.matches("kept").count() == 2,
        "{said}"
    );
    assert!(!shell(&mut cell, "ls -AR /room /tmp/ /dev/shm/").contains("kept"));
}

#[test]
fn an_input_that_nobody_reads_and_one_that_is_long_are_both_fine() {
    let mut cell = cell(PathVisibility::default());
    let mut room = cell.create_room::<&str, &[u8]>(&[]).unwrap();
    let stdin = vec![b'x'; 8 << 20];
    let ignoring = SandboxProgram { stdin: stdin.clone(), ..program(&["true"]) };
    assert_eq!(room.run(&ignoring, &limits()).unwrap().how, ProgramEnd::Exited(0));
    let counting = SandboxProgram { stdin, ..program(&["wc", "-c"]) };
    assert_eq!(text(&room.run(&counting, &limits()).unwrap()), format!("Exited(0) {}\n", 8 << 20));
}

#[test]
fn a_pipe_that_nobody_reads_ends_its_writer() {
    let mut cell = cell(PathVisibility::default());
    assert_eq!(shell(&mut cell, "yes | head -n 1; kill -TERM $$"), "Signalled(15) y\n");
}

#[test]
fn dropping_a_cell_ends_what_it_runs() {
    let sandbox = Sandbox::open(launch(), PathVisibility::default()).unwrap();
    let marker = format!("{}.5", 7_000_000 + std::process::id());
    let mut cell = sandbox.start_cell().unwrap();
    let began = Instant::now();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            let mut room = cell.create_room::<&str, &[u8]>(&[]).unwrap();
            room.run(&program(&["sleep", &marker]), &limits())
        });
        let cell = await_process(&marker, true).unwrap();
        // The outer process of the cell is three above the program.
        let outer = (0..3).fold(cell, |pid, _| parent(pid));
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(outer).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
        assert!(running.join().unwrap().is_err());
    });
    assert_eq!(await_process(&marker, false), None);
    assert!(began.elapsed() < Duration::from_secs(30));
}

/// Starts a connected program in a sandbox of its own.
fn connect(argv: &[&str], limits: &ProgramLimits) -> ConnectedProgram {
    let sandbox = Sandbox::open(launch(), PathVisibility::default()).unwrap();
    sandbox.connect_program(&program(argv), limits).unwrap()
}

/// Waits for the end of a connected program and returns its exit code and stderr.
fn end_of(mut connected: ConnectedProgram) -> (Option<i32>, String) {
    let mut stderr = String::new();
    connected.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    (connected.child.wait().unwrap().code(), stderr)
}

#[test]
fn a_connected_program_answers_until_its_holder_closes_the_pipe() {
    let script = "while read -r line; do echo \"$line $(id -u)\"; done";
    let mut connected = connect(&["sh", "-c", script], &ProgramLimits::default());
    let mut stdin = connected.child.stdin.take().unwrap();
    let mut answers = BufReader::new(connected.child.stdout.take().unwrap()).lines();
    for number in 0..20 {
        writeln!(stdin, "{number}").unwrap();
        assert_eq!(answers.next().unwrap().unwrap(), format!("{number} 1000"));
    }
    drop(stdin);
    assert!(answers.next().is_none());
    assert_eq!(end_of(connected).0, Some(0));
}

#[test]
fn the_end_of_a_connected_program_is_in_its_exit_code_and_stderr() {
    let limits = ProgramLimits { memory_bytes: 64 << 20, ..ProgramLimits::default() };
    for (argv, code, expected) in [
        (&["sh", "-c", "echo oops >&2; exit 3"][..], 3, "oops"),
        (&["sh", "-c", "kill -9 $$"], 137, ""),
        (&["no-such-tool"], 127, "it cannot be started in the sandbox"),
        (&["sh", "-c", "setsid sleep 600 & exit 0"], 0, ""),
    ] {
        let (ended, stderr) = end_of(connect(argv, &limits));
        assert!(ended == Some(code) && stderr.contains(expected), "{argv:?}: {ended:?} {stderr}");
    }
    if require_system_program("python3").is_none() {
        return;
    }
    let grow = "import time\nx = b\"x\" * (100 << 20)\ntime.sleep(600)";
    let (ended, stderr) = end_of(connect(&["python3", "-c", grow], &limits));
    assert!(ended == Some(125) && stderr.contains("more than 64 MiB of memory"), "{stderr}");
}

#[test]
fn killing_the_group_of_a_connected_program_ends_all_that_it_started() {
    let marker = format!("{}.25", 7_000_000 + std::process::id());
    let script = format!("setsid sleep {marker} & read -r line");
    let mut connected = connect(&["sh", "-c", &script], &ProgramLimits::default());
    assert!(await_process(&marker, true).is_some());
    let group = rustix::process::Pid::from_child(&connected.child);
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    connected.child.wait().unwrap();
    assert_eq!(await_process(&marker, false), None);
}

/// Waits until a process with this argument exists, or no longer exists.
fn await_process(argument: &str, there: bool) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let found = std::fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).ok()?;
            let is = line.split(|byte| *byte == 0).eq(["sleep", argument, ""].map(str::as_bytes));
            is.then(|| entry.file_name().to_str()?.parse().ok()).flatten()
        });
        if found.is_some() == there || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn parent(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let stat = stat.unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn an_attack_in_one_cell_is_not_felt_in_another() {
    if require_system_program("python3").is_none() {
        return;
    }
    let sandbox = Sandbox::open(launch(), PathVisibility::default()).unwrap();
    let (mut one, mut other) = (sandbox.start_cell().unwrap(), sandbox.start_cell().unwrap());
    let bomb = include_str!("attacks/fork_bomb.py");
    std::thread::scope(|scope| {
        let attack = scope.spawn(|| {
            let mut room = one.create_room(&[("bomb.py", bomb)]).unwrap();
            let limits = ProgramLimits { wall: Duration::from_secs(2), ..limits() };
            room.run(&program(&["python3", "bomb.py"]), &limits).unwrap().how
        });
        while !attack.is_finished() {
            let mut room =
                other.create_room(&[("fork.py", "import os\nos.fork()\nprint(1)")]).unwrap();
            let said = text(&room.run(&program(&["python3", "fork.py"]), &limits()).unwrap());
            assert!(said.starts_with("Exited(0) 1\n"), "{said}");
        }
        assert_eq!(attack.join().unwrap(), ProgramEnd::TimedOut);
    });
}
