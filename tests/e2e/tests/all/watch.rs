//! Trainings by other programs, which an agent watches.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc,
    thread,
    time::Duration,
};

use e2e::{Fleet, Member, Random, SpecFiles, wait_until};
use rustix::process::Signal;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);

/// An output directory as the Hugging Face Trainer writes it with PEFT. It keeps four checkpoints.
struct FakeTrainer {
    out: PathBuf,
    base: PathBuf,
    steps: u32,
}

impl FakeTrainer {
    fn save(&self, step: u32, random: &mut Random) {
        let place = self.out.join(format!("checkpoint-{step}"));
        fs::create_dir_all(&place).unwrap();
        let pause =
            |random: &mut Random| thread::sleep(Duration::from_millis(random.next_u64() % 40));
        let weights: Vec<u8> = (0..4 * 32)
            .flat_map(|n| {
                (f32::from(u16::try_from(n % 7).unwrap()) * 1e-3 * step as f32).to_le_bytes()
            })
            .collect();
        let shapes = [("lora_A", vec![4, 32]), ("lora_B", vec![32, 4])];
        let views = (0..2).flat_map(|layer| {
            shapes.clone().map(|(half, shape)| {
                let name =
                    format!("base_model.model.model.layers.{layer}.self_attn.q_proj.{half}.weight");
                (name, TensorView::new(Dtype::F32, shape, &weights).unwrap())
            })
        });
        let temporary = place.join(".tmpWxYz12");
        File::create(&temporary).unwrap().set_len(5000).unwrap();
        pause(random);
        safetensors::serialize_to_file(views.collect::<Vec<_>>(), None, &temporary).unwrap();
        pause(random);
        fs::rename(temporary, place.join("adapter_model.safetensors")).unwrap();
        let settings = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8,
            "target_modules": ["q_proj"], "bias": "none",
            "base_model_name_or_path": self.base.display().to_string(),
        });
        write(&place.join("adapter_config.json"), settings.to_string().as_bytes());
        pause(random);
        let mut zip = b"PK\x03\x04weights of an optimizerPK\x05\x06".to_vec();
        zip.extend([0; 18]);
        for name in ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"] {
            write(&place.join(name), &zip);
            pause(random);
        }
        let history: Vec<Value> = (1..=step / 10)
            .map(|n| json!({ "step": n * 10, "loss": 4.0 - f64::from(n) / 10.0, "learning_rate": 1e-4 }))
            .collect();
        let state = json!({ "global_step": step, "max_steps": self.steps, "log_history": history });
        write(&place.join("trainer_state.json"), state.to_string().as_bytes());
        thread::sleep(Duration::from_millis(2));
        if step > 40 {
            fs::remove_dir_all(self.out.join(format!("checkpoint-{}", step - 40))).unwrap();
        }
    }
}

fn write(path: &Path, bytes: &[u8]) {
    File::create(path).unwrap().write_all(bytes).unwrap();
}

fn start_watcher(fleet: &Fleet, arguments: &[&str]) -> Member {
    let nats = fleet.nats_url();
    let arguments = [&["agent", "--nats", &nats][..], arguments].concat();
    let home = fleet.path().join("watcher").display().to_string();
    let arguments = [&arguments[..], &["--agent-dir", &home]].concat();
    Member::start("watcher", &[], &arguments, [], fleet.path())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn steps(run: &Value, list: &str) -> Vec<u64> {
    let step = |item: &Value| item["checkpoint"]["step"].as_u64().or(item["step"].as_u64());
    let mut steps: Vec<u64> = run[list].as_array().unwrap().iter().filter_map(step).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn a_watched_training_is_published_completely_and_once_although_the_agent_is_killed() {
    let fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    let trainer =
        FakeTrainer { out: fleet.path().join("My Out"), base: files.write_model(), steps: 80 };
    let (out, heldout) = (trainer.out.clone(), files.path("heldout.txt"));
    let watch = ["--watch", text(&out), "--eval", text(&heldout)];
    let mut agent = start_watcher(&fleet, &watch);
    let (saved, saves) = mpsc::channel();
    let training = thread::spawn(move || {
        let mut random = Random::new(7);
        for step in (1..=8).map(|n| n * 10) {
            trainer.save(step, &mut random);
            saved.send(step).unwrap();
            thread::sleep(Duration::from_millis(2500));
        }
    });
    let mut random = Random::new(11);
    // The agent survives the last checkpoint, and then exits.
    for _ in saves.into_iter().filter(|step| *step < 80) {
        thread::sleep(Duration::from_millis(random.next_u64() % 2600));
        agent.kill();
        agent.restart_exited();
    }
    training.join().unwrap();
    let ended = fleet.await_success("my-out-1", LIMIT);
    let all: Vec<u64> = (1..=8).map(|n| n * 10).collect();
    assert_eq!(steps(&ended, "checkpoints"), all, "{}", fleet.log_tails());
    assert_eq!(steps(&ended, "evals"), all);
    assert_eq!(ended["kind"], "watched");
    let audit = fleet.run_json(&["audit", "my-out-1", "--deep"]).expect("a clean audit");
    assert_eq!((&audit["findings"], &audit["not_checked"]), (&json!([]), &json!([])));
    let runs = fleet.run_json(&["run", "list"]).unwrap();
    assert_eq!(runs.as_array().unwrap().len(), 1, "no kill begins another run: {runs:#}");
    wait_until("the agent leaves with its run", LIMIT, || (!agent.is_alive()).then_some(()));

    let losses: Vec<f64> = ended["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["checkpoint"]["loss"].as_f64().unwrap())
        .collect();
    assert!((losses[0] - 3.9).abs() < 1e-9 && (losses[7] - 3.2).abs() < 1e-9, "{losses:?}");
    let copy = fleet.path().join("copy");
    let exported = fleet.run(&["checkpoint", "export", "my-out-1/0/80", "--out", text(&copy)]);
    assert_eq!(exported.code, 0, "{}", exported.stderr);
    let name = "adapter_model.safetensors";
    let [published, saved] =
        [&copy, &out.join("checkpoint-80")].map(|d| fs::read(d.join(name)).unwrap());
    assert_eq!(published, saved);
    let settings = fs::read_to_string(copy.join("adapter_config.json")).unwrap();
    assert!(settings.contains("b3:") && !settings.contains(text(fleet.path())), "{settings}");
    assert!(!copy.join("optimizer.pt").exists());
}

#[test]
fn a_watcher_with_a_role_evaluates_checkpoints_and_reports_what_it_cannot_publish() {
    let fleet = Fleet::start_open("verifier");
    let files = SpecFiles::create(fleet.path());
    let trainer =
        FakeTrainer { out: fleet.path().join("out"), base: files.write_model(), steps: 20 };
    let heldout = files.path("heldout.txt");
    let mut agent = start_watcher(
        &fleet,
        &[
            "--watch",
            text(&trainer.out),
            "--eval",
            text(&heldout),
            "--roles",
            "evaluator",
            "--name",
            "box",
        ],
    );
    let mut random = Random::new(3);
    fs::create_dir_all(trainer.out.join("checkpoint-5/pytorch_model_fsdp_0")).unwrap();
    write(&trainer.out.join("checkpoint-5/trainer_state.json"), br#"{"global_step": 5}"#);
    wait_until("the trouble is reported", LIMIT, || {
        let agents = fleet.run_json(&["agents", "list"]).ok()?;
        let matches = |agent: &&Value| {
            agent["trouble"].as_str().is_some_and(|why| why.contains("FULL_STATE_DICT"))
        };
        agents.as_array()?.iter().find(matches).map(|_| ())
    });
    trainer.save(10, &mut random);
    trainer.save(20, &mut random);
    let ended = fleet.await_success("out-1", LIMIT);
    assert_eq!(steps(&ended, "evals"), [10, 20]);
    assert!(agent.is_alive(), "its other role goes on");
    agent.signal(Signal::TERM);
    wait_until("it ends within seconds", Duration::from_secs(10), || {
        (!agent.is_alive()).then_some(())
    });
}

/// A real training with a script that does not use Flotilla.
#[test]
fn a_plain_hugging_face_script_is_watched() {
    let Some(python) = requirements::require_torch_python() else { return };
    let fleet = Fleet::start_open("evaluator");
    let files = SpecFiles::create(fleet.path());
    let (out, model) = (fleet.path().join("lora"), files.write_model());
    let heldout = files.path("heldout.txt");
    let agent = start_watcher(&fleet, &["--watch", text(&out), "--eval", text(&heldout)]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/plain_training.py");
    let trained = Command::new(python)
        .arg(script)
        .args([&model, &files.path("data.jsonl"), &out])
        .env("OMP_NUM_THREADS", "2")
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("Python starts");
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let ended = fleet.await_success("lora-1", LIMIT);
    let found = steps(&ended, "checkpoints");
    println!("published {found:?} of steps 5 to 30; two were kept");
    for step in [25, 30] {
        assert!(out.join(format!("checkpoint-{step}")).is_dir(), "the script keeps two");
        assert!(found.contains(&step), "{found:?}\n{}", fleet.log_tails());
    }
    assert_eq!(steps(&ended, "evals"), found);
    assert_eq!(fleet.run_json(&["audit", "lora-1", "--deep"]).unwrap()["findings"], json!([]));
    drop(agent);
}
