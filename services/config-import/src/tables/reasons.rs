//! The reasons why keys have no effect, or why a run differs.

pub(super) const STORED: &str =
    "outputs are in the fleet's store; `flotilla checkpoint export` writes them to a directory";
pub(super) const TRACKER: &str = "feeds export every run to trackers (docs/TRACKERS.md)";
pub(super) const UPLOAD: &str =
    "`flotilla checkpoint export` writes the model, `flotilla checkpoint push` uploads it";
pub(super) const PRECISION: &str = "each box chooses its own precision";
pub(super) const MEMORY: &str = "trainers manage their memory themselves";
pub(super) const KERNELS: &str = "the box's profile selects kernels and attention";
pub(super) const DEVICES: &str =
    "agents need no launcher; several boxes train one adapter by training.across (docs/ACROSS.md)";
pub(super) const LOADING: &str = "trainers read and tokenize ahead by themselves";
pub(super) const LOGGED: &str = "every step is logged; see `flotilla run show`";
pub(super) const MEASURED: &str = "every checkpoint is measured on the spec's evals";
pub(super) const SAVED: &str =
    "checkpoints are saved by time and by training.save_every (docs/TRAINING.md)";
pub(super) const TOKENIZER: &str = "the base's own tokenizer and special tokens are used";
pub(super) const REMOTE_CODE: &str = "no code of a model is ever run";
pub(super) const RESUMED: &str = "an interrupted training resumes by itself";
pub(super) const ENGINE: &str = "generators sample with the engine of their box (docs/DEPLOY.md)";
pub(super) const QUANTIZATION: &str = "trainers choose how nf4 is stored and computed";
pub(super) const NAMED: &str = "a run is named by the spec's name";
pub(super) const SEEDED: &str = "all random choices follow from the spec's seed";
pub(super) const PADDING: &str = "examples are packed without padding (docs/TRAINING.md)";
pub(super) const ENVIRONMENT: &str = "set the environment of the agents (docs/DEPLOY.md)";
pub(super) const PROGRESS: &str = "it is about the program's own output";
pub(super) const SECRET: &str = "specs have no secrets; agents use HF_TOKEN (docs/RUNS.md)";

pub(super) const QUANTIZED: &str =
    "the base is trained on unquantised, or in 4 bits as nf4 (`lora.quantize: nf4`)";
pub(super) const DORA: &str = "there is no DoRA; a plain LoRA adapter is trained";
pub(super) const LORA_INIT: &str = "adapters start with B = 0 and a random A";
pub(super) const LORA_FORM: &str = "adapters of one rank are trained on linear modules only";
pub(super) const ALL_STEPS: &str = "a run does not stop before its last step";
pub(super) const TRUNCATED: &str = "longer examples are skipped, not cut";
pub(super) const COLUMNS: &str = "name the columns as docs/DATA.md lists them";
pub(super) const SAMPLED: &str = "only temperature, top_p and top_k shape the samples";
pub(super) const REFERENCE: &str = "the reference is the base of the run";
pub(super) const LOSS: &str = "the loss has no such part (docs/OBJECTIVES.md)";
pub(super) const OPTIMIZER: &str = "the optimizer is AdamW with one learning rate for all weights";
pub(super) const ADAPTER: &str =
    "base.adapter names an adapter that a RAFT run trains further; else merge it first";
pub(super) const PARTLY: &str =
    "all weights or a LoRA adapter are trained, not a part of the model";
pub(super) const TEXT_ONLY: &str = "models of text only are trained";
pub(super) const MIXTURE: &str = "files are used whole; cut or mix them yourself";
