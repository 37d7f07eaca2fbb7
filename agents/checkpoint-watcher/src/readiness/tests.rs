//! Each case is one change to a complete directory, and the verdict for it.

use super::*;

/// A directory as a scan sees it, in the order of writing.
#[derive(Clone)]
struct Dir {
    listing: DirectoryListing,
    probes: FileProbes,
    clock_ns: i64,
}

const STATE: &[u8] = br#"{"global_step": 20, "max_steps": 60, "log_history": []}"#;
const ADAPTER_CONFIG: &[u8] = br#"{"peft_type": "LORA", "base_model_name_or_path": "org/base"}"#;

fn tensors(shape: &str, elements: usize) -> (Vec<u8>, u64) {
    let header = format!(
        r#"{{"__metadata__": {{"format": "pt"}}, "a.lora_A": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, {}]}}}}"#,
        4 * elements
    );
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let total = bytes.len() as u64 + 4 * elements as u64;
    (bytes, total)
}

fn zip_tail() -> Vec<u8> {
    let mut tail = b"some entry\0PK\x05\x06".to_vec();
    tail.extend([0; 18]);
    tail
}

impl Dir {
    fn put(&mut self, name: &str, bytes: u64, probe: Option<FileProbe>) -> &mut Self {
        self.clock_ns += 1_000;
        let inode = self.listing.len() as u64 + 1;
        let stat = FileStat { bytes, modified_ns: self.clock_ns, inode, is_dir: false };
        self.listing.insert(name.into(), stat);
        match probe {
            Some(probe) => self.probes.insert(name.into(), probe),
            None => self.probes.remove(name),
        };
        self
    }

    fn text(&mut self, name: &str, text: &[u8]) -> &mut Self {
        self.put(name, text.len() as u64, Some(FileProbe::Text(text.to_vec())))
    }

    fn torch(&mut self, name: &str) -> &mut Self {
        self.put(name, 1000, Some(FileProbe::Ends(*b"PK\x03\x04", zip_tail())))
    }

    fn weights(&mut self, name: &str) -> &mut Self {
        let (header, bytes) = tensors("[2, 3]", 6);
        self.put(name, bytes, Some(FileProbe::Header(header)))
    }

    fn tail(&mut self) -> &mut Self {
        self.torch("training_args.bin").torch("optimizer.pt").torch("scheduler.pt");
        self.torch("rng_state.pth").text(TRAINER_STATE, STATE)
    }

    fn empty() -> Self {
        Self { listing: DirectoryListing::new(), probes: FileProbes::new(), clock_ns: 0 }
    }

    fn lora() -> Self {
        let mut dir = Self::empty();
        dir.put("README.md", 5000, None).weights(checkpoint_files::ADAPTER_FILE);
        dir.text(checkpoint_files::ADAPTER_CONFIG, ADAPTER_CONFIG);
        dir.put("tokenizer.json", 11_000_000, Some(FileProbe::Parses(true))).tail();
        dir
    }

    fn sharded() -> Self {
        let mut dir = Self::empty();
        dir.text(checkpoint_files::MODEL_CONFIG, b"{}").put(
            "generation_config.json",
            2,
            Some(FileProbe::Parses(true)),
        );
        dir.weights("model-00001-of-00002.safetensors").weights("model-00002-of-00002.safetensors");
        let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors",
                          "b": "model-00002-of-00002.safetensors"}}"#;
        dir.text(checkpoint_files::INDEX_FILE, index).tail();
        dir
    }

    fn judge(&self) -> SaveReadiness {
        super::judge_readiness(20, &self.listing, &self.probes)
    }

    fn remove(&mut self, name: &str) {
        self.listing.remove(name).unwrap();
        self.probes.remove(name);
    }

    fn stat(&mut self, name: &str) -> &mut FileStat {
        self.listing.get_mut(name).unwrap()
    }
}

fn ready(dir: &Dir) -> CompleteCheckpoint {
    match dir.judge() {
        SaveReadiness::Ready(checkpoint) => checkpoint,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_a_trainer_saves_is_ready_and_only_what_is_no_pickle_is_published() {
    let lora = ready(&Dir::lora());
    assert_eq!(lora.files, ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]);
    assert_eq!(
        (lora.content, lora.base_name.as_deref()),
        (CheckpointContent::Adapter, Some("org/base"))
    );
    let model = ready(&Dir::sharded());
    assert_eq!(model.files.len(), 5, "{:?}", model.files);
    assert_eq!((model.content, model.base_name), (CheckpointContent::Model, None));
}

#[test]
fn a_directory_is_a_checkpoint_by_its_name() {
    assert_eq!(parse_step("checkpoint-200"), Some(200));
    for name in ["tmp-checkpoint-200", "checkpoint-", "checkpoint-2a", "checkpoint--2", "200"] {
        assert_eq!(parse_step(name), None, "{name}");
    }
    assert_eq!(parse_step("checkpoint-99999999999"), None, "more than a step can be");
}

type Case = (&'static str, fn(&mut Dir), &'static str);

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn while_anything_is_missing_or_half_written_it_is_not_ready() {
    let cases: &[Case] = &[
        ("nothing but a directory", |d| *d = Dir::empty(), "no trainer_state.json"),
        ("the state is to come", |d| d.remove(TRAINER_STATE), "no trainer_state.json"),
        (
            "the state is empty",
            |d| {
                d.text(TRAINER_STATE, b"");
            },
            "not JSON yet",
        ),
        (
            "the state is cut",
            |d| {
                d.text(TRAINER_STATE, &STATE[..30]);
            },
            "not JSON yet",
        ),
        (
            "a last-moment save",
            |d| {
                d.put(INCOMPLETE, 0, None);
            },
            INCOMPLETE,
        ),
        (
            "a file under a passing name",
            |d| {
                d.put(".tmpAb3X", 96, None);
            },
            ".tmpAb3X",
        ),
        ("weights to come", |d| d.remove(checkpoint_files::ADAPTER_FILE), "no weights"),
        (
            "settings to come",
            |d| d.remove(checkpoint_files::ADAPTER_CONFIG),
            "no adapter_config.json",
        ),
        ("weights grow", |d| d.stat(checkpoint_files::ADAPTER_FILE).bytes -= 1, "of"),
        (
            "a header that is cut",
            |d| {
                d.probes
                    .insert(checkpoint_files::ADAPTER_FILE.into(), FileProbe::Header(vec![9; 20]));
            },
            "no whole header",
        ),
        (
            "a zip without its end",
            |d| {
                d.probes
                    .insert("optimizer.pt".into(), FileProbe::Ends(*b"PK\x03\x04", vec![0; 64]));
            },
            "optimizer.pt",
        ),
        ("an empty torch file", |d| d.stat("scheduler.pt").bytes = 0, "scheduler.pt"),
        (
            "a tokenizer that is cut",
            |d| {
                d.probes.insert("tokenizer.json".into(), FileProbe::Parses(false));
            },
            "tokenizer.json",
        ),
        (
            "weights are saved again",
            |d| {
                d.weights(checkpoint_files::ADAPTER_FILE);
            },
            "saved again",
        ),
        (
            "the optimizer is saved again",
            |d| {
                d.torch("optimizer.pt");
            },
            "saved again",
        ),
        (
            "rank 1 is late",
            |d| {
                d.torch("rng_state_0.pth").torch("rng_state_2.pth");
            },
            "_1.pth",
        ),
        (
            "rank 0 is late",
            |d| {
                d.torch("rng_state_1.pth");
            },
            "rng_state_0.pth",
        ),
    ];
    for (name, change, why) in cases {
        let mut dir = Dir::lora();
        change(&mut dir);
        match dir.judge() {
            SaveReadiness::NotYet(reason) => assert!(reason.contains(why), "{name}: {reason}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    for name in ["model-00002-of-00002.safetensors", checkpoint_files::MODEL_CONFIG] {
        let mut dir = Dir::sharded();
        dir.remove(name);
        assert_eq!(dir.judge(), SaveReadiness::NotYet(format!("no {name} yet")));
    }
}

#[test]
fn what_can_never_be_published_says_what_would_help() {
    let fsdp: fn(&mut Dir) = |d| {
        d.remove(checkpoint_files::ADAPTER_FILE);
        d.put("pytorch_model_fsdp_0", 0, None).stat("pytorch_model_fsdp_0").is_dir = true;
    };
    let deepspeed: fn(&mut Dir) = |d| {
        d.remove(checkpoint_files::ADAPTER_FILE);
        d.put("global_step20", 0, None).stat("global_step20").is_dir = true;
    };
    let pickled: fn(&mut Dir) = |d| {
        d.remove(checkpoint_files::ADAPTER_FILE);
        d.torch("adapter_model.bin").text(TRAINER_STATE, STATE);
    };
    let gathered: fn(&mut Dir) = |d| {
        let (header, bytes) = tensors("[0]", 0);
        d.put(checkpoint_files::ADAPTER_FILE, bytes, Some(FileProbe::Header(header)))
            .text(TRAINER_STATE, STATE);
    };
    let renamed: fn(&mut Dir) = |d| {
        d.text(TRAINER_STATE, br#"{"global_step": 30, "max_steps": 60}"#);
    };
    let locked: fn(&mut Dir) = |d| {
        d.probes.insert(
            checkpoint_files::ADAPTER_FILE.into(),
            FileProbe::Unreadable("permission denied".into()),
        );
    };
    let cases: [Case; 7] = [
        ("FSDP shards", fsdp, "FULL_STATE_DICT"),
        ("DeepSpeed shards", deepspeed, "zero_to_fp32.py"),
        ("a pickle", pickled, "save_safetensors"),
        ("tensors left on other ranks", gathered, "a.lora_A"),
        ("a directory of another step", renamed, "step 30"),
        ("somebody else's file", locked, "as the user that trains"),
        (
            "more bytes than it speaks of",
            |d| d.stat(checkpoint_files::ADAPTER_FILE).bytes += 1,
            "its header",
        ),
    ];
    for (name, change, why) in cases {
        let mut dir = Dir::lora();
        change(&mut dir);
        match dir.judge() {
            SaveReadiness::Broken(reason) => assert!(reason.contains(why), "{name}: {reason}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    let mut dir = Dir::sharded();
    dir.text(checkpoint_files::INDEX_FILE, br#"{"weight_map": {"a": "../../etc/x.safetensors"}}"#)
        .tail();
    assert!(matches!(dir.judge(), SaveReadiness::Broken(_)), "{:?}", dir.judge());
}

#[test]
fn what_may_well_be_newer_or_absent_does_not_hold_it_up() {
    type Change = fn(&mut Dir);
    let cases: &[(&str, Change)] = &[
        ("a rank's random state comes last", |d| {
            d.remove("rng_state.pth");
            d.torch("rng_state_0.pth").torch("rng_state_1.pth");
        }),
        ("only the model is saved", |d| {
            for name in ["optimizer.pt", "scheduler.pt", "rng_state.pth"] {
                d.remove(name);
            }
        }),
        ("a callback saves the tokenizer again", |d| {
            d.put("tokenizer.json", 11_000_000, Some(FileProbe::Parses(true)));
        }),
        ("a callback leaves notes", |d| {
            d.put("notes.txt", 3, None);
        }),
        ("a torch file of the old format", |d| {
            let probe = FileProbe::Ends([0x80, 2, 0x8a, 10], vec![0; 64]);
            d.probes.insert("training_args.bin".into(), probe);
        }),
        ("a coarse clock", |d| {
            d.listing.values_mut().for_each(|stat| stat.modified_ns = 5_000_000_000);
        }),
        ("the optimizer alone is in shards", |d| {
            d.put("global_step20", 0, None).stat("global_step20").is_dir = true;
        }),
    ];
    for (name, change) in cases {
        let mut dir = Dir::lora();
        change(&mut dir);
        assert!(matches!(dir.judge(), SaveReadiness::Ready(_)), "{name}: {:?}", dir.judge());
    }
}

#[test]
fn a_marker_needs_no_trainer_state_but_must_be_the_newest() {
    for marker in MARKERS {
        let mut dir = Dir::empty();
        dir.text(checkpoint_files::ADAPTER_CONFIG, ADAPTER_CONFIG)
            .weights(checkpoint_files::ADAPTER_FILE);
        assert!(matches!(dir.judge(), SaveReadiness::NotYet(_)));
        dir.put(marker, 0, None);
        assert_eq!(ready(&dir).state, None);
        dir.weights(checkpoint_files::ADAPTER_FILE);
        assert!(matches!(dir.judge(), SaveReadiness::NotYet(_)), "an old marker says nothing");
    }
}
