//! Hosts that are broken, unreliable, too small or unfit. Their jobs go to other agents, and users
//! see why.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use e2e::{Fleet, Member, SpecFiles, wait_until, write_executable, write_script};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(120);

/// Makes the trainings of the first agent that trains fail, and no others.
struct BadHost {
    directory: PathBuf,
}

impl BadHost {
    fn create(directory: &Path, fault: &str) -> Self {
        let script = format!(
            "case \"$*\" in *\"worker train\"*) ;; *) exec \"$@\" ;; esac\n\
             cd {here} || exit 1\n\
             [ -e bad ] || echo $PPID >bad\n\
             [ \"$(cat bad)\" = $PPID ] || exec \"$@\"\n\
             echo tried >>tries\n\
             {fault}",
            here = directory.display(),
        );
        write_script(&directory.join("wrapper"), &script);
        Self { directory: directory.to_owned() }
    }

    fn env(&self) -> (String, String) {
        let wrapper = self.directory.join("wrapper").display().to_string();
        ("FLOTILLA_WORKER_WRAPPER".to_owned(), wrapper)
    }

    fn tries(&self) -> usize {
        let tries = std::fs::read_to_string(self.directory.join("tries")).unwrap_or_default();
        tries.lines().count()
    }
}

fn agents(fleet: &Fleet) -> Vec<Value> {
    let listed = fleet.run_json(&["agents", "list"]).expect("agents");
    listed.as_array().expect("a list").clone()
}

/// Waits for an agent that matches, and returns it.
fn await_agent(fleet: &Fleet, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    wait_until(what, LIMIT, || agents(fleet).into_iter().find(|agent| holds(agent)))
}

fn trouble_of(agent: &Value) -> &str {
    agent["trouble"].as_str().unwrap_or_default()
}

fn failures(run: &Value) -> &[Value] {
    run["failures"].as_array().map_or(&[], Vec::as_slice)
}

/// Starts another trainer.
fn start_trainer(fleet: &Fleet, name: &str, arguments: &[&str]) -> Member {
    let nats = fleet.nats_url();
    let home = fleet.path().join(name).display().to_string();
    let fixed = ["agent", "--nats", &nats, "--name", name, "--agent-dir", &home];
    let checks = ("FLOTILLA_HOST_CHECK_EVERY".to_owned(), "1".to_owned());
    Member::start(name, &[], &[&fixed[..], arguments].concat(), [checks], fleet.path())
}

fn trained_by(fleet: &Fleet, run: &str) -> Value {
    let listed = fleet.run_json(&["checkpoint", "list", run]).expect("checkpoints");
    let last = listed.as_array().and_then(|all| all.last()).expect("a last one");
    last["checkpoint"]["agent"].clone()
}

#[test]
fn a_host_with_nil_address_faults_is_quarantined_and_another_trains() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let fault = "echo 'Memory access fault by GPU node-1 (Agent handle: 0x5) on address (nil). \
                Reason: Page not present or supervisor privilege.' >&2; kill -ABRT $$";
    let bad = BadHost::create(directory.path(), fault);
    let fleet = Fleet::start_with("trainer=2,evaluator", &[], [bad.env()]);
    let files = SpecFiles::create(fleet.path());
    let ended = fleet.await_success(&fleet.submit(&files.write_sft_spec(5, 0)), LIMIT);
    let first = &failures(&ended)[0];
    let message = first["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("isa_mismatch_fault") && message.contains("HSA_OVERRIDE"),
        "{first:#}"
    );
    assert_eq!(first["cause"], "SURROUNDINGS", "no fault of the run's");
    assert_eq!(failures(&ended).len(), 1, "{ended:#}");
    let quarantined = await_agent(&fleet, "a quarantine", |agent| agent["state"] == "QUARANTINED");
    assert!(trouble_of(&quarantined).contains("isa_mismatch_fault"), "{quarantined:#}");

    for _ in 0..3 {
        let run = fleet.submit(&files.write_sft_spec(5, 0));
        let ended = fleet.await_success(&run, LIMIT);
        assert_eq!(failures(&ended).len(), 0, "{ended:#}");
        assert_ne!(trained_by(&fleet, &run), quarantined["agent"]);
    }
    assert_eq!(bad.tries(), 1);
}

#[test]
fn a_host_that_hangs_twice_is_quarantined_and_another_takes_over() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let bad = BadHost::create(directory.path(), "exec sleep 100000");
    let silence = ("FLOTILLA_WORKER_SILENCE".to_owned(), "2".to_owned());
    let fleet =
        Fleet::start_with("trainer,evaluator", &["--open", "--lease", "30"], [bad.env(), silence]);
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(5, 0));
    let suspect = await_agent(&fleet, "a quarantine", |agent| agent["state"] == "QUARANTINED");
    assert!(trouble_of(&suspect).contains("hang 2 times on this box"), "{suspect:#}");
    assert_eq!(bad.tries(), 2, "it was given one more try");

    let _other = start_trainer(&fleet, "other", &["--roles", "trainer"]);
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(trained_by(&fleet, &run), "other");
    assert_eq!(failures(&ended).len(), 2, "{ended:#}");
    assert_eq!(bad.tries(), 2);
}

#[test]
fn the_kernel_log_explains_why_a_worker_died() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let root = directory.path().join("root");
    let before = "4,1,1,-;amdgpu: GPU reset begin!\n";
    let log = write(&root, "dev/kmsg", before).display().to_string();
    let fault = format!("echo '4,2,2,-;Out of memory: Killed process 7 (python3)' >>{log}; exit 1");
    let bad = BadHost::create(directory.path(), &fault);
    let sysroot = ("FLOTILLA_SYSROOT".to_owned(), root.display().to_string());
    let fleet = Fleet::start_with("trainer=2,evaluator", &[], [bad.env(), sysroot]);
    let files = SpecFiles::create(fleet.path());
    let ended = fleet.await_success(&fleet.submit(&files.write_sft_spec(5, 0)), LIMIT);
    let message = failures(&ended)[0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("[oom_host: "), "{message}");
}

#[test]
fn a_training_that_fits_nowhere_waits_for_a_larger_host() {
    let small = ("FLOTILLA_TRAINING_GIB".to_owned(), "0.25".to_owned());
    let fleet = Fleet::start_with("trainer,evaluator", &["--open"], [small]);
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(5, 0));
    let waits =
        await_agent(&fleet, "no room", |agent| trouble_of(agent).contains("no trainer has room"));
    assert_eq!(waits["jobs"][0]["waits"], true, "{waits:#}");
    let shown = fleet.run_json(&["run", "show", &run]).expect("the run");
    let message = failures(&shown)[0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("it needs 0.") && message.contains("0.3 GB are free"), "{message}");
    assert_eq!(failures(&shown)[0]["cause"], "SURROUNDINGS");

    let _smaller =
        start_trainer(&fleet, "smaller", &["--roles", "trainer", "--training-gib", "0.125"]);
    let _larger = start_trainer(&fleet, "larger", &["--roles", "trainer", "--training-gib", "4"]);
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(trained_by(&fleet, &run), "larger");
    assert_eq!(failures(&ended).len(), 1, "said once: {ended:#}");
    await_agent(&fleet, "all is well", |agent| {
        agent["agent"] == waits["agent"] && trouble_of(agent).is_empty()
    });
}

/// Creates the files of a host with a gfx1151 GPU and faulty firmware, and a Python with torch.
fn write_strix_halo(root: &Path) -> (PathBuf, PathBuf) {
    let write = |path: &str, text: &str| write(root, path, text);
    let node = "simd_count 80\ngfx_target_version 110501\nvendor_id 4098\ndevice_id 5510\n\
                location_id 49408\ndrm_render_minor 128\ncwsr_size 30699520\n";
    write("sys/class/kfd/kfd/topology/nodes/1/properties", node);
    write("sys/module/amdgpu/version", "6.16.13\n");
    let device = "sys/class/drm/renderD128/device";
    write(&format!("{device}/mem_info_vram_total"), "536870912\n");
    write(&format!("{device}/mem_info_gtt_total"), "107374182400\n");
    write("proc/sys/kernel/osrelease", "6.18.9-generic\n");
    write("proc/meminfo", "MemTotal: 130000000 kB\nMemAvailable: 120000000 kB\n");
    write("dev/kfd", "");
    write("dev/dri/renderD128", "");
    let firmware = write(&format!("{device}/fw_version/mes_fw_version"), "0x00000083\n");

    (firmware, write_python(root, ""))
}

/// Creates files that look like a Python environment with torch.
fn write_python(root: &Path, script: &str) -> PathBuf {
    let write = |path: &str, text: &str| write(root, path, text);
    let python = write("venv/bin/python", "");
    write_executable(&python, script);
    write("venv/pyvenv.cfg", "version = 3.12.3\n");
    let site = "venv/lib/python3.12/site-packages";
    write(&format!("{site}/torch/version.py"), "__version__ = '2.11.0+rocm7.13'\nhip = '7.13'\n");
    write(&format!("{site}/torch/lib/libamdhip64.so"), "");
    write(&format!("{site}/torch/lib/rocblas/library/TensileLibrary_gfx1151.dat"), "");
    for package in ["torch-2.11.0", "transformers-5.0.0", "peft-0.19.0", "accelerate-1.12.0"] {
        write(&format!("{site}/{package}.dist-info/METADATA"), "");
    }
    python
}

fn write(root: &Path, path: &str, text: &str) -> PathBuf {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(&path, text).expect("a file");
    path
}

#[test]
fn a_role_that_the_doctor_forbids_is_withheld_until_the_host_is_repaired() {
    let fleet = Fleet::start_open("verifier");
    let root = fleet.path().join("halo");
    let (firmware, python) = write_strix_halo(&root);
    let (root, python) = (root.display().to_string(), python.display().to_string());
    let fixed = ["--roles", "trainer,verifier", "--sysroot", &root, "--python", &python];
    let _halo = start_trainer(&fleet, "halo", &fixed);
    let ignoring = [&fixed[..], &["--ignore-doctor", "C-20,C-28"]].concat();
    let _careless = start_trainer(&fleet, "careless", &ignoring);
    let bare = write(fleet.path(), "bare/bin/python", "").display().to_string();
    let torchless = ["--roles", "trainer,verifier", "--trainer-engine", "pytorch"];
    let _bare = start_trainer(&fleet, "bare", &[&torchless[..], &["--python", &bare]].concat());

    let named = |name: &'static str| move |agent: &Value| agent["agent"] == name;
    let halo = await_agent(&fleet, "the agent", named("halo"));
    assert_eq!(halo["roles"], serde_json::json!(["verifier"]), "{halo:#}");
    let withheld = &halo["withheld"][0];
    assert_eq!((&withheld["role"], &withheld["finding"]), (&"trainer".into(), &"C-28".into()));
    let remedy = withheld["remedy"].as_str().unwrap_or_default();
    assert!(remedy.contains("linux-firmware"), "{withheld:#}");
    let table = fleet.run(&["agents", "list"]).stdout;
    assert!(table.contains("trainer withheld"), "{table}");
    let careless = await_agent(&fleet, "the other", named("careless"));
    assert_eq!(careless["roles"], serde_json::json!(["trainer", "verifier"]), "{careless:#}");
    assert!(careless["engines"].to_string().contains("trainer: pytorch-2.11.0"), "{careless:#}");
    assert_eq!(careless["trainingBytes"], "106496000000", "{careless:#}");

    let bare = await_agent(&fleet, "the one without torch", named("bare"));
    assert_eq!(bare["withheld"][0]["finding"], "C-41", "{bare:#}");

    std::fs::write(firmware, "0x00000080\n").expect("a file");
    let well = await_agent(&fleet, "the role is taken up", |agent| {
        agent["agent"] == "halo" && agent["roles"] == serde_json::json!(["trainer", "verifier"])
    });
    assert_eq!(well["withheld"].as_array().map_or(0, Vec::len), 0, "{well:#}");
}

/// Passes the probe and runs out of memory in each training.
const OUT_OF_MEMORY: &str = r#"#!/bin/sh
IFS= read -r call
case "$call" in
*'"probe"'*)
    echo '{"call":1,"reply":{"torch":"2","hip":null,"transformers":"5","peft":"1","error":0.0}}' ;;
*)
    echo "$call" | sed 's/.*"halvings":\([0-9]*\).*/\1/' >>"$0.halvings"
    echo '{"call":1,"error":"OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB"}' ;;
esac
"#;

#[test]
fn a_host_that_runs_out_of_memory_halves_its_micro_batches_twice_and_then_another_trains() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let python = write_python(directory.path(), OUT_OF_MEMORY);
    let environment = [
        ("FLOTILLA_TRAINER_ENGINE".to_owned(), "pytorch".to_owned()),
        ("FLOTILLA_PYTHON".to_owned(), python.display().to_string()),
        ("FLOTILLA_PROFILE".to_owned(), "cpu".to_owned()),
    ];
    let fleet = Fleet::start_with("trainer,evaluator", &["--open"], environment);
    let files = SpecFiles::create(fleet.path());
    let run = fleet.submit(&files.write_sft_spec(5, 0));
    let small =
        await_agent(&fleet, "it is too large", |agent| trouble_of(agent).contains("oom_gpu"));
    let _larger = start_trainer(&fleet, "larger", &["--roles", "trainer"]);
    let ended = fleet.await_success(&run, LIMIT);
    assert_eq!(trained_by(&fleet, &run), "larger");
    let message = failures(&ended)[0]["message"].as_str().unwrap_or_default();
    assert!(message.contains("training.micro_batch_tokens"), "{message}");
    assert_ne!(small["state"], "QUARANTINED", "{small:#}");
    let halvings = python.with_file_name("python.halvings");
    let halvings = std::fs::read_to_string(halvings).expect("trainings were tried");
    assert_eq!(halvings.lines().take(3).collect::<Vec<_>>(), ["0", "1", "2"]);
    assert!(halvings.lines().skip(3).all(|times| times == "2"), "{halvings}");
}

#[test]
fn unknown_findings_are_refused_by_name() {
    let fleet = Fleet::start_open("verifier");
    let nats = fleet.nats_url();
    let home = fleet.path().join("x").display().to_string();
    let fixed = ["agent", "--nats", &nats, "--roles", "verifier", "--agent-dir", &home];
    let refused = |more: [&str; 2]| {
        let output = e2e::run_flotilla(&[&fixed[..], &more].concat(), []);
        assert_eq!(output.code, 1, "{}", output.stderr);
        output.stderr
    };
    assert!(refused(["--ignore-doctor", "mes"]).contains("such as C-28"));
    assert!(refused(["--training-gib", "0"]).contains("from 0.01 to"));
}
