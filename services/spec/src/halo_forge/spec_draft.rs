//! Converts a configuration's sections into sections of a spec.

use super::{
    ImportError, KeyStatus,
    config_keys::ConfigKeys,
    verifier_section::{self, quote_yaml},
};

/// The next constants are those halo-forge defaults that differ from the defaults of a spec.
const MODEL: &str = "Qwen/Qwen2.5-Coder-3B";
const DEFAULT_LEARNING_RATE: f64 = 5e-5;
const DEFAULT_RATE_DECAY: f64 = 0.85;
const DEFAULT_MIN_RATE: f64 = 1e-6;

/// A spec in parts, before it is written as YAML.
pub(super) struct SpecDraft {
    model: String,
    prompts: String,
    chat: String,
    raft: Vec<(&'static str, String)>,
}

impl SpecDraft {
    /// `prompts` replaces the prompts file of the configuration.
    pub(super) fn from_keys(
        keys: &mut ConfigKeys,
        prompts: Option<&str>,
    ) -> Result<Self, ImportError> {
        let model =
            keys.take_text(&["base_model", "model.base_model", "model.name"], "base.model")?;
        let model = model.unwrap_or_else(|| {
            keys.add_note("base_model", KeyStatus::Default, &format!("base.model: {MODEL}"));
            MODEL.to_owned()
        });
        let own = keys.take_text(&["prompts", "data.prompts"], "raft.prompts")?;
        if let (Some(_), Some(file)) = (&own, prompts) {
            keys.replace_note(
                &["prompts", "data.prompts"],
                KeyStatus::Ignored,
                &format!("--prompts names {file}"),
            );
        }
        let prompts = prompts.map(str::to_owned).or(own).ok_or(ImportError::NoPrompts)?;
        let chat = match keys.take_text(&["system_prompt"], "raft.chat.system")? {
            Some(system) => format!("{{ system: {} }}", quote_yaml(&system)),
            None => {
                let said = "halo-forge's own, about Windows programming, is omitted: raft.chat: \
                            true";
                keys.add_note("system_prompt", KeyStatus::Default, said);
                "true".to_owned()
            }
        };
        let cycles =
            keys.take_integer(&["raft.num_cycles", "num_cycles"], "raft.cycles")?.unwrap_or(3);
        let samples = keys.take_integer(&["raft.samples_per_prompt"], "raft.samples_per_prompt")?;
        let raft = vec![
            ("cycles", cycles.to_string()),
            ("samples_per_prompt", samples.unwrap_or(8).to_string()),
            ("sampling", convert_sampling(keys)?),
            ("verifier", verifier_section::convert_verifier(keys)?),
            ("selection", convert_selection(keys)?),
            ("training", convert_training(keys)?),
            ("lora", convert_lora(keys)?),
        ];
        note_curriculum(keys)?;
        Ok(Self { model, prompts, chat, raft })
    }

    pub(super) fn to_yaml(&self, name: &str) -> String {
        let Self { model, prompts, chat, raft } = self;
        let mut text = format!(
            "name: {name}\nbase: {{ model: {} }}\nraft:\n  prompts: {}\n  chat: {chat}\n",
            quote_yaml(model),
            quote_yaml(prompts)
        );
        for (key, value) in raft {
            text.push_str(&format!("  {key}: {value}\n"));
        }
        text
    }
}

/// Returns a YAML flow mapping.
fn convert_sampling(keys: &mut ConfigKeys) -> Result<String, ImportError> {
    let at = "raft.sampling";
    let tokens =
        keys.take_integer(&["generation.max_new_tokens"], &format!("{at}.max_new_tokens"))?;
    let temperature =
        keys.take_number(&["generation.temperature"], &format!("{at}.temperature"))?;
    let top_p = keys.take_number(&["generation.top_p"], &format!("{at}.top_p"))?.unwrap_or(1.0);
    let top_k = keys.take_integer(&["generation.top_k"], &format!("{at}.top_k"))?.unwrap_or(0);
    let (tokens, temperature) = (tokens.unwrap_or(1024), temperature.unwrap_or(0.7));
    Ok(format!(
        "{{ temperature: {temperature:?}, max_new_tokens: {tokens}, top_p: {top_p:?}, top_k: {top_k} }}"
    ))
}

/// halo-forge ranks rewards over the whole cycle, and its reward shaping changes both the least
/// reward and the share from cycle to cycle.
fn convert_selection(keys: &mut ConfigKeys) -> Result<String, ImportError> {
    let at = "raft.selection";
    let reward = ["raft.reward_threshold", "reward_threshold"];
    let reward = keys.take_number(&reward, &format!("{at}.min_reward"))?.unwrap_or(0.5);
    let share = ["raft.keep_top_percent", "keep_top_percent"];
    let share = keys.take_number(&share, &format!("{at}.keep_share"))?.unwrap_or(0.5);
    let least =
        keys.take_integer(&["raft.min_samples", "min_samples"], &format!("{at}.at_least"))?;
    let key = "reward_shaping_strategy";
    let shaping = keys.take_text(&[key], at)?.unwrap_or_else(|| "fixed".into());
    let plain = (format!("{reward:?}"), format!("{share:?}"));
    let (mut adaptive, (reward_is, share_is)) = (String::new(), plain.clone());
    let (reward_is, share_is) = match shaping.as_str() {
        "fixed" => (reward_is, share_is),
        "annealing" => (
            format!("{{ linear: [{}, {reward:?}] }}", reward.min(0.1)),
            format!("{{ linear: [{}, {share:?}] }}", share.max(0.8)),
        ),
        "warmup" => (
            format!("[{}, {reward:?}]", reward.min(0.1)),
            format!("[{}, {share:?}]", share.max(0.8)),
        ),
        "adaptive" => {
            let high = reward.max(0.1);
            adaptive =
                format!(", adaptive: {{ target: 0.3, step: 0.1, low: 0.1, high: {high:?} }}");
            (format!("{:?}", reward.min(0.1)), share_is)
        }
        other => {
            keys.replace_note(
                &[key],
                KeyStatus::Ignored,
                &format!("{other:?} is not a strategy; fixed is used"),
            );
            plain
        }
    };
    let least = match least {
        None | Some(0) => String::new(),
        Some(least) => {
            let said = format!(
                "{at}.at_least: {least}; samples below {reward:?} are never added, unlike in \
                 halo-forge"
            );
            keys.replace_note(&["raft.min_samples", "min_samples"], KeyStatus::Used, &said);
            format!(", at_least: {least}, floor: {reward:?}")
        }
    };
    Ok(format!(
        "{{ policy: top_percent, min_reward: {reward_is}, keep_share: {share_is}{adaptive}{least} }}"
    ))
}

/// Returns a YAML flow mapping.
fn convert_training(keys: &mut ConfigKeys) -> Result<String, ImportError> {
    let at = "raft.training";
    let rate = ["training.learning_rate", "training.base_learning_rate", "learning_rate"];
    let rate =
        keys.take_number(&rate, &format!("{at}.learning_rate"))?.unwrap_or(DEFAULT_LEARNING_RATE);
    let decay = ["training.lr_decay_factor", "lr_decay_per_cycle", "training.lr_decay_per_cycle"];
    let decay = keys
        .take_number(&decay, &format!("{at}.learning_rate.decay.factor"))?
        .unwrap_or(DEFAULT_RATE_DECAY);
    let floor = ["min_lr", "training.min_lr"];
    let floor = keys.take_number(&floor, &format!("{at}.learning_rate.decay.floor"))?;
    let floor = floor.unwrap_or(DEFAULT_MIN_RATE);
    let pass =
        keys.take_integer(&["training.batch_size"], &format!("{at}.batch_size (a factor)"))?;
    let passes = ["training.gradient_accumulation_steps"];
    let passes = keys.take_integer(&passes, &format!("{at}.batch_size (a factor)"))?;
    let batch = u64::from(pass.unwrap_or(2)) * u64::from(passes.unwrap_or(16));
    let epochs = keys.take_integer(&["training.epochs"], &format!("{at}.epochs"))?.unwrap_or(1);
    let tokens = ["training.max_seq_length", "training.max_length"];
    let tokens = keys.take_integer(&tokens, &format!("{at}.max_tokens"))?.unwrap_or(2048);
    let weight_decay =
        keys.take_number(&["training.weight_decay"], &format!("{at}.weight_decay"))?;
    let norm = keys.take_number(&["training.max_grad_norm"], &format!("{at}.max_grad_norm"))?;
    let ratio = keys.take_number(&["training.warmup_ratio"], &format!("{at}.warmup_ratio"))?;
    let steps = keys.take_integer(&["training.warmup_steps"], &format!("{at}.warmup_ratio"))?;
    let ratio = match (ratio, steps) {
        (Some(ratio), _) => ratio,
        (None, Some(0)) => 0.0,
        (None, None) => 0.1,
        (None, Some(_)) => {
            let said =
                "a cycle has as many steps as it keeps samples for: warmup_ratio 0.1 of them";
            keys.replace_note(&["training.warmup_steps"], KeyStatus::Ignored, said);
            0.1
        }
    };
    Ok(format!(
        "{{ epochs: {epochs}, batch_size: {batch}, max_tokens: {tokens}, schedule: linear, \
         final_ratio: 0, warmup_ratio: {ratio:?}, weight_decay: {:?}, max_grad_norm: {:?}, \
         learning_rate: {{ decay: {{ from: {rate:?}, factor: {decay:?}, floor: {floor:?} }} }} }}",
        weight_decay.unwrap_or(0.0),
        norm.unwrap_or(1.0)
    ))
}

/// Returns a YAML flow mapping.
fn convert_lora(keys: &mut ConfigKeys) -> Result<String, ImportError> {
    let rank = keys.take_integer(&["lora.r", "lora.rank"], "raft.lora.r")?.unwrap_or(16);
    let alpha = keys.take_number(&["lora.alpha", "lora.lora_alpha"], "raft.lora.alpha")?;
    let dropout = keys.take_number(&["lora.dropout", "lora.lora_dropout"], "raft.lora.dropout")?;
    let modules = keys.take_first(&["lora.target_modules"], "raft.lora.target_modules");
    let modules =
        modules.map(|(_, modules)| format!(", target_modules: {modules}")).unwrap_or_default();
    let (alpha, dropout) = (alpha.unwrap_or(32.0), dropout.unwrap_or(0.05));
    Ok(format!("{{ r: {rank}, alpha: {alpha:?}, dropout: {dropout:?}{modules} }}"))
}

/// Notes the closest setting of a spec.
fn note_curriculum(keys: &mut ConfigKeys) -> Result<(), ImportError> {
    const KEY: &str = "curriculum_strategy";
    let Some(strategy) = keys.take_text(&[KEY], "raft.curriculum")? else { return Ok(()) };
    let said = match strategy.as_str() {
        "none" => return Ok(()),
        "adaptive" | "historical" => {
            "choose by pass rate among more prompts than a cycle takes: set raft.prompts_per_cycle, \
             and raft.curriculum: { difficulty: {} } (docs/RAFT.md)"
        }
        _ => "prompts are ordered by how they turn out, not by how they look: see raft.curriculum",
    };
    keys.replace_note(&[KEY], KeyStatus::Ignored, said);
    Ok(())
}
