//! What a configuration asks for, in our terms.

use super::{
    Fate, ImportError,
    keys::Keys,
    verifier::{self, quoted},
};

/// Of halo-forge's own defaults, those that differ from ours.
const MODEL: &str = "Qwen/Qwen2.5-Coder-3B";
const RATE: f64 = 5e-5;
const DECAY: f64 = 0.85;
const LEAST_RATE: f64 = 1e-6;

pub(super) struct Draft {
    model: String,
    prompts: String,
    chat: String,
    /// Lines of the section `raft`, in order.
    raft: Vec<(&'static str, String)>,
}

impl Draft {
    pub(super) fn take(keys: &mut Keys, prompts: Option<&str>) -> Result<Self, ImportError> {
        let model = keys.text(&["base_model", "model.base_model", "model.name"], "base.model")?;
        let model = model.unwrap_or_else(|| {
            keys.note("base_model", Fate::Default, &format!("base.model: {MODEL}"));
            MODEL.to_owned()
        });
        let own = keys.text(&["prompts", "data.prompts"], "raft.prompts")?;
        if let (Some(_), Some(file)) = (&own, prompts) {
            keys.renote(
                &["prompts", "data.prompts"],
                Fate::Ignored,
                &format!("--prompts says {file}"),
            );
        }
        let prompts = prompts.map(str::to_owned).or(own).ok_or(ImportError::NoPrompts)?;
        let chat = match keys.text(&["system_prompt"], "raft.chat.system")? {
            Some(system) => format!("{{ system: {} }}", quoted(&system)),
            None => {
                let said = "halo-forge's, of Windows programming, is left away: raft.chat: true";
                keys.note("system_prompt", Fate::Default, said);
                "true".to_owned()
            }
        };
        let cycles = keys.whole(&["raft.num_cycles", "num_cycles"], "raft.cycles")?.unwrap_or(3);
        let samples = keys.whole(&["raft.samples_per_prompt"], "raft.samples_per_prompt")?;
        let raft = vec![
            ("cycles", cycles.to_string()),
            ("samples_per_prompt", samples.unwrap_or(8).to_string()),
            ("sampling", sampling(keys)?),
            ("verifier", verifier::take(keys)?),
            ("selection", selection(keys)?),
            ("training", training(keys)?),
            ("lora", lora(keys)?),
        ];
        curriculum(keys)?;
        Ok(Self { model, prompts, chat, raft })
    }

    pub(super) fn write(&self, name: &str) -> String {
        let Self { model, prompts, chat, raft } = self;
        let mut text = format!(
            "name: {name}\nbase: {{ model: {} }}\nraft:\n  prompts: {}\n  chat: {chat}\n",
            quoted(model),
            quoted(prompts)
        );
        for (key, value) in raft {
            text.push_str(&format!("  {key}: {value}\n"));
        }
        text
    }
}

fn sampling(keys: &mut Keys) -> Result<String, ImportError> {
    let at = "raft.sampling";
    let tokens = keys.whole(&["generation.max_new_tokens"], &format!("{at}.max_new_tokens"))?;
    let temperature = keys.number(&["generation.temperature"], &format!("{at}.temperature"))?;
    let top_p = keys.number(&["generation.top_p"], &format!("{at}.top_p"))?.unwrap_or(1.0);
    let top_k = keys.whole(&["generation.top_k"], &format!("{at}.top_k"))?.unwrap_or(0);
    let (tokens, temperature) = (tokens.unwrap_or(1024), temperature.unwrap_or(0.7));
    Ok(format!(
        "{{ temperature: {temperature:?}, max_new_tokens: {tokens}, top_p: {top_p:?}, top_k: {top_k} }}"
    ))
}

/// halo-forge's rewards are ranked in the whole cycle; shaping moves both bounds.
fn selection(keys: &mut Keys) -> Result<String, ImportError> {
    let at = "raft.selection";
    let reward = ["raft.reward_threshold", "reward_threshold"];
    let reward = keys.number(&reward, &format!("{at}.min_reward"))?.unwrap_or(0.5);
    let share = ["raft.keep_top_percent", "keep_top_percent"];
    let share = keys.number(&share, &format!("{at}.keep_share"))?.unwrap_or(0.5);
    let least = keys.whole(&["raft.min_samples", "min_samples"], &format!("{at}.at_least"))?;
    let key = "reward_shaping_strategy";
    let shaping = keys.text(&[key], at)?.unwrap_or_else(|| "fixed".into());
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
            keys.renote(
                &[key],
                Fate::Ignored,
                &format!("{other:?} is no strategy; fixed is taken"),
            );
            plain
        }
    };
    let least = match least {
        None | Some(0) => String::new(),
        Some(least) => {
            let said = format!(
                "{at}.at_least: {least}; samples below {reward:?} do not fill up, as halo-forge's would"
            );
            keys.renote(&["raft.min_samples", "min_samples"], Fate::Used, &said);
            format!(", at_least: {least}, floor: {reward:?}")
        }
    };
    Ok(format!(
        "{{ policy: top_percent, min_reward: {reward_is}, keep_share: {share_is}{adaptive}{least} }}"
    ))
}

fn training(keys: &mut Keys) -> Result<String, ImportError> {
    let at = "raft.training";
    let rate = ["training.learning_rate", "training.base_learning_rate", "learning_rate"];
    let rate = keys.number(&rate, &format!("{at}.learning_rate"))?.unwrap_or(RATE);
    let decay = ["training.lr_decay_factor", "lr_decay_per_cycle", "training.lr_decay_per_cycle"];
    let decay = keys.number(&decay, &format!("{at}.learning_rate.decay.factor"))?.unwrap_or(DECAY);
    let floor = ["min_lr", "training.min_lr"];
    let floor = keys.number(&floor, &format!("{at}.learning_rate.decay.floor"))?;
    let floor = floor.unwrap_or(LEAST_RATE);
    let pass = keys.whole(&["training.batch_size"], &format!("{at}.batch_size (a factor)"))?;
    let passes = ["training.gradient_accumulation_steps"];
    let passes = keys.whole(&passes, &format!("{at}.batch_size (a factor)"))?;
    let batch = u64::from(pass.unwrap_or(2)) * u64::from(passes.unwrap_or(16));
    let epochs = keys.whole(&["training.epochs"], &format!("{at}.epochs"))?.unwrap_or(1);
    let tokens = ["training.max_seq_length", "training.max_length"];
    let tokens = keys.whole(&tokens, &format!("{at}.max_tokens"))?.unwrap_or(2048);
    let weight_decay = keys.number(&["training.weight_decay"], &format!("{at}.weight_decay"))?;
    let norm = keys.number(&["training.max_grad_norm"], &format!("{at}.max_grad_norm"))?;
    let ratio = keys.number(&["training.warmup_ratio"], &format!("{at}.warmup_ratio"))?;
    let steps = keys.whole(&["training.warmup_steps"], &format!("{at}.warmup_ratio"))?;
    let ratio = match (ratio, steps) {
        (Some(ratio), _) => ratio,
        (None, Some(0)) => 0.0,
        (None, None) => 0.1,
        (None, Some(_)) => {
            let said =
                "a cycle has as many steps as it keeps samples for: warmup_ratio 0.1 of them";
            keys.renote(&["training.warmup_steps"], Fate::Ignored, said);
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

fn lora(keys: &mut Keys) -> Result<String, ImportError> {
    let rank = keys.whole(&["lora.r", "lora.rank"], "raft.lora.r")?.unwrap_or(16);
    let alpha = keys.number(&["lora.alpha", "lora.lora_alpha"], "raft.lora.alpha")?;
    let dropout = keys.number(&["lora.dropout", "lora.lora_dropout"], "raft.lora.dropout")?;
    let modules = keys.take(&["lora.target_modules"], "raft.lora.target_modules");
    let modules =
        modules.map(|(_, modules)| format!(", target_modules: {modules}")).unwrap_or_default();
    let (alpha, dropout) = (alpha.unwrap_or(32.0), dropout.unwrap_or(0.05));
    Ok(format!("{{ r: {rank}, alpha: {alpha:?}, dropout: {dropout:?}{modules} }}"))
}

fn curriculum(keys: &mut Keys) -> Result<(), ImportError> {
    const KEY: &str = "curriculum_strategy";
    let Some(strategy) = keys.text(&[KEY], "raft.curriculum")? else { return Ok(()) };
    let said = match strategy.as_str() {
        "none" => return Ok(()),
        "adaptive" | "historical" => {
            "choose by pass rate among more prompts than a cycle takes: set raft.prompts_per_cycle, \
             and raft.curriculum: { difficulty: {} } (docs/RAFT.md)"
        }
        _ => "prompts are ordered by how they turn out, not by how they look: see raft.curriculum",
    };
    keys.renote(&[KEY], Fate::Ignored, said);
    Ok(())
}
