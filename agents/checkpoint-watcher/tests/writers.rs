//! A trainer that writes like real ones, at random paces, and a scanner beside it that is killed
//! now and then: the scanner returns only complete checkpoints.

#![allow(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use checkpoint_watcher::{CheckpointScanner, QuietSettings};
use fastrand::Rng;

const QUIET: Duration = Duration::from_millis(60);

/// The longest pause between two writes; both longer and shorter than the quiet period occur.
const PAUSE_MS: u64 = 25;

const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// Writes a temporary name at full size from the start, then renames it: safetensors 0.8.
    Renamed,
    /// Writes the final name, truncated and growing: older safetensors.
    InPlace,
}

/// The complete saves, by step, each with the files to publish.
type Finished = Arc<Mutex<BTreeMap<u32, Vec<BTreeMap<String, Vec<u8>>>>>>;

struct Trainer {
    out: PathBuf,
    rng: Rng,
    way: Way,
    finished: Finished,
    /// The most checkpoints that are kept.
    limit: usize,
    sharded: bool,
}

fn tensors(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    let header = format!(
        r#"{{"w.lora_A.weight": {{"dtype": "U8", "shape": [{bytes}], "data_offsets": [0, {bytes}]}}}}"#
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..bytes).map(|_| rng.u8(..)));
    file
}

impl Trainer {
    fn pause(&mut self) {
        thread::sleep(Duration::from_micros(self.rng.u64(0..PAUSE_MS * 1000)));
    }

    /// Writes in a few parts, with pauses.
    fn write(&mut self, file: &mut File, bytes: &[u8]) {
        let cut = self.rng.usize(0..=bytes.len());
        for part in [&bytes[..cut], &bytes[cut..]] {
            file.write_all(part).unwrap();
            self.pause();
        }
    }

    fn text(&mut self, path: &Path, bytes: &[u8]) {
        let mut file = File::create(path).unwrap();
        self.pause();
        self.write(&mut file, bytes);
    }

    fn weights(&mut self, path: &Path, bytes: &[u8]) {
        match self.way {
            Way::InPlace => self.text(path, bytes),
            Way::Renamed => {
                let passing = path.with_file_name(format!(".tmp{:06}", self.rng.u32(0..999_999)));
                let mut file = File::create(&passing).unwrap();
                file.set_len(bytes.len() as u64).unwrap();
                self.pause();
                self.write(&mut file, bytes);
                fs::rename(passing, path).unwrap();
            }
        }
    }

    fn save(&mut self, step: u32, last: u32) {
        let place = self.out.join(format!("checkpoint-{step}"));
        fs::create_dir_all(&place).unwrap();
        self.pause();
        let mut save = BTreeMap::new();
        let shards: Vec<String> = if self.sharded {
            (1..=3).map(|n| format!("model-{n:05}-of-00003.safetensors")).collect()
        } else {
            vec!["adapter_model.safetensors".into()]
        };
        for name in &shards {
            let bytes = self.rng.usize(1..200_000);
            let bytes = tensors(&mut self.rng, bytes);
            self.weights(&place.join(name), &bytes);
            save.insert(name.clone(), bytes);
        }
        if self.sharded {
            let map: Vec<String> =
                shards.iter().map(|name| format!(r#""{name}": "{name}""#)).collect();
            let index = format!(r#"{{"weight_map": {{{}}}}}"#, map.join(", "));
            self.text(&place.join("model.safetensors.index.json"), index.as_bytes());
            self.text(&place.join("config.json"), br#"{"model_type": "qwen2"}"#);
        } else {
            self.text(&place.join("adapter_config.json"), br#"{"base_model_name_or_path": "b"}"#);
        }
        let tokenizer = format!(r#"{{"version": {}}}"#, self.rng.u32(..));
        self.text(&place.join("tokenizer.json"), tokenizer.as_bytes());
        save.insert("tokenizer.json".into(), tokenizer.into_bytes());
        for name in ["training_args.bin", "optimizer.pt", "rng_state.pth"] {
            let mut zip = b"PK\x03\x04".to_vec();
            zip.extend((0..2000).map(|_| self.rng.u8(b'a'..=b'z')));
            zip.extend(b"PK\x05\x06");
            zip.extend([0; 18]);
            self.text(&place.join(name), &zip);
        }
        let state = format!(r#"{{"global_step": {step}, "max_steps": {last}, "log_history": []}}"#);
        self.finished.lock().unwrap().entry(step).or_default().push(save);
        self.text(&place.join("trainer_state.json"), state.as_bytes());
        self.rotate(step);
    }

    /// Removes the oldest checkpoint file by file, two milliseconds after the last write.
    fn rotate(&mut self, newest: u32) {
        thread::sleep(Duration::from_millis(2));
        let mut steps: Vec<u32> = fs::read_dir(&self.out)
            .unwrap()
            .filter_map(|entry| {
                checkpoint_watcher::parse_step(entry.unwrap().file_name().to_str().unwrap())
            })
            .collect();
        steps.sort_unstable();
        let surplus = steps.len().saturating_sub(self.limit);
        for step in steps.into_iter().filter(|step| *step != newest).take(surplus) {
            fs::remove_dir_all(self.out.join(format!("checkpoint-{step}"))).unwrap();
        }
    }

    fn train(mut self, saves: u32) {
        let last = saves * 10;
        for step in (1..=saves).map(|n| n * 10) {
            self.save(step, last);
            if self.rng.u8(0..4) == 0 {
                // Another training returned to an earlier step and reached this one again.
                thread::sleep(Duration::from_millis(self.rng.u64(10..200)));
                self.save(step, last);
            }
            thread::sleep(Duration::from_millis(self.rng.u64(10..250)));
        }
    }
}

/// Takes ready checkpoints as a publisher would, and compares them with the complete saves.
fn watch(
    out: &Path,
    home: &Path,
    finished: &Finished,
    over: &AtomicBool,
    rng: &mut Rng,
) -> Vec<u32> {
    let policy =
        QuietSettings { quiet_period: QUIET, remote_quiet_period: QUIET, is_remote: false };
    let open = || CheckpointScanner::open_directory(out, home, policy).unwrap();
    let mut scanner = Some(open());
    let (mut published, began) = (Vec::new(), Instant::now());
    loop {
        assert!(began.elapsed() < LIMIT, "published {published:?}");
        let trained = over.load(Ordering::SeqCst);
        if rng.u8(0..12) == 0 {
            // An agent dies and another one starts.
            drop(scanner.take());
            scanner = Some(open());
        }
        let here = scanner.as_mut().unwrap();
        here.scan_directory(Instant::now()).unwrap();
        let mut idle = true;
        while let Some(held) = here.next_checkpoint(Instant::now()) {
            idle = false;
            if !here.is_unchanged(&held) {
                here.release_step(held.step).unwrap();
                continue;
            }
            let files = here.prepare_files(&held, Some("b3:base")).unwrap();
            thread::sleep(Duration::from_millis(rng.u64(0..10)));
            let content = read(&files);
            if !here.is_unchanged(&held) {
                here.release_step(held.step).unwrap();
                continue;
            }
            check(held.step, &content, finished);
            published.push(held.step);
            here.finish_checkpoint(&held).unwrap();
        }
        if trained && idle && !here.has_staged() {
            return published;
        }
        thread::sleep(Duration::from_millis(rng.u64(1..20)));
    }
}

fn read(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
        })
        .collect()
}

fn check(step: u32, content: &BTreeMap<String, Vec<u8>>, finished: &Finished) {
    let finished = finished.lock().unwrap();
    let saves = &finished[&step];
    let is_one = |save: &BTreeMap<String, Vec<u8>>| {
        save.iter().all(|(name, bytes)| content.get(name) == Some(bytes))
    };
    assert!(saves.iter().any(is_one), "step {step} is torn: none of {} saves", saves.len());
    assert!(content.keys().all(|name| !name.ends_with(".pt") && !name.ends_with(".bin")));
    if let Some(settings) = content.get("adapter_config.json") {
        let settings: serde_json::Value = serde_json::from_slice(settings).unwrap();
        assert_eq!(settings["base_model_name_or_path"], "b3:base");
    }
}

fn train_and_watch(seed: u64) {
    let mut rng = Rng::with_seed(seed);
    let root = tempfile::tempdir().unwrap();
    let (out, home) = (root.path().join("out"), root.path().join("home"));
    fs::create_dir_all(&out).unwrap();
    let (finished, over) = (Finished::default(), Arc::new(AtomicBool::new(false)));
    let limit = rng.usize(1..4);
    let way = if rng.bool() { Way::Renamed } else { Way::InPlace };
    let sharded = rng.u8(0..3) == 0;
    let trainer = Trainer {
        out: out.clone(),
        rng: Rng::with_seed(rng.u64(..)),
        way,
        finished: finished.clone(),
        limit,
        sharded,
    };
    let ended = over.clone();
    let training = thread::spawn(move || {
        trainer.train(5);
        ended.store(true, Ordering::SeqCst);
    });
    let published = watch(&out, &home, &finished, &over, &mut rng);
    training.join().unwrap();
    let told = format!("seed {seed}, {way:?}, keep {limit}, sharded {sharded}: {published:?}");
    // The last checkpoint is never missed.
    assert!(published.contains(&50), "{told}");
    let left = fs::read_dir(out.join(".flotilla-stage")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "only the lock and the memory stay, not {left:?}; {told}");
}

#[test]
fn whatever_the_pace_nothing_torn_is_ever_handed_out() {
    let seeds: u64 = std::env::var("WATCH_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let first = fastrand::u64(0..1 << 32);
    // All of them wait most of the time.
    let running: Vec<_> = (first..first + seeds)
        .map(|seed| (seed, thread::spawn(move || train_and_watch(seed))))
        .collect();
    let failed: Vec<u64> = running
        .into_iter()
        .filter_map(|(seed, running)| running.join().is_err().then_some(seed))
        .collect();
    assert_eq!(failed, [] as [u64; 0], "seeds that failed");
}
