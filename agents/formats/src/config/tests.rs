use super::*;

fn parsed(change: impl FnOnce(&mut Map<String, Value>)) -> Result<ModelConfig, ModelConfigError> {
    let mut map = json!({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 260,
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_theta": 5e5, "tie_word_embeddings": true, "eos_token_id": [256, 258],
    });
    let map = map.as_object_mut().unwrap();
    change(map);
    ModelConfig::from_json(map, Path::new("config.json"))
}

fn with(change: Value) -> Result<ModelConfig, ModelConfigError> {
    parsed(|map| map.extend(change.as_object().unwrap().clone()))
}

fn written_and_read(config: &ModelConfig) -> ModelConfig {
    ModelConfig::from_json(config.to_json().as_object().unwrap(), Path::new("")).unwrap()
}

#[test]
fn both_generations_of_rope_settings_are_read_and_written() {
    let old = parsed(|_| {}).unwrap();
    assert_eq!((old.rope_theta, old.eos_tokens.as_slice()), (5e5, [256, 258].as_slice()));
    let new = parsed(|map| {
        map.remove("rope_theta");
        map.insert("rope_parameters".into(), json!({"rope_theta": 5e5, "rope_type": "default"}));
    });
    assert_eq!(new.unwrap(), old);
    assert_eq!(written_and_read(&old), old);
}

#[test]
fn llama_s_scaling_is_read_from_both_generations() {
    let llama = json!({"model_type": "llama", "architectures": null, "attention_bias": true});
    let scaling = json!({
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    });
    let config = |field: &str, scaling: Value| {
        let mut change = llama.clone();
        change[field] = scaling;
        with(change).unwrap()
    };
    let old = config("rope_scaling", scaling.clone());
    let expected = RopeScaling {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    assert_eq!((old.rope_theta, old.rope_scaling), (5e5, Some(expected)));
    let mut new = scaling;
    new["rope_theta"] = json!(5e5);
    assert_eq!(config("rope_parameters", new), old);
    assert_eq!(written_and_read(&old), old);
    assert!(old.has_bias(LayerModule::Output) && !old.has_bias(LayerModule::Up));
}

#[test]
fn qwen3_s_heads_are_as_wide_as_its_file_says() {
    let qwen3 = |change: Value| {
        let mut all = json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]});
        all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        with(all).unwrap()
    };
    let config = qwen3(json!({"head_dim": 64}));
    assert_eq!((config.head_dim, config.has_bias(LayerModule::Query)), (64, false));
    assert_eq!(qwen3(json!({})).head_dim, 128);
    let biased = qwen3(json!({"attention_bias": true}));
    assert!(biased.has_bias(LayerModule::Query) && biased.has_bias(LayerModule::Output));
    assert_eq!(written_and_read(&biased), biased);
    // Two tables and norms of 128, q and o of 256 by 128, k and v of 128 by 128, three of 352 by
    // 128, and two head norms of 64.
    let untied = qwen3(json!({"head_dim": 64, "tie_word_embeddings": false}));
    let layer = 2 * 256 * 128 + 2 * 128 * 128 + 3 * 352 * 128 + 2 * 128 + 2 * 64;
    assert_eq!(untied.count_parameters(), 4 * layer + 2 * 260 * 128 + 128);
}

#[test]
fn a_window_that_no_layer_uses_does_not_matter() {
    let unused = json!({"use_sliding_window": false, "sliding_window": 32768});
    assert_eq!(with(unused).unwrap(), parsed(|_| {}).unwrap());
    let full = json!({"layer_types": vec!["full_attention"; 4], "sliding_window": null});
    assert_eq!(with(full).unwrap(), parsed(|_| {}).unwrap());
    let mixed = json!({"layer_types": ["full_attention", "sliding_attention"]});
    assert!(with(mixed).unwrap_err().to_string().contains("layer_types `sliding_attention`"));
}

#[test]
fn what_is_wrong_or_not_computed_is_refused_by_name() {
    let llama3 = |low: f64| {
        json!({
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": low,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        })
    };
    for (field, value, expected) in [
        ("model_type", json!("gemma3"), "model_type `gemma3`"),
        ("architectures", json!(["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
        ("hidden_size", Value::Null, "`hidden_size` is missing"),
        ("hidden_size", json!(-5), "`hidden_size` is -5"),
        ("num_hidden_layers", json!(1e18), "`num_hidden_layers`"),
        ("num_attention_heads", json!(0), "`num_attention_heads` is 0"),
        ("num_key_value_heads", json!(3), "a divisor of"),
        ("head_dim", json!(7), "an even number"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 1e4}}), "one rope for all"),
        ("rope_parameters", json!([1]), "an object"),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("rope_scaling", llama3(4.0), "more than low_freq_factor"),
        ("rope_scaling", json!({"rope_type": "llama3"}), "`factor` is missing"),
        ("use_sliding_window", json!(true), "use_sliding_window"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("eos_token_id", json!(260), "within vocab_size"),
        ("rms_norm_eps", json!("small"), "`rms_norm_eps`"),
        ("quantization_config", json!({"quant_method": "gptq"}), "gptq"),
    ] {
        let error = with(json!({field: value})).unwrap_err().to_string();
        assert!(error.contains(expected), "{field}: {error}");
    }
}

#[test]
fn what_the_tokenizer_calls_the_end_comes_first_if_generation_stops_there() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    };
    write("config.json", &with(json!({"eos_token_id": [1, 8, 9]})).unwrap().to_json());
    let ends = || ModelConfig::from_dir(dir.path()).unwrap().eos_tokens;
    assert_eq!(ends(), [1, 8, 9]);
    let added =
        json!({"added_tokens": [{"id": 9, "content": "<|eot|>"}, {"id": 7, "content": "x"}]});
    write("tokenizer.json", &added);
    write("tokenizer_config.json", &json!({"eos_token": {"content": "<|eot|>"}}));
    assert_eq!(ends(), [9, 1, 8]);
    let decoder = json!({"8": {"content": "<|eom|>"}});
    write(
        "tokenizer_config.json",
        &json!({"eos_token": "<|eom|>", "added_tokens_decoder": decoder}),
    );
    assert_eq!(ends(), [8, 1, 9]);
    write("tokenizer_config.json", &json!({"eos_token": "x"}));
    assert_eq!(ends(), [1, 8, 9], "generation does not stop at it");
    write("tokenizer_config.json", &json!({"eos_token": null}));
    assert_eq!(ends(), [1, 8, 9]);
}
